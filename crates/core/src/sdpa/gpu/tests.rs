//! The calls that each operation supports and refuses. Supported calls have the reference path's numbers, computed by
//! stand-ins made of Candle's own operations.

use std::sync::Mutex;

use super::operations::{BLOCK, is_contiguous, probe_once};
use super::*;
use crate::mask::ValidLens;
use crate::sdpa::options::{OutputLayout, SdpaOptions};
use crate::sdpa::packed::PackedSequences;

/// The operations, with stand-ins in their place.
const FLASH: Operation = Operation { runs_on: |_| Ok(()), run: flash_attn, ..FLASH_ATTN };
const SDPA: Operation = Operation { run: sdpa, ..METAL };

fn shaped(q: [usize; 4], kv: [usize; 4], dtype: DType) -> Result<[Tensor; 3]> {
    let zero = |dims: [usize; 4]| Tensor::zeros(1, dtype, &Device::Cpu)?.broadcast_as(&dims);
    Ok([zero(q)?, zero(kv)?, zero(kv)?])
}

fn draw(dims: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., dims, &Device::Cpu)?.to_dtype(dtype)
}

fn call_of(qkv: &[Tensor; 3], mask: &AttentionMask, options: &SdpaOptions) -> Result<Call> {
    let [q, k, v] = qkv;
    Call::new("test", Qkv { q, k, v }, None, mask, options)
}

/// Returns the reason why an operation does not support a call.
fn reason(
    operation: &'static Operation,
    qkv: &[Tensor; 3],
    mask: &AttentionMask,
    options: &SdpaOptions,
) -> Result<String> {
    let reason = operation.plan(&call_of(qkv, mask, options)?, ResultKind::Output).expect_err("refused");
    Ok(reason.strip_prefix(operation.name).map_or(reason.clone(), |reason| reason.trim_start().to_string()))
}

#[test]
fn gpu_operations_refuse_unsupported_calls_with_a_reason() -> Result<()> {
    let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
    let (q, kv) = ([2, 4, 5, 64], [2, 2, 9, 64]);
    let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    let distances = Tensor::zeros((4, 13), DType::F32, &Device::Cpu)?;
    let half = |queries, keys| shaped(queries, keys, DType::F16);
    let usual = half(q, kv)?;
    let narrow = [usual[0].clone(), usual[1].clone(), usual[2].narrow(3, 0, 32)?];
    for operation in [&FLASH, &SDPA] {
        for (qkv, options, expected) in [
            (&usual, plain().with_sinks(&heads), "has no sinks"),
            (&usual, plain().with_relative_bias(&distances), "has no relative bias"),
            (&narrow, plain(), "takes values as wide as keys, and D_v is 32 where D is 64"),
        ] {
            assert_eq!(reason(operation, qkv, &none, &options)?, expected, "{}", operation.name);
        }
        let ones = Tensor::ones((5, 9), DType::U8, &Device::Cpu)?;
        for (mask, expected) in [
            (none.clone().with_bool_mask(&ones), "has no boolean mask"),
            (none.clone().with_bias(&ones.to_dtype(DType::F32)?), "has no bias tensor"),
            (none.clone().with_valid_lens(vec![0, 0]), "no query attends to a key"),
        ] {
            assert_eq!(reason(operation, &usual, &mask, &plain())?, expected, "{}, {mask:?}", operation.name);
        }
        let options = plain();
        let call = call_of(&usual, &none, &options)?;
        let lse = operation.plan(&call, ResultKind::LogSumExp).expect_err("refused");
        assert_eq!(lse, format!("{} has no log-sum-exp", operation.name));
    }
    Ok(())
}

#[test]
fn candle_flash_attn_refuses_calls_beyond_its_limits() -> Result<()> {
    let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
    let half = |q, kv| shaped(q, kv, DType::F16);
    let usual = half([2, 4, 5, 64], [2, 2, 9, 64])?;
    let scales = "takes scales from 1.1754943508222875e-38 to 1.7014117331926443e38, and this one is";
    for (qkv, options, expected) in [
        (
            shaped([2, 4, 5, 64], [2, 2, 9, 64], DType::F32)?,
            plain(),
            "computes in [F16, BF16], and the inputs are F32".to_string(),
        ),
        (half([1, 1, 2, 60], [1, 1, 2, 60])?, plain(), "takes D in multiples of 8 up to 256, and D is 60".into()),
        (half([1, 1, 2, 264], [1, 1, 2, 264])?, plain(), "takes D in multiples of 8 up to 256, and D is 264".into()),
        (usual.clone(), plain().with_scale(-0.5), format!("{scales} -0.5")),
        (usual.clone(), plain().with_scale(0.0), format!("{scales} 0.0")),
        (
            usual.clone(),
            plain().with_scale(1e-20).with_softcap(1e30),
            "drops a softcap of 1e30 at a scale of 1e-20".into(),
        ),
        (
            half([65_536, 1, 1, 8], [65_536, 1, 1, 8])?,
            plain(),
            "launches 65535 sequences and heads at most, and there are 65536 and 1".into(),
        ),
        (half([1, 1, 1, 8], [1, 1, 1 << 31, 8])?, plain(), "counts in 32 bits, and the call is larger".into()),
    ] {
        assert_eq!(reason(&FLASH, &qkv, &none, &options)?, expected);
    }
    let bands = "takes masks that are one local window, aligned with the last query and key, and ALiBi from there";
    let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    for (mask, options) in [
        (AttentionMask::causal().with_prefix(vec![7, 8]), plain()),
        // Right padding moves the key from which the operation counts.
        (AttentionMask::causal().with_valid_lens(vec![5, 7]), plain()),
        (none.clone().with_valid_lens(ValidLens::from(vec![vec![1, 2, 3, 4, 4]; 2])), plain()),
        (none.with_valid_lens(vec![7, 7]), plain().with_alibi_slopes(&heads)),
    ] {
        assert_eq!(reason(&FLASH, &usual, &mask, &options)?, bands, "{mask:?}");
    }
    Ok(())
}

#[test]
fn candle_nn_sdpa_refuses_calls_beyond_its_limits() -> Result<()> {
    let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
    let with = |t_q: usize, d: usize, dtype| shaped([2, 4, t_q, d], [2, 2, 9, d], dtype);
    let usual = || with(5, 64, DType::F32);
    let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    for (qkv, options, expected) in [
        (with(5, 64, DType::F64)?, plain(), "computes in [F32, F16, BF16], and the inputs are F64"),
        (usual()?, plain().with_alibi_slopes(&heads), "has no ALiBi"),
        (usual()?, plain().with_softcap(30.0), "has no softcap for several queries"),
        (with(5, 48, DType::F32)?, plain(), "has no kernel for D of 48 and 5 queries"),
        (with(1, 72, DType::F32)?, plain(), "has no kernel for D of 72 and 1 queries"),
        (with(5, 512, DType::F32)?, plain(), "has no kernel for D of 512 and 5 queries"),
        (usual()?, plain().with_scale(12.0), "takes scales from 1e-4 to 1e0, and this one is 12.0"),
    ] {
        assert_eq!(reason(&SDPA, &qkv, &none, &options)?, expected);
    }
    let alike = "takes sequences that all attend to the same keys";
    let blocks = "has causal masks of 32 queries or more after a multiple of 32 keys";
    for (t_q, mask, expected) in [
        (1, none.clone().with_valid_lens(vec![3, 4]), alike),
        (9, AttentionMask::causal().with_starts(vec![2, 0]), alike),
        (5, AttentionMask::causal().with_window(4), "takes no mask and causal masks"),
        (9, AttentionMask::causal(), blocks),
    ] {
        assert_eq!(reason(&SDPA, &with(t_q, 64, DType::F32)?, &mask, &plain())?, expected, "{mask:?}");
    }
    let (options, sequences) = (plain(), PackedSequences::from_lens(&[5], &[9])?);
    let [q, kv] = [draw(&[5, 4, 64], DType::F32)?, draw(&[9, 2, 64], DType::F32)?];
    let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, Some(&sequences), &none, &options)?;
    let packed = SDPA.plan(&call, ResultKind::Output);
    assert_eq!(packed.expect_err("refused"), "candle_nn::ops::sdpa has no packed sequences");
    Ok(())
}

/// Computes as candle-flash-attn does, in Candle's own operations: each sequence by itself.
fn flash_attn(inputs: &Inputs) -> Result<Tensor> {
    let BandWindow { left, right } = inputs.window;
    let mask = AttentionMask::none().with_local_window(left.unwrap_or(usize::MAX), right.unwrap_or(usize::MAX));
    let mut options = SdpaOptions::default().with_scale(inputs.scale.into());
    options.alibi_slopes = inputs.alibi_slopes.clone();
    options.softcap = (inputs.softcap != 0.0).then_some(inputs.softcap.into());
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor| -> Result<Tensor> {
        for x in [q, k, v] {
            assert!(x.stride()[..3].iter().all(|n| n % 8 == 0) && x.stride()[3] == 1, "{:?}", x.layout());
        }
        let qkv = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
        reference::output(&call_of(&qkv, &mask, &options)?)?.transpose(1, 2)?.contiguous()
    };
    let Inputs { q, k, v, lengths, .. } = inputs;
    let Some(Lengths { cu_seqlens_q, cu_seqlens_kv, most_queries, most_keys }) = lengths else {
        return attend(q, k, v);
    };
    let (of_q, of_kv) = (cu_seqlens_q.to_vec1::<u32>()?, cu_seqlens_kv.to_vec1::<u32>()?);
    let mut outputs = Vec::new();
    for (q_ends, kv_ends) in of_q.windows(2).zip(of_kv.windows(2)) {
        let part = |x: &Tensor, ends: &[u32]| {
            x.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize)?.unsqueeze(0)?.contiguous()
        };
        assert!(q_ends[1] - q_ends[0] <= *most_queries as u32 && kv_ends[1] - kv_ends[0] <= *most_keys as u32);
        if q_ends[0] < q_ends[1] {
            outputs.push(attend(&part(q, q_ends)?, &part(k, kv_ends)?, &part(v, kv_ends)?)?.squeeze(0)?);
        }
    }
    Tensor::cat(&outputs, 0)
}

/// Computes as `candle_nn::ops::sdpa` does, in Candle's own operations.
fn sdpa(inputs: &Inputs) -> Result<Tensor> {
    let is_causal = inputs.window.right == Some(0);
    let mask = if is_causal { AttentionMask::causal() } else { AttentionMask::none() };
    let options = SdpaOptions::default().with_scale(inputs.scale.into());
    let Inputs { q, k, v, .. } = inputs;
    assert!(q.is_contiguous());
    if is_causal {
        assert!(q.dim(2)?.is_multiple_of(BLOCK) && k.dim(2)?.is_multiple_of(BLOCK));
    }
    reference::output(&Call::new("test", Qkv { q, k, v }, None, &mask, &options)?)
}

/// Returns the largest difference of a call from the reference path, after checking the output's layout.
fn difference(call: &Call, gpu_call: &GpuCall) -> Result<f32> {
    let output = gpu_call.output(call)?;
    let is_in_layout = match call.output_layout() {
        OutputLayout::Bhtd => output.is_contiguous(),
        OutputLayout::Bthd => output.transpose(1, 2)?.is_contiguous(),
    };
    assert!(is_in_layout, "{:?}", output.layout());
    let difference = (output.to_dtype(DType::F32)? - reference::output(call)?.to_dtype(DType::F32)?)?;
    difference.abs()?.flatten_all()?.max(0)?.to_scalar()
}

#[test]
fn candle_flash_attn_matches_reference() -> Result<()> {
    let none = AttentionMask::none;
    let slopes = Tensor::new(&[0.1f32, 0.5, 1.0, 0.0], &Device::Cpu)?;
    let plain = SdpaOptions::default;
    let mut taken = [0; 2];
    for (mask, [t_q, t_kv], options, varlen) in [
        (none(), [5, 9], plain(), false),
        (none(), [9, 5], plain().with_softcap(2.0), false),
        (AttentionMask::causal(), [5, 9], plain().with_alibi_slopes(&slopes), false),
        (AttentionMask::causal().with_window(3), [5, 9], plain().with_scale(0.5), false),
        (none().with_local_window(1, 2), [9, 9], plain(), false),
        (AttentionMask::causal_upper_left(), [5, 9], plain(), false),
        (AttentionMask::causal(), [1, 9], plain().with_output_layout(OutputLayout::Bthd), false),
        // A cache that is filled to 7, and caches that are filled differently.
        (none().with_valid_lens(vec![7, 7]), [1, 9], plain(), false),
        (none().with_valid_lens(vec![3, 7]), [1, 9], plain(), true),
        (none().with_valid_lens(vec![0, 7]), [5, 9], plain().with_output_layout(OutputLayout::Bthd), true),
        // Left padding, and more queries than keys.
        (AttentionMask::causal().with_starts(vec![4, 1]), [9, 9], plain(), true),
        (AttentionMask::causal(), [9, 5], plain(), true),
        (AttentionMask::causal().with_window(2).with_starts(vec![0, 3]), [9, 9], plain(), true),
    ] {
        // A transposed q, and views of longer buffers, k at an odd offset.
        let q = draw(&[2, t_q, 4, 16], DType::F16)?.transpose(1, 2)?;
        let k = draw(&[2, 2, t_kv + 3, 18], DType::F16)?.narrow(2, 0, t_kv)?.narrow(3, 1, 16)?;
        let v = draw(&[2, 2, t_kv + 3, 16], DType::F16)?.narrow(2, 0, t_kv)?;
        let call = call_of(&[q, k, v], &mask, &options)?;
        let gpu_call = FLASH.plan(&call, ResultKind::Output).expect("supported");
        assert_eq!(matches!(gpu_call.sequences, Sequences::Varlen(_)), varlen, "{mask:?}");
        taken[usize::from(varlen)] += 1;
        let difference = difference(&call, &gpu_call)?;
        assert!(difference < 4e-3, "{difference}: {mask:?}");
    }
    assert_eq!(taken, [8, 5]);

    let sequences = PackedSequences::from_lens(&[3, 1, 0, 2], &[5, 1, 2, 0])?;
    let (q, kv) = (draw(&[6, 4, 16], DType::F16)?, draw(&[8, 2, 16], DType::F16)?);
    for mask in [none(), AttentionMask::causal(), AttentionMask::causal().with_window(2)] {
        let options = plain();
        let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, Some(&sequences), &mask, &options)?;
        let gpu_call = FLASH.plan(&call, ResultKind::Output).expect("supported");
        let difference = difference(&call, &gpu_call)?;
        assert!(difference < 4e-3, "{difference}: {mask:?}");
    }
    Ok(())
}

#[test]
fn candle_nn_sdpa_matches_reference() -> Result<()> {
    let none = AttentionMask::none;
    for (mask, [t_q, t_kv], expected) in [
        (none(), [5, 9], 0),
        (none(), [9, 5], 0),
        (none().with_valid_lens(vec![7, 7]), [4, 9], 0),
        (AttentionMask::causal(), [1, 9], 0),
        (AttentionMask::causal().with_window(4), [1, 9], 0),
        (AttentionMask::causal(), [32, 32], 0),
        (AttentionMask::causal(), [70, 70], 6),
        (AttentionMask::causal(), [40, 72], 8),
    ] {
        for order in [OutputLayout::Bhtd, OutputLayout::Bthd] {
            let q = draw(&[2, t_q, 4, 32], DType::F32)?.transpose(1, 2)?;
            let kv = draw(&[2, 2, t_kv + 3, 32], DType::F32)?.narrow(2, 0, t_kv)?;
            let options = SdpaOptions::default().with_output_layout(order);
            let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, None, &mask, &options)?;
            let gpu_call = SDPA.plan(&call, ResultKind::Output).expect("supported");
            let is_expected = matches!(gpu_call.sequences, Sequences::Alike { rest, .. } if rest == expected);
            assert!(is_expected, "{gpu_call:?}, {mask:?}");
            assert!(difference(&call, &gpu_call)? < 1e-5, "{mask:?}");
        }
    }
    Ok(())
}

/// Checks calls with one query, for which the operation reads rows one after the other, from heads at one distance
/// (issue 3703 of huggingface/candle).
#[test]
fn candle_nn_sdpa_copies_only_tensors_that_it_would_misread() -> Result<()> {
    let cache = draw(&[2, 4, 16, 32], DType::F32)?.narrow(2, 0, 9)?;
    let transposed = draw(&[2, 9, 4, 32], DType::F32)?.transpose(1, 2)?;
    let one_head = draw(&[2, 1, 9, 32], DType::F32)?.broadcast_as((2, 4, 9, 32))?;
    for (tensor, of_one, of_several) in
        [(cache.contiguous()?, false, false), (cache, false, true), (transposed, true, true), (one_head, true, true)]
    {
        let copied = |t_q| !is_contiguous(&tensor, t_q);
        assert_eq!((copied(1), copied(2)), (of_one, of_several), "{:?}", tensor.layout());
    }
    Ok(())
}

/// Probes a device that lacks memory once again; a device on which no kernel ran is not.
#[test]
fn gpu_probe_remembers_results_but_no_errors() {
    let found = Mutex::new(Vec::new());
    let failed = |_: &Inputs| candle_core::bail!("DriverError(CUDA_ERROR_OUT_OF_MEMORY)\nbacktrace");
    let never_launched = |inputs: &Inputs| inputs.q.zeros_like();
    let cause = "DriverError(CUDA_ERROR_OUT_OF_MEMORY)".to_string();
    assert_eq!(probe_once(&found, &Device::Cpu, failed), Err(cause));
    assert_eq!(probe_once(&found, &Device::Cpu, flash_attn), Ok(()));
    assert_eq!(probe_once(&found, &Device::Cpu, failed), Ok(()), "it runs, and is not asked again");
    let results = Mutex::new(Vec::new());
    for _ in 0..2 {
        let message = "it returns memory to which no kernel wrote".to_string();
        assert_eq!(probe_once(&results, &Device::Cpu, never_launched), Err(message));
    }
}
