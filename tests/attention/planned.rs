//! `plan` compared with the path that runs.
//!
//! These tests do not depend on the fused kernels of a device: where there is none for a call, `Fused` returns the
//! reason of `plan` as an error.

use std::io::Write;

use crate::*;

/// The fused operation that Candle has on Metal.
const CANDLE_OPERATION: &str = "candle_nn::ops::sdpa";

crate::on_each_device!(plan_names_backend_that_runs, plan_with_tracked_input_chooses_path_with_gradients);

/// Returns the results of the operations that plan and run a call.
fn outcomes(call: &Call) -> [(&'static str, Result<()>); 3] {
    [
        ("plan", call.plan().map(drop)),
        ("scaled_dot_product_attention", call.context().map(drop)),
        ("scaled_dot_product_attention_with_lse", call.with_lse().map(drop)),
    ]
}

/// Checks that `Auto` runs what it plans, that the reference path runs where it is requested, and that `Fused` runs or
/// returns the reason.
fn planned(call: &Call) -> Result<Plan> {
    let asked = call.on(Backend::Reference).plan()?;
    assert_eq!((asked.backend, asked.reason.as_str()), (Backend::Reference, "requested"));
    let auto = call.on(Backend::Auto);
    let fused = call.on(Backend::Fused);
    let plan = auto.plan()?;
    assert!(plan.backend != Backend::Auto && !plan.reason.is_empty(), "{plan}");
    assert_eq!(plan.to_string(), format!("{:?}: {}", plan.backend, plan.reason));
    auto.context().and_then(|_| auto.with_lse())?;
    for (op, result) in outcomes(&fused) {
        match plan.backend {
            // Candle's operation on Metal returns the output alone, to which `plan` refers. Where the kernels run, one
            // of them returns the log-sum-exp.
            Backend::Fused if op.ends_with("_with_lse") && plan.reason.starts_with(CANDLE_OPERATION) => {
                if let Err(error) = result {
                    assert!(error.to_string().starts_with(&format!("[{op}] no fused path: ")), "{error}");
                }
            }
            Backend::Fused => result?,
            // The first reason on Metal is what Candle's operation lacks: here the log-sum-exp.
            _ if op.ends_with("_with_lse") && call.q.device().is_metal() => {
                assert!(error_text(result).starts_with(&format!("[{op}] no fused path: ")));
            }
            _ => assert_eq!(error_text(result), format!("[{op}] no fused path: {}", plan.reason)),
        }
    }
    let error = error_text(fused.with_weights());
    let start = "[scaled_dot_product_attention_with_weights] no fused path: ";
    assert!(error.starts_with(start) && error.contains("weights"), "no fused kernel has weights: {error}");
    Ok(plan)
}

fn plan_names_backend_that_runs(device: &Device) {
    // On CUDA every size is compiled by itself.
    let cases = if device.is_cuda() { 10 } else { 100 };
    for_all(cases, recipes(dtypes(device)), |recipe| {
        let call = Call::new(&recipe.case(), recipe.dtype, device)?;
        let obstacle = match recipe.dtype {
            _ if recipe.uniform_fully_masked_rows => "FullyMaskedRows::Uniform",
            DType::F64 if device.is_cpu() => "F64",
            // Other kinds of devices may have other reasons.
            _ => "",
        };
        // Forcing an instruction set does not change what the kernel can do.
        for each in [call.clone(), call.on_instruction_set(InstructionSet::Scalar)] {
            let plan = planned(&each)?;
            assert!(
                plan.reason.contains(obstacle) && (obstacle.is_empty() || plan.backend == Backend::Reference),
                "{plan}"
            );
        }
        Ok(())
    });
}

fn plan_with_tracked_input_chooses_path_with_gradients(device: &Device) -> Result<()> {
    let var = |tensor: &Tensor| Var::from_tensor(tensor).expect("a variable").into_inner();
    let heads = var(&Tensor::ones(4, DType::F32, device)?);
    let bias = var(&Tensor::zeros((3, 5), DType::F32, device)?);
    let biased = AttentionMask::none().with_bias(&bias);
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 3, t_kv: 5, d: 8, d_v: 8 };
    let kinds = vec![Kind::Causal, Kind::BoolMask(MaskShape::Keys), Kind::Bias(MaskShape::Square)];
    for &dtype in dtypes(device) {
        let recipe = Recipe { chosen: Chosen::ALL, ..Recipe::plain(dims, vec![kinds.clone()], dtype) };
        let plain = Call::new(&recipe.case(), dtype, device)?.on(Backend::Auto);
        let plain = || plain.clone();
        for (what, call) in [
            ("q", Call { q: var(&plain().q), ..plain() }),
            ("k", Call { k: var(&plain().k), ..plain() }),
            ("v", Call { v: var(&plain().v), ..plain() }),
            ("bias", Call { mask: biased.clone(), ..plain() }),
            ("joined bias", Call { mask: AttentionMask::causal().and(&biased), ..plain() }),
            ("slopes", plain().with(|options| options.with_alibi_slopes(&heads))),
            ("sinks", plain().with(|options| options.with_sinks(&heads))),
            // Not a variable itself, but computed from one.
            ("result", Call { q: (var(&plain().q) * 2.0)?, ..plain() }),
        ] {
            // Candle's operation on Metal has no gradients, and kernels may be off. f64 has the reference path only,
            // for another reason.
            let plan = planned(&call)?;
            match device.is_metal() {
                _ if dtype == DType::F64 => {}
                false => assert_eq!(plan.backend, Backend::Fused, "{what}: {plan}"),
                true => {
                    let has_gradients = plan.reason.ends_with("the Metal backward kernels");
                    assert!(has_gradients || plan.reason.contains("has no gradients"), "{what}: {plan}");
                }
            }
            assert!(call.context()?.track_op(), "{what} leaves a trace in the context");
        }
        assert!(!plain().context()?.track_op(), "nothing tracked, nothing recorded");
    }
    Ok(())
}

fn of_kernel(dtype: DType) -> Call {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 9, d: 16, d_v: 8 };
    Call::fused(&Recipe::of_kernel(dims, vec![Kind::Causal], dtype).case(), dtype).expect("tensors")
}

/// Checks too that PyTorch's masks drop the same weights as on the reference path.
#[test]
fn dropout_runs_on_fused_kernel_and_matches_reference() -> Result<()> {
    // Weights that are kept are doubled, and rounded before they are or after.
    for (dtype, most) in DTYPES.into_iter().zip([5e-6, 5e-2, 8e-3]) {
        let seeded = |backend| {
            let call = of_kernel(dtype);
            call.with(|options| {
                options.with_dropout(0.5, true).with_dropout_seed(&TorchSeed::new(1)).with_backend(backend)
            })
        };
        assert_eq!(seeded(Backend::Auto).plan()?.backend, Backend::Fused);
        let error = max_error(&seeded(Backend::Fused).context()?, &seeded(Backend::Reference).context()?);
        assert!(error < most, "{dtype:?}: off by {error}");
        for (p, train) in [(0.5, false), (0.0, true), (0.5, true)] {
            let call = of_kernel(dtype).with(|options| options.with_dropout(p, train));
            assert_eq!(call.plan()?.backend, Backend::Fused);
            call.context()?;
        }
    }
    Ok(())
}

/// Checks that every call fails, on each backend that would use the instruction set.
#[test]
fn unsupported_instruction_set_is_rejected() {
    let available = InstructionSet::available().iter().map(InstructionSet::to_string).collect::<Vec<_>>().join(", ");
    let lacking: Vec<_> =
        InstructionSet::ALL.into_iter().filter(|instruction_set| !instruction_set.is_available()).collect();
    assert!(!lacking.is_empty(), "no processor has both Arm's and Intel's instructions");
    for instruction_set in lacking {
        for (dtype, backend) in DTYPES.into_iter().flat_map(|dtype| [(dtype, Backend::Auto), (dtype, Backend::Fused)]) {
            let call = of_kernel(dtype).on_instruction_set(instruction_set).on(backend);
            for (op, result) in outcomes(&call) {
                let expected = format!(
                    "[{op}] this processor lacks the instruction set {instruction_set}, expected one of {available}"
                );
                assert_eq!(error_text(result), expected);
            }
        }
    }
}

/// Prints the instruction sets that tests skip, in every run. `eprintln!` would not do: the test runner captures its
/// text where tests pass.
#[test]
fn available_instruction_sets_are_those_of_processor() {
    let available = InstructionSet::available();
    for instruction_set in InstructionSet::ALL {
        assert_eq!(instruction_set.is_available(), available.contains(&instruction_set));
        if !instruction_set.is_available() {
            let _ = writeln!(std::io::stderr(), "skipped: this processor lacks the instruction set {instruction_set}");
        }
    }
    assert!(available.contains(&InstructionSet::Scalar) && available.is_sorted(), "{available:?}");
}
