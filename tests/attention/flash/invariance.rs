//! What must not change a bit of a result: the neighbours in a batch, the layout, and how a mask is written.

use candle_attention::cpu::Tier;
use candle_core::{Result, Tensor};

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
        // Tensors would have to be cut as well.
        draw.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !kind.is_tensor()));
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
