//! Calls from any thread return the same bits.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::process::Command;
use std::sync::LazyLock;

use candle_attention::{DeltaOptions, RmsNorm, gated_delta_rule};

use rayon::prelude::*;

use crate::linear::case::{Product, TYPES};
use crate::*;

/// One call of attention or of a projection.
struct Work {
    name: String,
    call: Box<dyn Fn() -> Result<Vec<Tensor>> + Send + Sync>,
}

impl Work {
    fn run(&self) -> Vec<u64> {
        (self.call)().unwrap_or_else(|error| panic!("{error}: {}", self.name)).iter().flat_map(bits).collect()
    }
}

/// Calls for prefill, decoding, split keys, groups, few and many heads; for one row and many, few outputs and many; and
/// their results on one thread.
static ALL: LazyLock<(Vec<Work>, Vec<Vec<u64>>)> = LazyLock::new(|| all_with_results().expect("the calls run"));

fn all_with_results() -> Result<(Vec<Work>, Vec<Vec<u64>>)> {
    let mut all = Vec::new();
    for (b, h, h_kv, t_q, t_kv, kinds) in [
        (1, 2, 2, 300, 300, vec![Kind::Causal]),
        (2, 4, 2, 129, 257, vec![Kind::Causal, Kind::Window]),
        (1, 8, 1, 1, 5000, vec![]),
        (1, 1, 1, 1, 9001, vec![Kind::ValidLens]),
        (3, 8, 2, 1, 700, vec![Kind::Starts]),
        (1, 1, 1, 17, 2049, vec![Kind::Causal]),
        (5, 3, 1, 7, 33, vec![Kind::Bias(MaskShape::Head)]),
        (1, 2, 1, 700, 31, vec![Kind::BoolMask(MaskShape::Square)]),
    ] {
        for (dtype, instruction_set) in
            DTYPES.into_iter().flat_map(|dtype| InstructionSet::available().into_iter().map(move |t| (dtype, t)))
        {
            let dims = Dims { b, h, h_kv, t_q, t_kv, d: 64, d_v: 48 };
            let recipe = Recipe::of_kernel(dims, kinds.clone(), dtype);
            let call = Call::fused(&recipe.case(), dtype)?.on_instruction_set(instruction_set);
            let name = format!("{instruction_set}: {recipe:?}");
            all.push(Work { name, call: Box::new(move || call.with_lse().map(|(context, lse)| vec![context, lse])) });
        }
    }
    for (rows, inputs, outputs) in [(1, 2050, 1600), (12, 1030, 500), (16, 3001, 48), (400, 300, 100), (193, 40, 700)] {
        for (types, instruction_set) in
            TYPES.into_iter().flat_map(|types| InstructionSet::available().into_iter().map(move |t| (types, t)))
        {
            let product = Product::plain(types, rows, (inputs, outputs));
            let packed = product.case().packed(instruction_set)?;
            let xs = product.case().input()?;
            let name = format!("{instruction_set}: {product:?}");
            all.push(Work { name, call: Box::new(move || Ok(vec![packed.forward(&xs)?])) });
        }
    }
    let expected = pool(1).install(|| all.iter().map(Work::run).collect());
    Ok((all, expected))
}

/// Starts the caller's threads together.
#[test]
fn calls_from_many_threads_match_sequential_calls() {
    let (all, expected) = &*ALL;
    let start = std::sync::Barrier::new(8);
    std::thread::scope(|scope| {
        for caller in 0..8 {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for n in (caller..all.len()).step_by(3) {
                    assert!(all[n].run() == expected[n], "caller {caller}: {}", all[n].name);
                }
            });
        }
    });
}

/// Checks that scratch memory of a thread is not in use twice: a worker that waits in a parallel loop of another pool
/// may start another call.
#[test]
fn calls_nested_in_another_pool_match_sequential_calls() {
    let (all, expected) = &*ALL;
    for threads in [1, 2, 5] {
        pool(threads).install(|| {
            (0..all.len()).into_par_iter().with_max_len(1).for_each(|n| {
                assert!(all[n].run() == expected[n], "{threads} threads: {}", all[n].name);
                // And one level further down.
                let m = (n + 7) % all.len();
                let (one, other) = rayon::join(|| all[m].run(), || all[n].run());
                for (got, at) in [(one, m), (other, n)] {
                    assert!(got == expected[at], "{threads} threads, joined: {}", all[at].name);
                }
            });
        });
    }
}

/// Returns numbers from -1 to 1 that do not repeat.
fn waves(shape: impl Into<candle_core::Shape>, step: f64) -> Result<Var> {
    let shape = shape.into();
    let numbers = (Tensor::arange(0f32, shape.elem_count() as f32, &CPU)? * step)?.sin()?;
    Var::from_tensor(&numbers.reshape(shape)?)
}

/// Returns the gradients of attention, of a norm and of the gated delta rule, each large enough for several threads.
fn backward_passes() -> Result<Vec<Tensor>> {
    let q = waves((1, 4, 300, 64), 0.37)?;
    let k = waves((1, 2, 300, 64), 0.53)?;
    let v = waves((1, 2, 300, 64), 0.71)?;
    let context = scaled_dot_product_attention(&q, &k, &v, &AttentionMask::causal(), &SdpaOptions::default())?;
    let mut found = gradients(&context, &[&q, &k, &v])?;
    let weight = waves(512, 0.91)?;
    let xs = waves((300, 512), 0.43)?;
    let normed = RmsNorm::new(weight.as_tensor().clone(), 1e-6)?.forward(&xs)?;
    found.extend(gradients(&normed, &[&xs, &weight])?);
    let decay = Var::from_tensor(&(waves((1, 4, 300), 0.29)?.as_tensor() - 1.0)?)?;
    let keys = waves((1, 4, 300, 64), 0.59)?;
    let values = waves((1, 4, 300, 64), 0.83)?;
    let (ys, state) = gated_delta_rule(&q, &keys, &values, Some(&decay), None, None, &DeltaOptions::default())?;
    found.extend(gradients(&ys, &[&q, &keys, &values, &decay])?);
    found.extend([ys.detach(), state.detach()]);
    Ok(found)
}

/// Prints a hash of the bits of every call on the helper threads of this process.
#[test]
#[ignore = "run by calls_with_any_thread_count_have_same_bits"]
fn child_prints_hash_of_bits() -> Result<()> {
    let mut hasher = DefaultHasher::new();
    for work in &ALL.0 {
        work.run().hash(&mut hasher);
    }
    for gradient in backward_passes()? {
        bits(&gradient).hash(&mut hasher);
    }
    println!("hash {:x}", hasher.finish());
    Ok(())
}

/// Runs the calls in processes with different numbers of threads, more than the machine may have cores.
#[test]
fn calls_with_any_thread_count_have_same_bits() {
    let hash_with = |threads: &str| {
        let mut child = Command::new(std::env::current_exe().expect("a test program"));
        child.args(["--ignored", "--exact", "threads::child_prints_hash_of_bits", "--nocapture"]);
        let output = child.env("RAYON_NUM_THREADS", threads).output().expect("a child process");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let hash = text.lines().find_map(|line| line.split_once("hash ")).map(|(_, hash)| hash.to_string());
        hash.unwrap_or_else(|| panic!("{threads} threads: {text}{}", String::from_utf8_lossy(&output.stderr)))
    };
    let expected = hash_with("1");
    for threads in ["2", "3", "4", "8"] {
        assert_eq!(hash_with(threads), expected, "{threads} threads");
    }
}
