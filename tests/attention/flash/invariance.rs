//! What must not change a bit of a result: the neighbours in a batch, and the layout.

use candle_core::{DType, Result, Tensor};

use crate::call::{Call, Outcome, Path};
use crate::common::bits;
use crate::oracle::{Case, Dims};
use crate::recipe::{DTYPES, Kind, Layout, Recipe, for_all, kernel_recipes};

fn same_bits(one: &[Tensor], other: &[Tensor], what: &str) -> Outcome {
    match one.iter().map(bits).eq(other.iter().map(bits)) {
        true => Ok(()),
        false => Err(format!("{what}: other bits")),
    }
}

fn forward(call: &Call) -> Result<Vec<Tensor>> {
    let (context, lse) = call.with_lse()?;
    Ok(vec![context, lse])
}

/// Each sequence alone has the results that it has in its batch.
fn is_batch_invariant(case: &Case, dtype: DType) -> Result<Outcome> {
    for path in Path::kernels() {
        let whole = forward(&Call::fused(case, dtype)?.by(path))?;
        for b in 0..case.dims.b {
            let alone = forward(&Call::fused(&case.of_sequence(b), dtype)?.by(path))?;
            let own = whole.iter().map(|all| all.narrow(0, b, 1)).collect::<Result<Vec<_>>>()?;
            if let Err(difference) = same_bits(&alone, &own, &format!("{path:?}, sequence {b} alone")) {
                return Ok(Err(difference));
            }
        }
    }
    Ok(Ok(()))
}

#[test]
fn a_sequence_does_not_feel_its_batch() {
    for_all(64, kernel_recipes(), |mut recipe| {
        recipe.dims.b = 3;
        is_batch_invariant(&recipe.case(), recipe.dtype).unwrap_or_else(|error| Err(error.to_string()))
    });
}

/// Decoding, where a kernel may split the keys by how many workers are left.
#[test]
fn a_decoded_token_does_not_feel_its_batch() -> Result<()> {
    for (b, h, h_kv, t_q, t_kv) in [(2, 8, 1, 1, 4100), (9, 4, 2, 1, 1030), (16, 1, 1, 2, 600), (2, 1, 1, 1, 9000)] {
        for dtype in DTYPES {
            let recipe = Recipe::of_kernel(Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 64 }, vec![Kind::Causal], dtype);
            let outcome = is_batch_invariant(&recipe.case(), dtype)?;
            outcome.unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
        }
    }
    Ok(())
}

/// The same numbers under other strides give the same bits.
#[test]
fn a_layout_does_not_change_a_bit() -> Result<()> {
    for (dtype, (t_q, t_kv, d)) in
        DTYPES.into_iter().flat_map(|dtype| [(1, 200, 64), (37, 70, 40), (130, 129, 17)].map(|sizes| (dtype, sizes)))
    {
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q, t_kv, d, d_v: d };
        for layout in Layout::ALL {
            let recipe = Recipe { layouts: [layout; 3], ..Recipe::of_kernel(dims, vec![Kind::Causal], dtype) };
            let viewed = Call::fused(&recipe.case(), dtype)?;
            let [q, k, v] = [&viewed.q, &viewed.k, &viewed.v].map(Tensor::force_contiguous);
            let packed = Call { q: q?, k: k?, v: v?, ..viewed.clone() };
            for path in Path::kernels() {
                let (viewed, packed) = (forward(&viewed.by(path))?, forward(&packed.by(path))?);
                let what = format!("{path:?}: {layout:?} against contiguous tensors, {dtype:?}, {t_q} × {t_kv} × {d}");
                same_bits(&viewed, &packed, &what).unwrap_or_else(|difference| panic!("{difference}"));
            }
        }
    }
    Ok(())
}
