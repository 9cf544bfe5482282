//! What must not change a bit of a result: the neighbours in a batch, the layout, and how a mask is written.

use candle_attention::cpu::Tier;
use candle_core::{DType, Result, Tensor};

use crate::flash::fused::{Call, bits};
use crate::oracle::{Case, Dims};
use crate::recipe::{DTYPES, Kind, Layout, Recipe, for_all, kernel_recipes};

/// One sequence of a case, alone.
fn alone(case: &Case, b: usize) -> Case {
    let mut one = case.clone();
    one.dims.b = 1;
    one.masks.iter_mut().for_each(|mask| *mask = mask.of_sequence(b));
    one
}

/// Masks without tensors, which would have to be cut as well.
fn structural(draw: &mut Recipe) {
    draw.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !matches!(kind, Kind::Keep(_) | Kind::Bias(_))));
}

fn assert_batch_invariant(draw: &Recipe) -> std::result::Result<(), String> {
    let case = draw.case();
    let compare = || -> Result<_> {
        let whole = Call::fused(&case, draw.dtype)?;
        for b in 0..case.dims.b {
            let cut = |tensor: &Tensor| tensor.narrow(0, b, 1);
            let mut one = Call::fused(&alone(&case, b), draw.dtype)?;
            (one.q, one.k, one.v) = (cut(&whole.q)?, cut(&whole.k)?, cut(&whole.v)?);
            for tier in Tier::available() {
                let (context, lse) = whole.on_tier(tier).with_lse()?;
                let (one, one_lse) = one.on_tier(tier).with_lse()?;
                if bits(&one) != bits(&cut(&context)?) || bits(&one_lse) != bits(&cut(&lse)?) {
                    return Ok(Err(format!("{tier}: sequence {b} alone differs from itself in its batch")));
                }
            }
        }
        Ok(Ok(()))
    };
    compare().unwrap_or_else(|error| Err(error.to_string()))
}

#[test]
fn a_sequence_does_not_feel_its_batch() {
    for_all(64, kernel_recipes(), |mut draw| {
        structural(&mut draw);
        draw.dims.b = 3;
        assert_batch_invariant(&draw)
    });
}

/// Decoding, where a kernel may split the keys by how many workers are left.
#[test]
fn a_decoded_token_does_not_feel_its_batch() {
    for (b, h, h_kv, t_q, t_kv) in [(2, 8, 1, 1, 4100), (9, 4, 2, 1, 1030), (16, 1, 1, 2, 600), (2, 1, 1, 1, 9000)] {
        for dtype in DTYPES {
            let dims = Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 64 };
            let draw = Recipe::of_kernel(dims, vec![Kind::Causal], dtype);
            assert_batch_invariant(&draw).unwrap_or_else(|difference| panic!("{difference}\n{draw:?}"));
        }
    }
}

/// The same numbers under other strides give the same bits.
#[test]
fn a_layout_does_not_change_a_bit() -> Result<()> {
    for dtype in DTYPES {
        for (t_q, t_kv, d) in [(1, 200, 64), (37, 70, 40), (130, 129, 17)] {
            let mut draw =
                Recipe::of_kernel(Dims { b: 2, h: 4, h_kv: 2, t_q, t_kv, d, d_v: d }, vec![Kind::Causal], dtype);
            for layout in Layout::ALL {
                draw.layouts = [layout; 3];
                let viewed = Call::fused(&draw.case(), dtype)?;
                let mut packed = viewed.clone();
                for tensor in [&mut packed.q, &mut packed.k, &mut packed.v] {
                    *tensor = tensor.force_contiguous()?;
                }
                for tier in Tier::available() {
                    let (viewed, packed) = (viewed.on_tier(tier).with_lse()?, packed.on_tier(tier).with_lse()?);
                    let same = bits(&viewed.0) == bits(&packed.0) && bits(&viewed.1) == bits(&packed.1);
                    assert!(same, "{tier}: {layout:?} against contiguous tensors, {dtype:?}, {t_q} × {t_kv} × {d}");
                }
            }
        }
    }
    Ok(())
}

/// Grouped heads give the bits of repeated ones.
#[test]
fn a_group_gives_what_repeated_heads_give() -> Result<()> {
    for dtype in DTYPES {
        for (h, h_kv, t_q, t_kv) in [(8, 1, 1, 300), (8, 2, 33, 65), (6, 3, 7, 129), (8, 1, 128, 64)] {
            let dims = Dims { b: 1, h, h_kv, t_q, t_kv, d: 64, d_v: 32 };
            let call = Call::fused(&Recipe::of_kernel(dims, vec![Kind::Causal], dtype).case(), dtype)?;
            let repeat = |x: &Tensor| -> Result<Tensor> {
                let (b, h_kv, t, d) = x.dims4()?;
                x.unsqueeze(2)?.broadcast_as((b, h_kv, h / h_kv, t, d))?.reshape((b, h, t, d))
            };
            let repeated = Call { k: repeat(&call.k)?, v: repeat(&call.v)?, ..call.clone() };
            for tier in Tier::available() {
                let close = |one: &Tensor, other: &Tensor, most: f64| crate::common::max_error(one, other) <= most;
                let (one, other) = (call.on_tier(tier).with_lse()?, repeated.on_tier(tier).with_lse()?);
                // Rows of a group may share tiles, and so take their sums in another order.
                let most = if dtype == DType::F32 { 2e-6 } else { 2e-2 };
                let same = close(&one.0, &other.0, most) && close(&one.1, &other.1, 1e-5);
                assert!(same, "{tier}: {h} heads over {h_kv} in {dtype:?}");
            }
        }
    }
    Ok(())
}
