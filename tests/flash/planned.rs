//! What `plan` says of the kernel is what happens.

use candle_attention::cpu::Tier;
use candle_attention::{
    AttentionMask, Backend, EmptyRows, OutputOrder, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Result, Tensor, Var};

use crate::common::{error_text, max_error};
use crate::draw::{Draw, draws};
use crate::fused::{CPU, Call, DTYPES};
use crate::oracle::Dims;
use crate::recipe::{Kind, for_all};

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 9, d: 16, d_v: 8 };

fn call(dtype: DType) -> Call {
    Call::new(&Draw::plain(DIMS, vec![Kind::Causal], dtype).case(), dtype).expect("tensors")
}

fn automatic(call: Call) -> Call {
    call.with(|options| options.with_backend(Backend::Auto))
}

/// Whether a sentence has the word, and not only a longer one.
pub fn has_word(sentence: &str, word: &str) -> bool {
    sentence.split(|c: char| !c.is_ascii_alphanumeric()).any(|other| other == word)
}

/// Every random call that the kernel takes, asked for or not; the reason names the tier, forced or chosen.
#[test]
fn whatever_the_kernel_can_do_is_planned_for_it() {
    for_all(300, draws(), |draw| {
        let call = Call::new(&draw.case(), draw.dtype()).map_err(|error| error.to_string())?;
        for backend in [Backend::Auto, Backend::Fused] {
            let call = call.clone().with(|options| options.with_backend(backend));
            let planned = |call: &Call| {
                plan(&call.q, &call.k, &call.v, &call.mask, &call.options).map_err(|error| error.to_string())
            };
            let chosen = planned(&call)?;
            let names_one = Tier::available().into_iter().any(|tier| has_word(&chosen.reason, &tier.to_string()));
            if chosen.backend != Backend::Fused || !names_one {
                return Err(format!("{backend:?} is planned as {chosen}"));
            }
            for tier in Tier::available() {
                let forced = planned(&call.on_tier(tier))?;
                if forced.backend != Backend::Fused || !has_word(&forced.reason, &tier.to_string()) {
                    return Err(format!("{backend:?} on {tier} is planned as {forced}"));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn auto_runs_the_kernel() -> Result<()> {
    for dtype in DTYPES {
        let auto = automatic(call(dtype)).with_lse()?;
        let fused = call(dtype).with_lse()?;
        assert_eq!((max_error(&auto.0, &fused.0), max_error(&auto.1, &fused.1)), (0.0, 0.0), "{dtype:?}");
    }
    Ok(())
}

/// A call that only the reference path can run, for a reason that holds this word.
fn assert_reference(what: &str, call: &Call, word: &str) -> Result<()> {
    let auto = automatic(call.clone());
    let Call { q, k, v, mask, options } = &auto;
    let planned = plan(q, k, v, mask, options)?;
    assert_eq!(planned.backend, Backend::Reference, "{what}: {planned}");
    let lower = planned.reason.to_lowercase();
    assert!(lower.contains(word), "{what}: the reason is {:?}, and does not speak of {word}", planned.reason);
    scaled_dot_product_attention(q, k, v, mask, options)?;
    scaled_dot_product_attention_with_lse(q, k, v, mask, options)?;

    let options = &options.clone().with_backend(Backend::Fused);
    let expected = |op: &str| format!("[{op}] no fused path: {}", planned.reason);
    assert_eq!(error_text(plan(q, k, v, mask, options)), expected("plan"), "{what}");
    let op = "scaled_dot_product_attention";
    assert_eq!(error_text(scaled_dot_product_attention(q, k, v, mask, options)), expected(op), "{what}");
    let op = "scaled_dot_product_attention_with_lse";
    assert_eq!(error_text(scaled_dot_product_attention_with_lse(q, k, v, mask, options)), expected(op), "{what}");
    Ok(())
}

#[test]
fn what_the_kernel_cannot_do_falls_back_for_a_reason() -> Result<()> {
    assert_reference("f64", &call(DType::F64), "f64")?;
    for dtype in DTYPES {
        let plain = || call(dtype);
        assert_reference("dropout", &plain().with(|options| options.with_dropout(0.1, true)), "dropout")?;
        let uniform = AttentionMask::causal().with_empty_rows(EmptyRows::Uniform);
        assert_reference("uniform rows", &Call { mask: uniform, ..plain() }, "see nothing")?;
        let var = |tensor: &Tensor| Var::from_tensor(tensor).expect("a variable").into_inner();
        let heads = Tensor::ones(4, DType::F32, &CPU)?;
        let bias = Tensor::zeros((5, 9), DType::F32, &CPU)?;
        for (what, tracked) in [
            ("q", Call { q: var(&plain().q), ..plain() }),
            ("k", Call { k: var(&plain().k), ..plain() }),
            ("v", Call { v: var(&plain().v), ..plain() }),
            ("a bias", Call { mask: AttentionMask::none().with_bias(&var(&bias)), ..plain() }),
            ("slopes", plain().with(|options| options.with_alibi_slopes(&var(&heads)))),
            ("sinks", plain().with(|options| options.with_sinks(&var(&heads)))),
        ] {
            assert_reference(what, &tracked, "gradients")?;
        }
        // Forcing a tier does not change what the kernel can do.
        let forced = plain().with(|options| options.with_dropout(0.1, true)).on_tier(Tier::Scalar);
        assert_reference("dropout on a tier", &forced, "dropout")?;
    }
    Ok(())
}

/// Dropout that is not in training, or of probability 0, drops nothing.
#[test]
fn dropout_that_does_not_happen_is_no_obstacle() -> Result<()> {
    for dtype in DTYPES {
        for (p, train) in [(0.5, false), (0.0, true)] {
            let Call { q, k, v, mask, options } = call(dtype).with(|options| options.with_dropout(p, train));
            assert_eq!(plan(&q, &k, &v, &mask, &options)?.backend, Backend::Fused);
            scaled_dot_product_attention(&q, &k, &v, &mask, &options)?;
        }
    }
    Ok(())
}

/// Weights are what a fused kernel never has: asked for, they come from the reference path, or not at all.
#[test]
fn weights_come_from_the_reference_path() -> Result<()> {
    for dtype in DTYPES {
        let Call { q, k, v, mask, options } = call(dtype);
        let auto = options.clone().with_backend(Backend::Auto);
        let reference = options.clone().with_backend(Backend::Reference);
        let got = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &auto)?;
        let expected = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &reference)?;
        assert_eq!(max_error(&got.weights, &expected.weights), 0.0);
        assert_eq!(max_error(&got.context, &expected.context), 0.0);
        let error = error_text(scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options));
        let start = "[scaled_dot_product_attention_with_weights] no fused path: ";
        assert!(error.starts_with(start) && error.contains("weights"), "{error}");
    }
    Ok(())
}

/// Whatever is asked for: a tier that the processor lacks is an error of the call, on any backend that would use it.
#[test]
fn a_tier_that_the_processor_lacks_is_an_error() -> Result<()> {
    let available: Vec<_> = Tier::available().iter().map(Tier::to_string).collect();
    let lacking: Vec<_> = Tier::ALL.into_iter().filter(|tier| !tier.is_available()).collect();
    assert!(!lacking.is_empty(), "no processor has both Arm's and Intel's instructions");
    for tier in lacking {
        for dtype in DTYPES {
            for backend in [Backend::Auto, Backend::Fused] {
                let Call { q, k, v, mask, options } = call(dtype).on_tier(tier);
                let options = &options.with_backend(backend);
                let expected = |op: &str| {
                    let expected = available.join(", ");
                    format!("[{op}] this processor lacks the CPU tier {tier}, expected one of {expected}")
                };
                assert_eq!(error_text(plan(&q, &k, &v, &mask, options)), expected("plan"));
                let op = "scaled_dot_product_attention";
                assert_eq!(error_text(scaled_dot_product_attention(&q, &k, &v, &mask, options)), expected(op));
                let op = "scaled_dot_product_attention_with_lse";
                assert_eq!(error_text(scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, options)), expected(op));
            }
        }
    }
    Ok(())
}

/// The order of memory is the reference path's too.
#[test]
fn the_reference_path_gives_the_same_orders() -> Result<()> {
    for order in [OutputOrder::Bhtd, OutputOrder::Bthd] {
        let (fused, reference) = (call(DType::F32).in_order(order), call(DType::F32).in_order(order).on_reference());
        assert_eq!(fused.context()?.stride(), reference.context()?.stride());
    }
    Ok(())
}
