//! What must not change a bit of a result: the neighbours in a batch, and the layout.

use crate::*;

fn same_bits(one: &[Tensor], other: &[Tensor], what: &str) -> Result<()> {
    if !one.iter().map(bits).eq(other.iter().map(bits)) {
        bail!("{what}: other bits");
    }
    Ok(())
}

fn forward(call: &Call) -> Result<Vec<Tensor>> {
    let (context, lse) = call.with_lse()?;
    Ok(vec![context, lse])
}

/// The results, and the gradients of the queries, keys and values.
fn with_gradients(call: &Call) -> Result<Vec<Tensor>> {
    let vars = [&call.q, &call.k, &call.v].map(|xs| Var::from_tensor(&xs.contiguous()?));
    let [q, k, v] = vars;
    let (q, k, v) = (q?, k?, v?);
    let [of_q, of_k, of_v] = [&q, &k, &v].map(|var| var.as_tensor().clone());
    let store = Call { q: of_q, k: of_k, v: of_v, ..call.clone() }.context()?.sqr()?.sum_all()?.backward()?;
    let gradients = [&q, &k, &v].map(|var| store.get(var).cloned().map_or_else(|| var.zeros_like(), Ok));
    forward(call)?.into_iter().map(Ok).chain(gradients).collect()
}

/// Each sequence alone has the results and gradients that it has in its batch.
fn is_batch_invariant(case: &Case, dtype: DType) -> Result<()> {
    for path in Path::kernels() {
        let whole = with_gradients(&Call::fused(case, dtype)?.by(path))?;
        for b in 0..case.dims.b {
            let alone = with_gradients(&Call::fused(&case.of_sequence(b), dtype)?.by(path))?;
            let own = whole.iter().map(|all| all.narrow(0, b, 1)).collect::<Result<Vec<_>>>()?;
            same_bits(&alone, &own, &format!("{path:?}, sequence {b} alone"))?;
        }
    }
    Ok(())
}

#[test]
fn a_sequence_does_not_feel_its_batch() {
    for_all(64, kernel_recipes(), |mut recipe| {
        recipe.dims.b = 3;
        is_batch_invariant(&recipe.case(), recipe.dtype)
    });
}

/// Decoding, where a kernel may split the keys by how many workers are left.
#[test]
fn a_decoded_token_does_not_feel_its_batch() -> Result<()> {
    for (b, h, h_kv, t_q, t_kv) in [(2, 8, 1, 1, 4100), (3, 4, 2, 1, 1030), (7, 1, 1, 2, 300), (2, 1, 1, 1, 9000)] {
        for dtype in DTYPES {
            let recipe = Recipe::of_kernel(Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 64 }, vec![Kind::Causal], dtype);
            is_batch_invariant(&recipe.case(), dtype).map_err(|error| error.context(format!("{recipe:?}")))?;
        }
    }
    Ok(())
}

/// The same numbers under other strides give the same bits: rows of half precision that begin at an odd element too,
/// where a word of two of them is not aligned.
#[test]
fn a_layout_does_not_change_a_bit() -> Result<()> {
    let sizes = [(1, 200, 64), (37, 70, 40), (130, 129, 17), (40, 300, 32), (40, 300, 128)];
    for (dtype, (t_q, t_kv, d)) in DTYPES.into_iter().flat_map(|dtype| sizes.map(|sizes| (dtype, sizes))) {
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q, t_kv, d, d_v: d };
        for layout in Layout::ALL {
            let recipe = Recipe { layouts: [layout; 3], ..Recipe::of_kernel(dims, vec![Kind::Causal], dtype) };
            let viewed = Call::fused(&recipe.case(), dtype)?;
            let [q, k, v] = [&viewed.q, &viewed.k, &viewed.v].map(Tensor::force_contiguous);
            let packed = Call { q: q?, k: k?, v: v?, ..viewed.clone() };
            for path in Path::kernels() {
                let (viewed, packed) = (forward(&viewed.by(path))?, forward(&packed.by(path))?);
                let what = format!("{path:?}: {layout:?} against contiguous tensors, {dtype:?}, {t_q} × {t_kv} × {d}");
                same_bits(&viewed, &packed, &what)?;
            }
        }
    }
    Ok(())
}
