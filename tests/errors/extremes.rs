//! What is odd and allowed: sizes of zero, numbers without end, strides of every kind, each builder of weights. It gives
//! what the ordinary case would, or an error; never a panic.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AdditiveAttention, AdditiveAttentionConfig, AttentionInput, AttentionMask, EmptyRows, MultiHeadAttention,
    MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope, SdpaOptions, ValidLens, WeightLayout, masked_softmax,
    merge_attention, scaled_dot_product_attention,
};
use candle_core::{DType, Module, Result, Shape, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::{CPU, of, zeros};

/// Distinct numbers of both signs.
fn numbers(shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let count = shape.elem_count() as i64;
    let numbers = Tensor::arange(0, count, &CPU).and_then(|n| (n.to_dtype(DType::F32)? * 0.7)?.sin()?.reshape(shape));
    numbers.expect("numbers of any shape")
}

fn attend(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
    scaled_dot_product_attention(q, k, v, mask, options)
}

#[test]
fn sizes_of_zero_give_empty_results_or_zeros() -> Result<()> {
    let causal = AttentionMask::causal().with_window(2);
    for (b, t_q, t_kv, d_v) in [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (2, 0, 0, 5), (0, 0, 0, 0)] {
        let (q, k, v) = (numbers((b, 4, t_q, 6)), numbers((b, 2, t_kv, 6)), numbers((b, 2, t_kv, d_v)));
        let additive = AdditiveAttention::new(&AdditiveAttentionConfig::new(6, 6, 3), zero_weights(DType::F32))?;
        let one_head = |x: &Tensor| x.narrow(1, 0, 1)?.squeeze(1)?.contiguous();
        let output = additive.forward_with_weights(&one_head(&q)?, &one_head(&k)?, &one_head(&v)?, &causal)?;
        assert_eq!(
            (output.context.dims(), output.weights.dims()),
            ([b, t_q, d_v].as_slice(), [b, t_q, t_kv].as_slice())
        );

        for bias_kv in [false, true] {
            let cfg = MultiHeadAttentionConfig::new(6, 2).with_causal(true).with_bias_kv(bias_kv);
            let layer = MultiHeadAttention::new(&cfg, zero_weights(DType::F32))?;
            let (xs, ys) = (numbers((b, t_q, 6)), numbers((b, t_kv, 6)));
            let input = AttentionInput::new(&xs).with_key_value(&ys, &ys);
            let output = layer.forward_with_weights(input)?;
            assert_eq!(output.context.dims(), [b, t_q, 6]);
            assert_eq!(output.weights.dims(), [b, 2, t_q, t_kv + usize::from(bias_kv)]);
        }
    }
    let scores = masked_softmax(&zeros((2, 3, 0)), Some(&vec![4, 0].into()), EmptyRows::Uniform)?;
    assert_eq!(scores.dims(), [2, 3, 0]);
    Ok(())
}

/// Weights and sums do not depend on how wide the values are, be it nothing.
#[test]
fn values_of_no_width_leave_weights_and_sums_as_they_are() -> Result<()> {
    let none = AttentionMask::none();
    let additive = AdditiveAttention::new(&AdditiveAttentionConfig::new(4, 4, 3), zero_weights(DType::F32))?;
    let output = additive.forward_with_weights(&numbers((1, 3, 4)), &numbers((1, 5, 4)), &zeros((1, 5, 0)), &none)?;
    assert_close(&output.weights, &(Tensor::ones((1, 3, 5), DType::F32, &CPU)? / 5.0)?, 1e-7, "additive weights");

    let part = (zeros((1, 2, 3, 0)), zeros((1, 2, 3)));
    let (context, lse) = merge_attention(&[part.clone(), part])?;
    assert_eq!(context.dims(), [1, 2, 3, 0]);
    assert_close(&lse, &(zeros((1, 2, 3)) + 2f64.ln())?, 1e-6, "the sum of two parts");
    Ok(())
}

/// Tensors without elements whose other sizes are too large to address.
#[test]
fn empty_tensors_beyond_counting_are_refused() -> Result<()> {
    let (none, options) = (AttentionMask::causal(), SdpaOptions::default());
    for dims in [[usize::MAX, 1, 0, 4], [0, 2, 1 << 31, 1 << 30]] {
        let q = Tensor::zeros(&dims, DType::F32, &CPU)?;
        let expected =
            format!("[scaled_dot_product_attention] q {dims:?}, k {dims:?} and v {dims:?} are too large to address");
        assert_eq!(error_text(attend(&q, &q, &q, &none, &options)), expected);
    }
    let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(4, 2), zero_weights(DType::F32))?;
    for dims in [[usize::MAX, 0, 4], [0, 1 << 60, 4]] {
        let xs = Tensor::zeros(&dims, DType::F32, &CPU)?;
        let expected = format!("[multi_head_attention] queries {dims:?} and keys {dims:?} are too large to address");
        assert_eq!(error_text(layer.forward(&xs)), expected);
    }
    Ok(())
}

/// A tensor of the same values whose memory is laid out otherwise.
fn strided(tensor: &Tensor) -> Result<Vec<(&'static str, Tensor)>> {
    let last = tensor.rank() - 1;
    let mut every_second = tensor.dims().to_vec();
    every_second.push(2);
    let gaps = tensor.unsqueeze(last + 1)?.broadcast_as(every_second)?.contiguous()?.narrow(last + 1, 1, 1)?;
    let mut all = vec![
        ("gaps between the elements", gaps.squeeze(last + 1)?),
        ("an offset", Tensor::cat(&[tensor, tensor], 0)?.narrow(0, tensor.dim(0)?, tensor.dim(0)?)?),
    ];
    if last > 0 {
        all.push((
            "a last dimension that is not contiguous",
            tensor.transpose(last - 1, last)?.contiguous()?.transpose(last - 1, last)?,
        ));
        all.push(("another order", tensor.transpose(0, last)?.contiguous()?.transpose(0, last)?));
    }
    Ok(all)
}

#[test]
fn strides_make_no_difference() -> Result<()> {
    let (q, k, v) = (numbers((2, 4, 3, 6)), numbers((2, 2, 5, 6)), numbers((2, 2, 5, 3)));
    let (keep, bias) = (numbers((2, 1, 3, 5)).gt(0f32)?, numbers((4, 3, 5)));
    let (slopes, sinks) = (numbers(4), numbers(4));
    let masked = |keep: &Tensor, bias: &Tensor| AttentionMask::causal().with_keep(keep).with_bias(bias);
    let with = |slopes: &Tensor, sinks: &Tensor| SdpaOptions::default().with_alibi_slopes(slopes).with_sinks(sinks);
    let (mask, options) = (masked(&keep, &bias), with(&slopes, &sinks));
    let expected = attend(&q, &k, &v, &mask, &options)?;
    let close = |got: Result<Tensor>, what: &str| -> Result<()> {
        assert_close(&got?, &expected, 1e-6, what);
        Ok(())
    };
    for (what, keep) in strided(&keep)? {
        close(attend(&q, &k, &v, &masked(&keep, &bias), &options), &format!("keep with {what}"))?;
    }
    for (what, bias) in strided(&bias)? {
        close(attend(&q, &k, &v, &masked(&keep, &bias), &options), &format!("bias with {what}"))?;
    }
    for (what, logits) in strided(&slopes)? {
        close(attend(&q, &k, &v, &mask, &with(&logits, &logits)), &format!("slopes and sinks with {what}"))?;
    }
    Ok(())
}

#[test]
fn strides_of_zero_make_no_difference() -> Result<()> {
    let (none, options) = (AttentionMask::none(), SdpaOptions::default());
    let (q, k) = (numbers((1, 1, 3, 6)).broadcast_as((2, 4, 3, 6))?, numbers((1, 1, 1, 6)).broadcast_as((2, 2, 5, 6))?);
    let v = numbers((2, 2, 5, 1)).broadcast_as((2, 2, 5, 6))?;
    let expected = attend(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, &none, &options)?;
    assert_close(&attend(&q, &k, &v, &none, &options)?, &expected, 1e-6, "q, k and v");

    let keep = of(DType::U8, (1, 1)).broadcast_as((3, 5))?;
    let zeros = attend(&q, &k, &v, &AttentionMask::none().with_keep(&keep), &options)?;
    assert_close(&zeros, &expected.zeros_like()?, 0.0, "keep");
    let lens = Tensor::new(&[2i64], &CPU)?.broadcast_as(2)?;
    let cut = attend(&q, &k, &v, &AttentionMask::none().with_valid_lens(ValidLens::from_tensor(&lens)?), &options)?;
    let two = AttentionMask::none().with_valid_lens(vec![2, 2]);
    assert_close(&cut, &attend(&q, &k, &v, &two, &options)?, 0.0, "lengths");

    let vars = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
    let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(6, 2), vars)?;
    let xs = numbers((1, 3, 6)).broadcast_as((4, 3, 6))?;
    assert_close(&layer.forward(&xs)?, &layer.forward(&xs.contiguous()?)?, 0.0, "the layer's input");
    for (what, xs) in strided(&numbers((4, 3, 6)))? {
        assert_close(&layer.forward(&xs)?, &layer.forward(&xs.contiguous()?)?, 1e-6, what);
    }
    Ok(())
}

/// Attention by hand, in f64, of one query (1, 0) against the keys (1, 0) and (0, 1) and a learned key of zeros.
#[test]
fn a_bias_in_double_precision_keeps_its_digits_beside_a_learned_key() -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(2, 1).with_out_proj(false).with_bias_kv(true).with_scale(1.0);
    let eye = Tensor::eye(2, DType::F64, &CPU)?;
    let tensors = ["q_proj", "k_proj", "v_proj"].map(|name| (format!("{name}.weight"), eye.clone()));
    let learned = ["bias_k", "bias_v"].map(|name| (name.to_string(), zeros((1, 1, 2))));
    let vb = VarBuilder::from_tensors(tensors.into_iter().chain(learned).collect(), DType::F64, &CPU);
    let layer = MultiHeadAttention::new(&cfg, vb)?;
    let tiny = 1e-12;
    let mask = AttentionMask::none().with_bias(&Tensor::new(&[[0f64, 1.0 + tiny], [0.0, 0.0]], &CPU)?);
    let output = layer.forward_with_weights(AttentionInput::new(&eye).with_mask(&mask))?;
    let first = values(&output.weights.narrow(1, 0, 1)?);
    // The logits are 1, 1 + tiny and 0.
    assert!((first[1] / first[0] - tiny.exp()).abs() < 1e-15, "{first:?}");
    Ok(())
}

#[test]
fn every_norm_has_every_dtype() -> Result<()> {
    let xs = numbers((1, 3, 8));
    for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::Layer, QkNormKind::LayerNoBias] {
        for scope in [QkNormScope::PerHead, QkNormScope::PerHeadWeights, QkNormScope::Projection] {
            let cfg = MultiHeadAttentionConfig::new(8, 2).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 });
            let seed = TorchSeed::new(5);
            let run = |dtype: DType| {
                let layer = MultiHeadAttention::new(&cfg, seed.var_builder(dtype, &CPU))?;
                layer.forward(&xs.to_dtype(dtype)?)?.to_dtype(DType::F64)
            };
            let exact = run(DType::F64)?;
            for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F16, 2e-3), (DType::BF16, 2e-2)] {
                assert_close(&run(dtype)?, &exact, tolerance, &format!("{kind:?} {scope:?} in {dtype:?}"));
            }
        }
    }
    Ok(())
}

fn zero_weights(dtype: DType) -> VarBuilder<'static> {
    VarBuilder::zeros(dtype, &CPU)
}

type Builder = fn() -> VarBuilder<'static>;

const BUILDERS: [(&str, Builder); 3] = [
    ("zeros", || zero_weights(DType::F32)),
    ("variables", || VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)),
    ("a seed", || TorchSeed::new(1).var_builder(DType::F32, &CPU)),
];

#[test]
fn every_builder_gives_every_layout_and_gives_it_again() -> Result<()> {
    for layout in WeightLayout::all() {
        let stack = matches!(layout, WeightLayout::StackedHeads(..));
        let cfg = MultiHeadAttentionConfig::new(8, 2).with_out_proj(!stack);
        for (what, builder) in BUILDERS {
            let vb = builder();
            let first = MultiHeadAttention::load(&cfg, layout, vb.pp("attn"))?;
            let again = MultiHeadAttention::load(&cfg, layout, vb.pp("attn"))?;
            let xs = numbers((1, 3, 8));
            assert_close(&again.forward(&xs)?, &first.forward(&xs)?, 0.0, &format!("{layout} from {what}"));
        }
    }
    Ok(())
}

#[test]
fn no_builder_panics_for_sizes_beyond_memory() {
    let most = u32::MAX as usize;
    let cfg = MultiHeadAttentionConfig::new(most, 1).with_num_kv_heads(1);
    let wide = MultiHeadAttentionConfig::new(2, most).with_head_dim(most).with_value_head_dim(most);
    for layout in WeightLayout::all() {
        for (what, builder) in BUILDERS {
            for cfg in [&cfg, &cfg.clone().with_out_proj(false), &wide, &wide.clone().with_out_proj(false)] {
                assert!(MultiHeadAttention::load(cfg, layout, builder()).is_err(), "{layout} from {what}");
            }
        }
    }
}

#[test]
fn a_second_config_over_the_same_variables_leaves_nothing_out() -> Result<()> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
    MultiHeadAttention::new(&MultiHeadAttentionConfig::new(8, 2).with_qkv_bias(true), vb.clone())?;
    let error = error_text(MultiHeadAttention::new(&MultiHeadAttentionConfig::new(8, 2), vb));
    let expected = "[multi_head_attention] q_proj.bias is in the file, but the config says there is no such bias (layout canonical)";
    assert_eq!(error, expected);
    Ok(())
}

/// `Module` is not there for a reason; a reference to a layer still fits a function that takes a closure.
#[test]
fn a_layer_is_called_as_a_closure() -> Result<()> {
    let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(8, 2), zero_weights(DType::F32))?;
    let forward = |xs: &Tensor| layer.forward(xs);
    assert_eq!(forward.forward(&numbers((1, 3, 8)))?.dims(), [1, 3, 8]);
    Ok(())
}
