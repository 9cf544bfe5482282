//! `gated_delta_rule`, for batches and for packed sequences.

use crate::wrong::Fitting;
use crate::*;

const F32: DType = DType::F32;

/// Of q, k, v, decay, beta and the state.
fn rule(tensors: &[Tensor], options: &DeltaOptions) -> Result<(Tensor, Tensor)> {
    let [q, k, v, decay, beta, state] = tensors else { panic!("six tensors") };
    gated_delta_rule(q, k, v, Some(decay), Some(beta), Some(state), options)
}

fn varlen(tensors: &[Tensor], sequences: &PackedSequences) -> Result<(Tensor, Tensor)> {
    let [q, k, v, decay, beta, state] = tensors else { panic!("six tensors") };
    gated_delta_rule_varlen(q, k, v, Some(decay), Some(beta), Some(state), sequences, &DeltaOptions::default())
}

#[test]
fn tensors() -> Result<()> {
    let dims: [Fitting; 6] = [
        ("q", F32, "B K T D"),
        ("k", F32, "B K T D"),
        ("v", F32, "B H T V"),
        ("decay", F32, "B H T"),
        ("beta", F32, "B H T"),
        ("state", F32, "B H D V"),
    ];
    let wrong = wrong::tensors("B 2 K 2 H 4 T 3 D 8 V 6", &dims, |tensors| rule(tensors, &DeltaOptions::default()));
    let packed: [Fitting; 6] = [
        ("q", F32, "T K D"),
        ("k", F32, "T K D"),
        ("v", F32, "T H V"),
        ("decay", F32, "T H D"),
        ("beta", F32, "T H"),
        ("state", F32, "N H D V"),
    ];
    let sequences = PackedSequences::self_attention(vec![0, 2, 5])?;
    let of_packed = wrong::tensors("N 2 K 2 H 4 T 5 D 8 V 6", &packed, |tensors| varlen(tensors, &sequences));
    let all = packed.map(|(_, dtype, dims)| {
        let sizes = dims.split(' ').map(|dim| ["T", "N", "K", "H", "D", "V"].iter().position(|of| *of == dim));
        of(dtype, sizes.map(|at| [5, 2, 2, 4, 8, 6][at.expect("a letter")]).collect::<Vec<_>>())
    });
    let lengths = cases! {
        "other keys than queries" => varlen(&all, &PackedSequences::new(vec![0, 2, 5], vec![0, 3, 5])?),
        "fewer tokens than there are" => varlen(&all, &PackedSequences::self_attention(vec![0, 2, 4])?),
    };
    let dtypes = each("all in", [DType::I64, DType::F8E4M3], |dtype| {
        let xs = of(dtype, (1, 2, 5, 4));
        gated_delta_rule(&xs, &xs, &xs, None, None, None, &DeltaOptions::default())
    });
    let one = zeros(1);
    let heads = each("heads of q, k and v", [[3, 2, 4], [6, 4, 4], [2, 3, 4], [4, 0, 0]], |heads| {
        let [q, k, v] = heads.map(|h| zeros((1, h, 5, 4)));
        gated_delta_rule(&q, &k, &v, None, None, None, &DeltaOptions::default())
    });
    let sizes = each("sizes of q", [[1, 1 << 50, 1, 1], [1, 1, 1 << 50, 1], [1 << 50, 1, 1, 1]], |dims| {
        let q = one.broadcast_as(&dims[..])?;
        gated_delta_rule(&q, &q, &q, None, None, None, &DeltaOptions::default())
    });
    assert_reviewed("delta_tensors", &[wrong, of_packed, lengths, dtypes, heads, sizes]);
    Ok(())
}

#[test]
fn options_of_a_call() {
    let with = |dtype, options: DeltaOptions| {
        let xs = of(dtype, (1, 2, 5, 4));
        gated_delta_rule(&xs, &xs, &xs, None, None, None, &options)
    };
    let numbers = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e39];
    let scales = each("scale", numbers, |scale| with(F32, DeltaOptions::default().with_scale(scale)));
    let norms = each("qk_norm", [-1e-6, f64::NAN, f64::INFINITY, 1e39], |eps| {
        with(F32, DeltaOptions::default().with_qk_norm(eps))
    });
    let fused = each("a fused kernel for", [DType::F64], |dtype| {
        with(dtype, DeltaOptions::default().with_backend(Backend::Fused))
    });
    let gradients = each("gradients of so many tokens", [4097], |t| {
        let q = candle_core::Var::from_tensor(&of(DType::F64, (1, 1, t, 2)))?;
        gated_delta_rule(&q, &q, &q, None, None, None, &DeltaOptions::default())
    });
    assert_reviewed("delta_options", &[scales, norms, fused, gradients]);
}
