//! Changes that must not change a bit of a result: other sequences in the batch, and another layout.

use crate::gradients::{Attention, Function};
use crate::*;

/// Checks that each sequence alone has the results and gradients that it has in its batch.
fn is_batch_invariant(recipe: &Recipe) -> Result<()> {
    let Recipe { dims, dtype, .. } = *recipe;
    let case = Recipe { layouts: [Layout::Contiguous; 3], ..recipe.clone() }.case();
    // All results count alike, in whichever sequence.
    let factors = vec![1.0; dims.b * dims.h * dims.t_q * (dims.d_v + 1)];
    Path::kernels().into_iter().try_for_each(|path| {
        let run = |batch: Case| {
            let call = Attention::new(batch, Function::Lse).counted(factors.clone());
            backward(&call, &(dtype, path), |name| ["q", "k", "v"].contains(&name))
        };
        let whole = run(case.clone())?;
        (0..dims.b).try_for_each(|b| {
            let own = |all: &Named| -> Result<Named> {
                all.iter().map(|(name, x)| Ok((name.clone(), x.narrow(0, b % x.dim(0)?, 1)?))).collect()
            };
            let alone = run(case.of_sequence(b))?;
            are_same(&own(&alone)?, &own(&whole)?)
                .map_err(|error| error.context(format!("{path:?}, sequence {b} alone")))
        })
    })
}

#[test]
fn output_bits_of_sequence_do_not_depend_on_batch() {
    for_all(64, kernel_recipes(), |mut recipe| {
        recipe.dims.b = 3;
        is_batch_invariant(&recipe)
    });
}

/// Checks calls of a few queries and many keys, whose keys a kernel may split by the number of idle workers.
#[test]
fn output_bits_of_decoded_token_do_not_depend_on_batch() -> Result<()> {
    let few = (2, 8, 2, 9, 2100);
    for (b, h, h_kv, t_q, t_kv) in [(2, 8, 1, 1, 4100), (3, 4, 2, 1, 1030), (7, 1, 1, 2, 300), (2, 1, 1, 1, 9000), few]
    {
        for dtype in DTYPES {
            let recipe = Recipe::of_kernel(Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 64 }, vec![Kind::Causal], dtype);
            is_batch_invariant(&recipe).map_err(|error| error.context(format!("{recipe:?}")))?;
        }
    }
    Ok(())
}

/// Checks rows in half precision that begin at an odd element too, where a word of two elements is not aligned.
#[test]
fn output_bits_do_not_depend_on_strides() -> Result<()> {
    let sizes = [(1, 200, 64), (37, 70, 40), (130, 129, 17), (40, 300, 32), (40, 300, 128)];
    for (dtype, (t_q, t_kv, d)) in DTYPES.into_iter().flat_map(|dtype| sizes.map(|sizes| (dtype, sizes))) {
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q, t_kv, d, d_v: d };
        for layout in Layout::ALL {
            let recipe = Recipe { layouts: [layout; 3], ..Recipe::of_kernel(dims, vec![Kind::Causal], dtype) };
            let viewed = Call::fused(&recipe.case(), dtype)?;
            let [q, k, v] = [&viewed.q, &viewed.k, &viewed.v].map(Tensor::force_contiguous);
            let packed = Call { q: q?, k: k?, v: v?, ..viewed.clone() };
            for path in Path::kernels() {
                let viewed = viewed.by(path).with_lse()?;
                let packed = packed.by(path).with_lse()?;
                let is_same = bits(&viewed.0) == bits(&packed.0) && bits(&viewed.1) == bits(&packed.1);
                assert!(is_same, "{path:?}: {layout:?} against contiguous tensors, {dtype:?}, {t_q} × {t_kv} × {d}");
            }
        }
    }
    Ok(())
}
