//! The adapter to `candle_nn::ops::sdpa`: f32, f16 and bf16 on Metal.
//!
//! [`decide`] lists what the operation computes rightly, read from candle 0.11 (`candle-nn/src/ops.rs`,
//! `candle-metal-kernels/src/kernels/sdpa.rs` and its Metal source); all else takes the reference path. Issues are
//! huggingface/candle's.

use std::fmt;
use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::plan::{Wanted, obstacle_of_every_gpu};
use super::rows::{Bands, Window};
use super::validate::{Call, Dims};
use super::{OutputOrder, reference};
use crate::mask::AttentionMask;

/// A call that the operation takes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The keys that it is given.
    keys: Range<usize>,
    causal: bool,
    /// So many queries and keys at the end go to the reference path.
    rest: usize,
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "candle_nn::ops::sdpa")?;
        if self.rest > 0 { write!(f, ", the last {} queries on the reference path", self.rest) } else { Ok(()) }
    }
}

/// The queries and keys of the kernel's largest blocks.
const BLOCK: usize = 32;

/// How a call goes to the operation, or why it does not.
///
/// # Errors
/// As [`AttentionMask::resolve`].
pub(super) fn decide(call: &Call, wanted: Wanted) -> Result<std::result::Result<Plan, String>> {
    let refuse = |reason: String| Ok(Err(format!("candle_nn::ops::sdpa {reason}")));
    let (Dims { t_q, d, .. }, options, scale) = (call.dims, call.options, call.scale());
    // Of one query it ignores mask tensors. Of more, a bias is multiplied by log2 e, and rows without a key are NaN
    // (#3690, #3388).
    if let Some(obstacle) = obstacle_of_every_gpu(call, wanted, &[DType::F32, DType::F16, DType::BF16]) {
        return refuse(obstacle);
    }
    for (given, what) in [
        (call.sequences.is_some(), "packed sequences"),
        (options.alibi_slopes.is_some(), "ALiBi"),
        // It has one for one query, and takes 1.0 for none.
        (options.softcap.is_some(), "softcap for several queries"),
    ] {
        if given {
            return refuse(format!("has no {what}"));
        }
    }
    // Of 72 and 80 there is a kernel for several queries only; 512 has none in F32.
    if !(matches!(d, 32 | 64 | 96 | 128 | 256) || matches!(d, 72 | 80) && t_q > 1) {
        return refuse(format!("has no kernel for D of {d} and {t_q} queries"));
    }
    // The queries are multiplied by scale · log2 e in their own dtype, which has to leave them finite and normal.
    if !(1e-4..=1.0).contains(&scale) {
        return refuse(format!("scales queries in {:?}, where {scale:?} may be out of range", call.q.dtype()));
    }
    let bands = Bands::new(call)?;
    if bands.as_ref().is_some_and(|bands| bands.spans.is_empty()) {
        return Ok(Err("no query sees a key".into()));
    }
    let keys_and_window = bands.and_then(|bands| Some((bands.common_keys(call)?, bands.window)));
    match keys_and_window {
        Some((keys, Window { left: None, right: None })) => Ok(Ok(Plan { keys, causal: false, rest: 0 })),
        // Its causal mask is right where blocks of queries end with blocks of keys: elsewhere it looks at one block too
        // few for hidden keys, or walks on to keys that are not there.
        Some((keys, Window { left: None, right: Some(0) }))
            if (keys.len() - t_q).is_multiple_of(BLOCK) && t_q >= BLOCK =>
        {
            Ok(Ok(Plan { keys, causal: true, rest: t_q % BLOCK }))
        }
        Some((_, Window { left: None, right: Some(0) })) => {
            refuse(format!("has causal masks of {BLOCK} queries or more after a multiple of {BLOCK} keys"))
        }
        // One query: masks are ignored. More: a mask is a tensor as large as the scores, with the faults above.
        _ => refuse("takes no mask and causal masks, and all sequences have to see the same keys".into()),
    }
}

/// What the operation reads: q (B, H, T_q, D), k and v (B, H_kv, T_kv, D).
pub(super) struct Inputs {
    qkv: [Tensor; 3],
    causal: bool,
    scale: f32,
}

/// The operation itself: a contiguous (B, H, T_q, D).
pub(super) fn sdpa(inputs: &Inputs) -> Result<Tensor> {
    let Inputs { qkv: [q, k, v], causal, scale } = inputs;
    candle_nn::ops::sdpa(q, k, v, None, *causal, *scale, 1.0)
}

/// Context (B, H, T_q, D) in the order asked for, by `op` in the place of [`sdpa`].
pub(super) fn attend(call: &Call, plan: &Plan, op: impl Fn(&Inputs) -> Result<Tensor>) -> Result<Tensor> {
    let t_q = call.dims.t_q - plan.rest;
    let keys = |tensor: &Tensor| tensor.narrow(2, plan.keys.start, plan.keys.len());
    let (k, v) = (keys(&call.k)?, keys(&call.v)?);
    let head = |tensor: &Tensor, t: usize| contiguous(&tensor.narrow(2, 0, t)?, t_q == 1);
    let t_kv = plan.keys.len() - plan.rest;
    let qkv = [contiguous(&call.q.narrow(2, 0, t_q)?, false)?, head(&k, t_kv)?, head(&v, t_kv)?];
    let mut context = op(&Inputs { qkv, causal: plan.causal, scale: call.scale() as f32 })?;
    if plan.rest > 0 {
        let q = call.q.narrow(2, t_q, plan.rest)?;
        let causal = AttentionMask::causal();
        let rest = reference::attend(&Call::new(call.op, [&q, &k, &v], &causal, call.options)?)?;
        context = Tensor::cat(&[&context, &rest.context], 2)?.contiguous()?;
    }
    match call.output_order {
        OutputOrder::Bhtd => Ok(context),
        OutputOrder::Bthd => context.transpose(1, 2)?.contiguous()?.transpose(1, 2),
    }
}

/// A copy unless the operation reads the tensor as it is. Of the keys and values of one query it reads the stride of
/// heads alone (#3703): rows that follow one another in heads at one distance, such as a view into a cache.
fn contiguous(tensor: &Tensor, rows_of_heads: bool) -> Result<Tensor> {
    let (b, h, t, d) = tensor.dims4()?;
    let &[of_b, of_h, of_t, of_d] = tensor.stride() else { return tensor.force_contiguous() };
    let rows = of_d == 1 && (t == 1 || of_t == d);
    let heads = (b == 1 || of_b == h * of_h) && (rows_of_heads || b * h == 1 || of_h == t * d);
    // Not `contiguous`, which leaves the stride of a single head as it is, and the operation walks along it.
    if rows && heads { Ok(tensor.clone()) } else { tensor.force_contiguous() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sdpa::{PackedSequences, SdpaOptions};
    use candle_core::Device;

    fn draw(dims: [usize; 4], dtype: DType) -> Result<Tensor> {
        Tensor::randn(0f32, 1., &dims, &Device::Cpu)?.to_dtype(dtype)
    }

    fn planned(
        [q, k, v]: &[Tensor; 3],
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<std::result::Result<Plan, String>> {
        decide(&Call::new("test", [q, k, v], mask, options)?, Wanted::Context)
    }

    #[test]
    fn what_is_not_on_the_list_is_refused_with_its_reason() -> Result<()> {
        let (none, plain) = (AttentionMask::none(), SdpaOptions::default());
        let with = |t_q: usize, d: usize, dtype| -> Result<[Tensor; 3]> {
            Ok([draw([2, 4, t_q, d], dtype)?, draw([2, 2, 9, d], dtype)?, draw([2, 2, 9, d], dtype)?])
        };
        let usual = || with(5, 64, DType::F32);
        let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        let [q, k, v] = usual()?;
        for (qkv, options, expected) in [
            (with(5, 64, DType::F64)?, plain.clone(), "computes in [F32, F16, BF16], and the inputs are F64"),
            (usual()?, plain.clone().with_sinks(&heads), "has no sinks"),
            (usual()?, plain.clone().with_alibi_slopes(&heads), "has no ALiBi"),
            (usual()?, plain.clone().with_softcap(30.0), "has no softcap for several queries"),
            ([q, k, v.narrow(3, 0, 32)?], plain.clone(), "takes values as wide as keys, and D_v is 32 where D is 64"),
            (with(5, 48, DType::F32)?, plain.clone(), "has no kernel for D of 48 and 5 queries"),
            (with(1, 72, DType::F32)?, plain.clone(), "has no kernel for D of 72 and 1 queries"),
            (with(5, 512, DType::F32)?, plain.clone(), "has no kernel for D of 512 and 5 queries"),
            (usual()?, plain.clone().with_scale(12.0), "scales queries in F32, where 12.0 may be out of range"),
        ] {
            assert_eq!(planned(&qkv, &none, &options)?, Err(format!("candle_nn::ops::sdpa {expected}")));
        }
        let keep = Tensor::ones((1, 9), DType::U8, &Device::Cpu)?;
        let others = "takes no mask and causal masks, and all sequences have to see the same keys";
        let blocks = "has causal masks of 32 queries or more after a multiple of 32 keys";
        for (t_q, mask, expected) in [
            (5, none.clone().with_keep(&keep), "takes no keep tensor"),
            (5, none.clone().with_bias(&keep.to_dtype(DType::F32)?), "takes no bias tensor"),
            (1, none.clone().with_valid_lens(vec![3, 4]), others),
            (5, AttentionMask::causal().with_window(4), others),
            (9, AttentionMask::causal().with_starts(vec![2, 0]), others),
            (9, AttentionMask::causal(), blocks),
        ] {
            let plan = planned(&with(t_q, 64, DType::F32)?, &mask, &plain)?;
            assert_eq!(plan, Err(format!("candle_nn::ops::sdpa {expected}")), "{mask:?}");
        }
        let hidden = planned(&usual()?, &none.clone().with_valid_lens(vec![0, 0]), &plain)?;
        assert_eq!(hidden, Err("no query sees a key".into()));
        let [q, k, v] = usual()?;
        let call = Call::new("test", [&q, &k, &v], &none, &plain)?;
        let lse = decide(&call, Wanted::LogSumExp)?;
        assert_eq!(lse, Err("candle_nn::ops::sdpa has no log-sum-exp".into()));
        let sequences = PackedSequences::from_lens(&[5], &[9])?;
        let [q, k] = [&q, &k].map(|x| x.get(0)?.transpose(0, 1));
        let (q, k) = (q?, k?);
        let packed = decide(&Call::packed("test", [&q, &k, &k], &sequences, &none, &plain)?, Wanted::Context)?;
        assert_eq!(packed, Err("candle_nn::ops::sdpa has no packed sequences".into()));
        Ok(())
    }

    /// The operation in Candle's own.
    fn stand_in(inputs: &Inputs) -> Result<Tensor> {
        let mask = if inputs.causal { AttentionMask::causal() } else { AttentionMask::none() };
        let options = SdpaOptions::default().with_scale(inputs.scale.into());
        let [q, k, v] = &inputs.qkv;
        assert!(q.is_contiguous());
        if inputs.causal {
            assert!(q.dim(2)?.is_multiple_of(BLOCK) && k.dim(2)?.is_multiple_of(BLOCK));
        }
        reference::attend(&Call::new("test", [q, k, v], &mask, &options)?).map(|attended| attended.context)
    }

    #[test]
    fn what_is_on_the_list_has_the_reference_paths_numbers() -> Result<()> {
        let none = AttentionMask::none;
        for (mask, (t_q, t_kv), rest) in [
            (none(), (5, 9), 0),
            (none(), (9, 5), 0),
            (none().with_valid_lens(vec![7, 7]), (4, 9), 0),
            (AttentionMask::causal(), (1, 9), 0),
            (AttentionMask::causal().with_window(4), (1, 9), 0),
            (AttentionMask::causal(), (32, 32), 0),
            (AttentionMask::causal(), (70, 70), 6),
            (AttentionMask::causal(), (40, 72), 8),
        ] {
            for order in [OutputOrder::Bhtd, OutputOrder::Bthd] {
                let q = draw([2, t_q, 4, 32], DType::F32)?.transpose(1, 2)?;
                let kv = draw([2, 2, t_kv + 3, 32], DType::F32)?.narrow(2, 0, t_kv)?;
                let options = SdpaOptions::default().with_output_order(order);
                let call = Call::new("test", [&q, &kv, &kv], &mask, &options)?;
                let plan = decide(&call, Wanted::Context)?.expect("taken");
                assert_eq!(plan.rest, rest, "{mask:?}");
                let context = attend(&call, &plan, stand_in)?;
                let difference = (&context - reference::attend(&call)?.context)?.abs()?.flatten_all()?.max(0)?;
                assert!(difference.to_scalar::<f32>()? < 1e-5, "{mask:?}");
            }
        }
        Ok(())
    }

    /// #3703: of one query's keys the operation reads rows one after the other, from heads at one distance.
    #[test]
    fn only_what_the_operation_would_misread_is_copied() -> Result<()> {
        let cache = draw([2, 4, 16, 32], DType::F32)?.narrow(2, 0, 9)?;
        let transposed = draw([2, 9, 4, 32], DType::F32)?.transpose(1, 2)?;
        let one_head = draw([2, 1, 9, 32], DType::F32)?.broadcast_as((2, 4, 9, 32))?;
        for (tensor, of_one, of_several) in [
            (cache.contiguous()?, false, false),
            (cache, false, true),
            (transposed, true, true),
            (one_head, true, true),
        ] {
            let copied =
                |rows_of_heads| -> Result<bool> { Ok(contiguous(&tensor, rows_of_heads)?.stride() != tensor.stride()) };
            assert_eq!((copied(true)?, copied(false)?), (of_one, of_several), "{:?}", tensor.layout());
        }
        Ok(())
    }
}
