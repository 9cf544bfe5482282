//! The stand-in's `metal_fwd` of candle-nn's operations: the checks of candle-nn 0.11.1's own `metal_fwd`, then the
//! operation's `cpu_fwd`. `Sdpa` has no `cpu_fwd`, and is computed here.
use candle::backend::BackendStorage;
use candle::{CpuStorage, DType, Layout, MetalStorage, Result, Shape};

type Metal<'a> = (&'a MetalStorage, &'a Layout);
type Made = Result<(MetalStorage, Shape)>;

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Returns the result of the CPU as a buffer on the device of an input.
fn made(of: &MetalStorage, result: Result<(CpuStorage, Shape)>) -> Made {
    let (storage, shape) = result?;
    Ok((MetalStorage::launched(storage, of.device()), shape))
}

/// Computes `sigmoid` (ops.rs:138).
pub fn sigmoid((s, l): Metal, f: impl Fn(&CpuStorage, &Layout) -> Result<(CpuStorage, Shape)>) -> Made {
    if !is_float(s.dtype()) {
        let word = if l.is_contiguous() { "contiguous" } else { "strided" };
        candle::bail!("Metal {word} unary sigmoid {:?} not implemented", s.dtype())
    }
    made(s, f(&s.numbers(), l))
}

/// Computes `softmax_last_dim` (ops.rs:390).
pub fn softmax((s, l): Metal, f: impl Fn(&CpuStorage, &Layout) -> Result<(CpuStorage, Shape)>) -> Made {
    if !is_float(s.dtype()) {
        candle::bail!("softmax-last-dim is not implemented for {:?}", s.dtype())
    }
    if !(l.is_contiguous() && l.stride().last() == Some(&1)) {
        candle::bail!("Non contiguous softmax-last-dim is not implemented")
    }
    made(s, f(&s.numbers(), l))
}

/// Computes `rms_norm` (ops.rs:611) or `layer_norm` (ops.rs:856) of contiguous tensors of one dtype.
pub fn norm(
    name: &str,
    inputs: &[Metal],
    f: impl Fn(&[std::sync::Arc<CpuStorage>]) -> Result<(CpuStorage, Shape)>,
) -> Made {
    let dtypes: Vec<_> = inputs.iter().map(|(s, _)| s.dtype()).collect();
    if !is_float(dtypes[0]) || dtypes.iter().any(|dtype| *dtype != dtypes[0]) {
        let listed: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
        candle::bail!("{name} is not implemented for {}", listed.join(" "))
    }
    if inputs.iter().any(|(_, l)| !l.is_contiguous()) {
        candle::bail!("Non contiguous {name} is not implemented")
    }
    let numbers: Vec<_> = inputs.iter().map(|(s, _)| s.numbers()).collect();
    made(inputs[0].0, f(&numbers))
}

/// Computes a rotation (rotary_emb.rs:187, :492, :766) of contiguous tensors, as the functions that call it check.
pub fn rope(
    name: &str,
    inputs: [Metal; 3],
    f: impl Fn(&[std::sync::Arc<CpuStorage>]) -> Result<(CpuStorage, Shape)>,
) -> Made {
    let [a, b, c] = [0, 1, 2].map(|i| inputs[i].0.dtype());
    if a != b || a != c {
        candle::bail!("dtype mismatch in {name} {a:?} {b:?} {c:?}")
    }
    if !is_float(a) {
        candle::bail!("{name} is not implemented for {a:?}")
    }
    let numbers: Vec<_> = inputs.iter().map(|(s, _)| s.numbers()).collect();
    made(inputs[0].0, f(&numbers))
}

/// Computes `sdpa` (ops.rs:1033) without masks. For one query, the rows of q, k and v are read as contiguous, and the
/// heads of k and v by the stride of the heads alone (candle-metal-kernels/src/kernels/sdpa.rs, issue 3703 of
/// huggingface/candle); for several queries, all by their strides.
pub fn sdpa(qkv: [Metal; 3], has_mask: bool, causal: bool, scale: f32, softcap: f32) -> Made {
    let [(q, q_l), (k, k_l), (v, v_l)] = qkv;
    let (dims, (b, h_kv, t_k, d_k)) = (q_l.shape().dims4()?, k_l.shape().dims4()?);
    let (_, h, t_q, d) = dims;
    let d_v = v_l.dims()[3];
    if d != d_k {
        candle::bail!("`q` and `k` last dims must match")
    }
    if v_l.dims()[1] != h_kv {
        candle::bail!("`k` and `v` head dims must match")
    }
    if h % h_kv != 0 {
        candle::bail!("query `n_heads` must be a multiple of `n_kv_heads`")
    }
    let shapes = || format!("q dims {:?}, k dims {:?}, v dims {:?}.", q_l.dims(), k_l.dims(), v_l.dims());
    if ![32, 64, 72, 80, 96, 128, 256, 512].contains(&d) {
        candle::bail!("Meta SDPA does not support q head dim {d}: {}", shapes())
    }
    let full = t_q > 1 && (!has_mask || t_q <= t_k) && !(d == 512 && q.dtype() == DType::F32);
    if !full && !(t_q == 1 && t_q <= t_k) {
        candle::bail!("Meta SDPA does not support {}", shapes())
    }
    if k.dtype() != q.dtype() || v.dtype() != q.dtype() {
        candle::bail!("all q, k, v dtypes must match.")
    }
    if !is_float(q.dtype()) {
        candle::bail!("unsupported sdpa type {:?}", q.dtype())
    }
    if full && softcap != 1. {
        candle::bail!("SDPA full requires softcapping to be disabled (1.0)")
    }
    if has_mask || softcap != 1. || d_v != d || t_q == 1 && (d == 72 || d == 80) {
        candle::bail!("[metal stand-in] this sdpa is not part of the stand-in")
    }
    let wide = |s: &MetalStorage| -> Result<Vec<f32>> {
        let numbers = s.numbers();
        let n = match &*numbers {
            CpuStorage::F32(x) => return Ok(x.clone()),
            CpuStorage::F16(x) => x.len(),
            CpuStorage::BF16(x) => x.len(),
            _ => unreachable!(),
        };
        match numbers.to_dtype(&Layout::contiguous(n), DType::F32)? {
            CpuStorage::F32(x) => Ok(x),
            _ => unreachable!(),
        }
    };
    let (qs, ks, vs) = (wide(q)?, wide(k)?, wide(v)?);
    let at = |l: &Layout, i: usize, head: usize, heads: usize, row: usize, is_q: bool| {
        let s = l.stride();
        match (t_q, is_q) {
            (1, true) => l.start_offset() + (i * heads + head) * d,
            (1, false) => l.start_offset() + (i * heads + head) * s[1] + row * d,
            _ => l.start_offset() + i * s[0] + head * s[1] + row * s[2],
        }
    };
    let mut out = Vec::with_capacity(b * h * t_q * d);
    for i in 0..b {
        for head in 0..h {
            let kv = head / (h / h_kv);
            for row in 0..t_q {
                let a = at(q_l, i, head, h, row, true);
                let seen = if causal && t_q > 1 { (row + 1 + t_k).saturating_sub(t_q) } else { t_k };
                let scores: Vec<f32> = (0..seen)
                    .map(|j| {
                        let c = at(k_l, i, kv, h_kv, j, false);
                        (0..d).map(|e| qs[a + e] * ks[c + e]).sum::<f32>() * scale
                    })
                    .collect();
                let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f32 = weights.iter().sum();
                let start = out.len();
                out.resize(start + d, 0f32);
                for (j, weight) in weights.iter().enumerate() {
                    let c = at(v_l, i, kv, h_kv, j, false);
                    for e in 0..d {
                        out[start + e] += weight / total * vs[c + e];
                    }
                }
            }
        }
    }
    let shape = Shape::from(dims);
    let storage = CpuStorage::F32(out);
    let flat = Layout::contiguous(shape.clone());
    let storage = if q.dtype() == DType::F32 { storage } else { storage.to_dtype(&flat, q.dtype())? };
    Ok((MetalStorage::launched(storage, q.device()), shape))
}
