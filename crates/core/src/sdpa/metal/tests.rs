//! The calls that the operation supports and refuses. Supported calls have the reference path's numbers, computed by a
//! stand-in made of Candle's own operations.

use candle_attention_cuda::{NewDevice, SourceFault, on_new_device};
use candle_attention_metal::launches_of_thread;
use candle_core::{Device, Var};

use super::*;
use crate::sdpa::emulator_runs;
use crate::sdpa::options::OutputLayout;
use crate::sdpa::packed::PackedSequences;
use crate::sdpa::plan::Choice;
use crate::sdpa::run::ChosenCall;
use candle_attention_modules::base::first_use::{CaseError, FirstUseCase, allowed_error};

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

/// Returns the reason why the operation does not support a call.
fn reason(qkv: &[Tensor; 3], mask: &AttentionMask, options: &SdpaOptions) -> Result<String> {
    let reason = MetalCall::plan(&call_of(qkv, mask, options)?, RequestedResults::default()).expect_err("refused");
    Ok(reason.strip_prefix(NAME).map_or(reason.clone(), |own| own.trim_start().to_string()))
}

#[test]
fn metal_refuses_unsupported_score_modifiers_and_masks_with_a_reason() -> Result<()> {
    let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
    let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    let distances = Tensor::zeros((4, 13), DType::F32, &Device::Cpu)?;
    let usual = shaped([2, 4, 5, 64], [2, 2, 9, 64], DType::F16)?;
    let narrow = [usual[0].clone(), usual[1].clone(), usual[2].narrow(3, 0, 32)?];
    for (qkv, options, expected) in [
        (&usual, plain().with_sinks(&heads), "has no sinks"),
        (&usual, plain().with_relative_bias(&distances), "has no relative bias"),
        (&usual, plain().with_dropout(0.5, true), "has no dropout"),
        (&narrow, plain(), "takes values as wide as keys, and D_v is 32 where D is 64"),
    ] {
        assert_eq!(reason(qkv, &none, &options)?, expected);
    }
    let ones = Tensor::ones((5, 9), DType::U8, &Device::Cpu)?;
    for (mask, expected) in [
        (none.clone().with_bool_mask(&ones), "has no boolean mask"),
        (none.clone().with_bias(&ones.to_dtype(DType::F32)?), "has no bias tensor"),
        (none.clone().with_valid_lens(vec![0, 0]), "no query attends to a key"),
    ] {
        assert_eq!(reason(&usual, &mask, &plain())?, expected, "{mask:?}");
    }
    let call = call_of(&usual, &none, &plain())?;
    let lse = MetalCall::plan(&call, RequestedResults { log_sum_exp: true, ..RequestedResults::default() })
        .expect_err("refused");
    assert_eq!(lse, "candle_nn::ops::sdpa has no log-sum-exp");
    Ok(())
}

#[test]
fn metal_refuses_a_batch_of_any_size_without_queries() -> Result<()> {
    let zeros = |shape: [usize; 4]| Tensor::zeros(&shape, DType::F32, &Device::Cpu);
    let (q, kv) = (zeros([1 << 50, 1, 0, 64])?, zeros([1, 1, 1, 64])?);
    let text = reason(&[q, kv.clone(), kv], &AttentionMask::causal(), &SdpaOptions::default())?;
    assert_eq!(text, "no query attends to a key");
    Ok(())
}

#[test]
fn metal_refuses_calls_beyond_its_limits() -> Result<()> {
    let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
    let with = |t_q: usize, d: usize, dtype| shaped([2, 4, t_q, d], [2, 2, 9, d], dtype);
    let usual = || with(5, 64, DType::F32);
    let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
    for (qkv, options, expected) in [
        (with(5, 64, DType::F64)?, plain(), "computes in [F32, F16, BF16], and the inputs are F64"),
        (usual()?, plain().with_alibi_slopes(&heads), "has no ALiBi"),
        (usual()?, plain().with_softcap(30.0), "has no softcap"),
        (with(5, 48, DType::F32)?, plain(), "has no kernel for D of 48 and 5 queries"),
        (with(1, 72, DType::F32)?, plain(), "has no kernel for D of 72 and 1 queries"),
        (with(5, 512, DType::F32)?, plain(), "has no kernel for D of 512 and 5 queries"),
        (usual()?, plain().with_scale(12.0), "takes scales from 1e-4 to 1e0, and this one is 12.0"),
    ] {
        assert_eq!(reason(&qkv, &none, &options)?, expected);
    }
    let alike = "takes sequences that all attend to the same keys";
    let blocks = "has causal masks of 32 queries or more after a multiple of 32 keys";
    for (t_q, mask, expected) in [
        (1, none.clone().with_valid_lens(vec![3, 4]), alike),
        (9, AttentionMask::causal().with_starts(vec![2, 0]), alike),
        (5, AttentionMask::causal().with_window(4), "takes no mask and causal masks"),
        (9, AttentionMask::causal(), blocks),
    ] {
        assert_eq!(reason(&with(t_q, 64, DType::F32)?, &mask, &plain())?, expected, "{mask:?}");
    }
    let (options, sequences) = (plain(), PackedSequences::from_lens(&[5], &[9])?);
    let [q, kv] = [draw(&[5, 4, 64], DType::F32)?, draw(&[9, 2, 64], DType::F32)?];
    let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, Some(&sequences), &none, &options)?;
    let packed = MetalCall::plan(&call, RequestedResults::default());
    assert_eq!(packed.expect_err("refused"), "candle_nn::ops::sdpa has no packed sequences");
    Ok(())
}

/// Returns the plan of a call on Metal, or the reason why the reference path runs it.
fn path(qkv: &[Tensor; 3], mask: &AttentionMask, options: &SdpaOptions) -> Result<String> {
    let planned = MetalPath::plan(&call_of(qkv, mask, options)?, RequestedResults::default());
    Ok(planned.map_or_else(|reason| reason, |path| path.to_string()))
}

#[test]
fn metal_path_is_the_operation_then_the_kernel_and_otherwise_has_both_reasons() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let (none, window, plain) = (AttentionMask::none(), AttentionMask::causal().with_window(4), SdpaOptions::default);
    let usual = shaped([2, 4, 9, 64], [2, 2, 9, 64], DType::F16)?;
    assert_eq!(path(&usual, &none, &plain())?, "candle_nn::ops::sdpa");
    assert_eq!(path(&usual, &window, &plain())?, "the Metal forward kernel");
    assert_eq!(path(&usual, &none, &plain().with_softcap(30.0))?, "the Metal forward kernel");
    assert_eq!(path(&usual, &none, &plain().with_dropout(0.5, true))?, "the Metal forward kernel");
    let variable = Var::zeros((2, 4, 9, 64), DType::F16, &Device::Cpu)?;
    let tracked = [variable.as_tensor().clone(), usual[1].clone(), usual[2].clone()];
    let expected = "the Metal forward kernel, and the Metal backward kernels";
    assert_eq!(path(&tracked, &none, &plain())?, expected);
    let few = shaped([2, 4, 2, 64], [2, 2, 600, 64], DType::F16)?;
    assert_eq!(path(&few, &window, &plain())?, "the Metal decode kernel with the keys in 4 parts");
    let wide = shaped([2, 4, 9, 300], [2, 2, 9, 300], DType::F16)?;
    assert!(path(&wide, &none, &plain())?.ends_with("the head dimensions are 300 and 300, expected at most 256"));
    Ok(())
}

/// Computes as `candle_nn::ops::sdpa` does, in Candle's own operations.
fn sdpa(inputs: &MetalInputs) -> Result<Tensor> {
    let MetalInputs { q, k, v, is_causal, scale } = inputs;
    let mask = if *is_causal { AttentionMask::causal() } else { AttentionMask::none() };
    let options = SdpaOptions::default().with_scale(f64::from(*scale));
    assert!(q.is_contiguous());
    if *is_causal {
        assert!(q.dim(2)?.is_multiple_of(BLOCK) && k.dim(2)?.is_multiple_of(BLOCK));
    }
    let call = Call::new("test", Qkv { q, k, v }, None, &mask, &options)?;
    Ok(reference::attend(&call, RequestedResults::default())?.output)
}

/// Returns the largest difference of a call from the reference path, after checking the output's layout.
fn difference(call: &Call, metal_call: &MetalCall) -> Result<f32> {
    let output = metal_call.output_by(call, sdpa)?;
    let is_in_layout = match call.attention.output_layout {
        OutputLayout::Bhtd => output.is_contiguous(),
        OutputLayout::Bthd => output.transpose(1, 2)?.is_contiguous(),
    };
    assert!(is_in_layout, "{:?}", output.layout());
    let difference = (output.to_dtype(DType::F32)?
        - reference::attend(call, RequestedResults::default())?.output.to_dtype(DType::F32)?)?;
    difference.abs()?.flatten_all()?.max(0)?.to_scalar()
}

#[test]
fn metal_matches_reference() -> Result<()> {
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
            let metal_call = MetalCall::plan(&call, RequestedResults::default()).expect("supported");
            assert_eq!(metal_call.rest, expected, "{mask:?}");
            assert!(difference(&call, &metal_call)? < 1e-5, "{mask:?}");
        }
    }
    Ok(())
}

#[test]
fn metal_with_last_query_of_many_matches_reference() -> Result<()> {
    let kv = draw(&[2, 2, 9, 32], DType::F32)?;
    let mut views = vec![draw(&[2, 1, 6, 32], DType::F32)?.broadcast_as((2, 4, 6, 32))?];
    for (b, h) in [(1, 4), (2, 4), (2, 2)] {
        views.push(draw(&[b, h, 6, 32], DType::F32)?);
        views.push(draw(&[b, 6, h, 32], DType::F32)?.transpose(1, 2)?);
        views.push(draw(&[b, h + 2, 6, 32], DType::F32)?.narrow(1, 2, h)?);
    }
    for queries in views {
        let b = queries.dim(0)?;
        let kv = kv.narrow(0, 0, b)?;
        let q = queries.narrow(2, 5, 1)?;
        let call = Call::new("test", Qkv { q: &q, k: &kv, v: &kv }, None, &AttentionMask::none(), &Default::default())?;
        let metal_call = MetalCall::plan(&call, RequestedResults::default()).expect("supported");
        // `sdpa` above refuses a query whose rows do not follow each other, which the operation would misread.
        assert!(difference(&call, &metal_call)? < 1e-5, "{:?}", q.layout());
    }
    Ok(())
}

/// Checks what the operation reads without a copy: heads that follow each other, and for the keys and values of one
/// query heads at any one distance (issue 3703 of huggingface/candle).
#[test]
fn metal_copies_only_tensors_that_it_would_misread() -> Result<()> {
    let cache = draw(&[2, 4, 16, 32], DType::F32)?.narrow(2, 0, 9)?;
    let transposed = draw(&[2, 9, 4, 32], DType::F32)?.transpose(1, 2)?;
    let one_head = draw(&[2, 1, 9, 32], DType::F32)?.broadcast_as((2, 4, 9, 32))?;
    for (tensor, is_copied_of_one_query, is_copied) in
        [(cache.contiguous()?, false, false), (cache, false, true), (transposed, true, true), (one_head, true, true)]
    {
        assert_eq!(is_readable(&tensor, true), !is_copied_of_one_query, "{:?}", tensor.layout());
        assert_eq!(is_readable(&tensor, false), !is_copied, "{:?}", tensor.layout());
    }
    Ok(())
}

/// Every sequence has the length of the first one.
const WRONG_LENGTHS: SourceFault =
    SourceFault { file: "masks.cuh", text: "arguments.key_lengths + index", replacement: "arguments.key_lengths" };

#[test]
fn metal_kernel_at_first_use_is_remembered_if_right_and_left_to_the_reference_if_wrong() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let right = NewDevice::new("a right device", folder.path());
    let wrong = NewDevice::new("a device with wrong lengths", folder.path()).with_fault(WRONG_LENGTHS);
    for (t_q, kernels) in [(72, "attention on Metal, forward"), (1, "attention on Metal, decode")] {
        let q = draw(&[2, 2, t_q, 48], DType::BF16)?;
        let qkv = [q, draw(&[2, 1, 80, 48], DType::BF16)?, draw(&[2, 1, 80, 48], DType::BF16)?];
        let call = call_of(&qkv, &AttentionMask::causal(), &SdpaOptions::default())?;
        let run = || -> Result<Tensor> {
            let choice = match MetalPath::plan(&call, RequestedResults::default()) {
                Ok(metal_path) => Choice::Metal(metal_path),
                Err(reason) => Choice::Reference { reason },
            };
            Ok(ChosenCall { choice, call: call.clone() }.attend(RequestedResults::default())?.output)
        };
        let launches = |device: &NewDevice| -> Result<u64> {
            let before = launches_of_thread();
            on_new_device(device, run)?;
            Ok(launches_of_thread() - before)
        };
        let (first, second) = (launches(&right)?, launches(&right)?);
        assert!(first > second && second > 0, "{kernels}: {first}, {second}");
        assert_eq!(launches(&NewDevice::new("a right device", folder.path()))?, second, "in another process");

        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let expected = reference::attend(&call, RequestedResults::default())?.output;
        let found = on_new_device(&wrong, run)?;
        assert_eq!(numbers(&found)?, numbers(&expected)?);
        let reason = on_new_device(&wrong, || MetalPath::plan(&call, RequestedResults::default()).err());
        let reason = reason.expect("a reason");
        let part = format!("the kernels of {kernels} in bf16 failed their check on a device with wrong lengths");
        assert!(reason.contains(&part), "{reason}");
        assert_eq!(launches(&wrong)?, 0);
    }
    Ok(())
}

/// Compares the kernels over floats, codes of each format and pages, and the gradients, with the reference path.
#[test]
fn metal_kernels_match_reference_in_cases_of_first_use() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for case in METAL_CASES {
        for dtype in [DType::F32, DType::F16] {
            let before = launches_of_thread();
            let CaseError { name, error } = case.largest_error(&Device::Cpu, dtype)?;
            assert!(error <= allowed_error(dtype), "{}, {dtype:?}, {name}: {error:e}", case.operation);
            assert!(launches_of_thread() > before, "{} runs on a kernel", case.operation);
        }
    }
    Ok(())
}

#[test]
fn wrong_backward_metal_kernel_at_first_use_leaves_gradients_to_the_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    // The forward kernel is right.
    let fault = SourceFault {
        file: "gradient_sums.cuh",
        text: "store_global(arguments.delta + row, sum)",
        replacement: "store_global(arguments.delta + row, 0.5f * sum)",
    };
    let device = NewDevice::new("a Metal device with wrong gradients", folder.path()).with_fault(fault);
    let q = Var::from_tensor(&draw(&[1, 2, 72, 48], DType::BF16)?)?;
    let [k, v] = [draw(&[1, 1, 80, 48], DType::BF16)?, draw(&[1, 1, 80, 48], DType::BF16)?];
    let wanted = RequestedResults::default();
    let gradient = |output: &Tensor| -> Result<Vec<f32>> {
        let gradients = output.sqr()?.sum_all()?.backward()?;
        gradients.get(&q).expect("a gradient").to_dtype(DType::F32)?.flatten_all()?.to_vec1()
    };
    let call = call_of(&[q.as_tensor().clone(), k, v], &AttentionMask::causal(), &SdpaOptions::default())?;
    let attend = |choice| Ok::<_, candle_core::Error>(ChosenCall { choice, call: call.clone() }.attend(wanted)?.output);
    let expected = gradient(&attend(Choice::Reference { reason: String::new() })?)?;
    on_new_device(&device, || -> Result<()> {
        let choice = Choice::Metal(MetalPath::plan(&call, wanted).map_err(candle_core::Error::msg)?);
        assert_eq!(gradient(&attend(choice)?)?, expected);
        let reason = MetalPath::plan(&call, wanted).err().expect("a reason");
        let part = "the kernels of attention on Metal, backward in bf16 failed their check";
        assert!(reason.contains(part) && reason.contains("the gradient of "), "{reason}");
        Ok(())
    })
}

/// The unit of codes of 4 bits is another one.
const WRONG_CODES: SourceFault =
    SourceFault { file: "stored_rows.metal", text: "(float)(int)code - 7.5f", replacement: "(float)(int)code - 8.0f" };

#[test]
fn metal_kernel_with_wrong_codes_fails_the_check_of_its_format_alone() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let wrong = NewDevice::new("a device with wrong codes", folder.path()).with_fault(WRONG_CODES);
    let failed: Vec<&str> = on_new_device(&wrong, || {
        let is_wrong = |case: &&FirstUseCase| {
            let error = case.largest_error(&Device::Cpu, DType::F32);
            error.is_ok_and(|largest| largest.error > allowed_error(DType::F32))
        };
        METAL_CASES.iter().filter(is_wrong).map(|case| case.operation).collect()
    });
    assert_eq!(failed, ["attention on Metal, 4 bits, forward", "attention on Metal, 4 bits, decode"]);
    Ok(())
}
