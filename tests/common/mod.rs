//! Helpers of all tests: devices, comparisons, and the folders of `models/`.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod allocations;
pub mod gguf;
pub mod property;

use std::collections::HashMap;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Termination};
use std::sync::LazyLock;

use candle_core::{DType, Device, Result, Shape, Tensor, Var, WithDType, bail};
use candle_nn::var_builder::{ShardedSafeTensors, ShardedVarBuilder};
use candle_nn::{VarBuilder, VarMap};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The device of the tests of weights, checkpoints, adapters and caches: the CPU, or the one that the variable
/// `TEST_DEVICE` names, `cuda` or `metal`.
pub static DEVICE: LazyLock<Device> = LazyLock::new(|| match std::env::var("TEST_DEVICE").as_deref() {
    Err(_) | Ok("cpu") => Device::Cpu,
    Ok("cuda") => found("CUDA", Device::new_cuda(0)),
    Ok("metal") => found("Metal", Device::new_metal(0)),
    Ok(other) => panic!("TEST_DEVICE is {other}, expected cpu, cuda or metal"),
});

/// Makes a test of `fn name(&Device)`, which returns nothing or a `Result<()>`, for the CPU, for CUDA and for Metal:
/// `on_each_device!(name)`.
///
/// Tests of CUDA and Metal are ignored, and reported as such, unless the feature of that name is on. Where it is on, a
/// missing device is a failure.
#[macro_export]
macro_rules! on_each_device {
    ($($name:ident),+ $(,)?) => {
        mod cpu { $( #[test] fn $name() { $crate::common::passed(super::$name(&candle_core::Device::Cpu)) } )+ }
        $crate::on_each_accelerator!($($name),+);
    };
}

/// Makes the tests of CUDA and Metal that [`on_each_device`] makes, and none of the CPU.
#[macro_export]
macro_rules! on_each_accelerator {
    ($($name:ident),+ $(,)?) => {
        mod cuda { $(
            #[test]
            #[cfg_attr(not(feature = "cuda"), ignore = "needs a CUDA device and the feature `cuda`")]
            fn $name() {
                let device = $crate::common::found("CUDA", candle_core::Device::new_cuda(0));
                $crate::common::passed(super::$name(&device))
            }
        )+ }
        mod metal { $(
            #[test]
            #[cfg_attr(not(feature = "metal"), ignore = "needs a Metal device and the feature `metal`")]
            fn $name() {
                let device = $crate::common::found("Metal", candle_core::Device::new_metal(0));
                $crate::common::passed(super::$name(&device))
            }
        )+ }
    };
}

/// Checks that a test that returned `outcome` has passed.
#[track_caller]
pub fn passed(outcome: impl Termination) {
    assert_eq!(outcome.report(), ExitCode::SUCCESS);
}

/// Returns a device that the features of this build say is there.
pub fn found(kind: &str, device: Result<Device>) -> Device {
    device.unwrap_or_else(|error| panic!("there is no {kind} device, which this build is for: {error}"))
}

/// Returns the folder of the repository.
pub fn root() -> &'static Path {
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    above.find(|folder| folder.join("tests/common").is_dir()).expect("a folder of the repository")
}

/// Returns the path of a file below `tests/`.
pub fn recorded(file: &str) -> PathBuf {
    root().join("tests").join(file)
}

/// Lists a folder in the order of the names.
pub fn listed(folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.as_ref().display()));
    let mut paths: Vec<_> = entries.map(|entry| entry.expect("it can be listed").path()).collect();
    paths.sort();
    paths
}

pub fn read_json<T: DeserializeOwned>(path: impl AsRef<Path>) -> T {
    let text = std::fs::read_to_string(&path);
    let path = path.as_ref().display();
    serde_json::from_str(&text.unwrap_or_else(|error| panic!("{path}: {error}")))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

pub fn recorded_tensors(file: &str) -> Result<HashMap<String, Tensor>> {
    candle_core::safetensors::load(recorded(file), &DEVICE)
}

/// The exit code and the output of a program.
pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

pub fn run(mut command: Command) -> Run {
    let output = command.output().expect("the program starts");
    let text = |bytes| String::from_utf8(bytes).expect("what is printed is UTF-8");
    Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Loads the tensors of a file as variables, with a builder over them.
pub fn variables(path: &Path) -> Result<(VarMap, VarBuilder<'static>)> {
    let vars = VarMap::new();
    let mut tensors = HashMap::new();
    for (name, tensor) in candle_core::safetensors::load(path, &DEVICE)? {
        let var = Var::from_tensor(&tensor)?;
        tensors.insert(name.clone(), var.as_tensor().clone());
        vars.data().lock().expect("one thread").insert(name, var);
    }
    Ok((vars, VarBuilder::from_tensors(tensors, DType::F32, &DEVICE)))
}

/// Opens a file of these tensors as each of several ranks reads it.
pub fn sharded(tensors: &HashMap<String, Tensor>) -> Result<ShardedVarBuilder<'static>> {
    let file = tempfile::NamedTempFile::new()?;
    candle_core::safetensors::save(tensors, file.path())?;
    // SAFETY: nothing writes to the file after it was saved; a mapping outlives its name.
    unsafe { ShardedSafeTensors::var_builder(&[file.path()], DType::F32, &DEVICE) }
}

/// Returns whether the tests run on another [`DEVICE`] than the CPU. A test of the CPU alone skips it for this reason.
pub fn skips_device(reason: &str) -> bool {
    if !DEVICE.is_cpu() {
        println!("skipped on {:?}: {reason}", DEVICE.location());
    }
    !DEVICE.is_cpu()
}

/// Returns a tensor of these numbers on a device, also of none: Metal copies no empty tensors.
pub fn copied_to<E: WithDType>(device: &Device, numbers: Vec<E>, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    if numbers.is_empty() {
        return Tensor::zeros(shape, E::DTYPE, device);
    }
    Tensor::from_vec(numbers, shape, device)
}

/// Returns all entries as f64, in order. They are converted on the CPU, since Metal has no f64.
pub fn values(tensor: &Tensor) -> Vec<f64> {
    let read = || tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1();
    read().expect("a tensor can be read back")
}

/// Returns the bits of every number in row-major order. All NaN are the same, with any sign and payload.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(|x| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Returns the largest difference. It is infinite if one side alone is NaN, or if shapes differ.
pub fn max_error(got: &Tensor, expected: &Tensor) -> f64 {
    if got.dims() != expected.dims() {
        return f64::INFINITY;
    }
    let difference = |(a, b): (f64, f64)| match (a == b || (a.is_nan() && b.is_nan()), (a - b).abs()) {
        (true, _) => 0.0,
        (false, difference) if difference.is_nan() => f64::INFINITY,
        (false, difference) => difference,
    };
    values(got).into_iter().zip(values(expected)).map(difference).fold(0.0, f64::max)
}

#[track_caller]
pub fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.dims(), expected.dims(), "{what}: shape");
    let error = max_error(got, expected);
    assert!(error <= tolerance, "{what}: off by {error:e}, more than {tolerance:e}");
}

/// Returns the largest difference divided by the largest expected number.
#[track_caller]
pub fn relative_error(got: &Tensor, expected: &Tensor) -> f64 {
    let numbers = values(expected);
    let largest = numbers.iter().fold(0.0, |most: f64, number| most.max(number.abs()));
    assert!(numbers.iter().all(|number| number.is_finite()) && largest > 0.0, "nothing to compare with");
    max_error(got, expected) / largest
}

/// Asserts that the largest difference, divided by the largest expected number, is within the tolerance.
#[track_caller]
pub fn assert_near(got: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let error = relative_error(got, expected);
    assert!(error <= tolerance, "{what}: off by {error:e} of the largest, more than {tolerance:e}");
}

/// Compares numbers of a shape and a dtype, each with a separate tolerance. Expected NaN and infinities have to be
/// found.
pub fn compare(
    what: &str,
    got: &Tensor,
    (shape, dtype): (&[usize], DType),
    expected: &[f64],
    tolerance: impl Fn(usize) -> f64,
) -> Result<()> {
    if got.dims() != shape || got.dtype() != dtype || got.elem_count() != expected.len() {
        bail!("{what}: shape {:?} in {:?}, expected {shape:?} in {dtype:?}", got.dims(), got.dtype());
    }
    for (n, (found, &wanted)) in values(got).into_iter().zip(expected).enumerate() {
        let equal = found == wanted || (found.is_nan() && wanted.is_nan());
        let most = tolerance(n);
        let is_within = wanted.is_finite() && (found - wanted).abs() <= most;
        if !equal && !is_within {
            bail!("{what}: entry {n} is {found}, expected {wanted} to within {most:e}");
        }
    }
    Ok(())
}

/// Checks that a config round-trips through JSON, and returns the JSON.
#[track_caller]
pub fn survives_json<T: Serialize + DeserializeOwned + PartialEq + Debug>(config: &T) -> String {
    let text = serde_json::to_string(config).expect("a config is plain data");
    assert_eq!(serde_json::from_str::<T>(&text).expect("the same"), *config);
    text
}

/// Returns the first line of an error, which users read without a backtrace.
#[track_caller]
pub fn error_text<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string().lines().next().unwrap_or_default().to_string(),
    }
}

/// A folder of a Hugging Face model, with the numbers of transformers.
#[derive(Clone)]
pub struct Model {
    pub name: String,
    pub config: Value,
    pub weights: HashMap<String, Tensor>,
    pub golden: HashMap<String, Tensor>,
}

impl Model {
    pub fn open(folder: &Path) -> Self {
        let tensors = |file| candle_core::safetensors::load(folder.join(file), &DEVICE).expect(file);
        Self {
            name: folder.file_name().expect("a folder has a name").to_string_lossy().into_owned(),
            config: read_json(folder.join("config.json")),
            weights: tensors("model.safetensors"),
            golden: tensors("golden.safetensors"),
        }
    }

    /// Opens all models of a folder.
    pub fn all(folder: &Path) -> Vec<Self> {
        listed(folder).iter().map(|folder| Self::open(folder)).collect()
    }
}

/// Two texts, and what a decoder of `tests/causal_lm/models` makes of them in transformers.
pub struct Decoded {
    pub ids: Vec<Vec<u32>>,
    /// (B, T, V)
    pub logits: Tensor,
    pub greedy: Vec<Vec<u32>>,
}

impl Decoded {
    pub fn of(folder: &Path) -> Result<Self> {
        let golden = candle_core::safetensors::load(folder.join("golden.safetensors"), &DEVICE)?;
        Ok(Self {
            ids: golden["ids"].to_vec2()?,
            logits: golden["logits"].clone(),
            greedy: golden["greedy"].to_vec2()?,
        })
    }
}

/// Joins ids as the examples expect them.
pub fn spelled(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// One system of `models/`: its config, and its golden inputs and outputs.
///
/// `CANDLE_ATTENTION_MODELS` names another folder of weights and numbers in the same form to test against; configs come
/// from `models/` all the same.
pub struct Golden {
    pub name: String,
    pub config: Value,
    io: HashMap<String, Tensor>,
}

pub fn models() -> PathBuf {
    root().join("models")
}

/// Lists the folders of `models/` that have a config.
pub fn systems() -> Vec<String> {
    let folders = listed(models()).into_iter().filter(|folder| folder.join("config.json").is_file());
    folders.map(|folder| folder.file_name().expect("a name").to_string_lossy().into_owned()).collect()
}

fn data(name: &str) -> PathBuf {
    let elsewhere = std::env::var_os("CANDLE_ATTENTION_MODELS").map(|root| PathBuf::from(root).join(name));
    elsewhere.filter(|folder| folder.is_dir()).unwrap_or_else(|| models().join(name))
}

impl Golden {
    pub fn open(name: &str) -> Self {
        let io = candle_core::safetensors::load(data(name).join("io.safetensors"), &DEVICE)
            .expect("the folder has inputs and outputs");
        Self { name: name.into(), config: Self::open_config(name), io }
    }

    pub fn open_config(name: &str) -> Value {
        read_json(models().join(name).join("config.json"))
    }

    pub fn file(&self, file: &str) -> PathBuf {
        data(&self.name).join(file)
    }

    /// Lists the names of the cases of the data, in alphabetical order.
    pub fn cases(&self) -> Vec<String> {
        let mut cases: Vec<_> =
            self.io.keys().filter_map(|name| name.split_once('.')).map(|(case, _)| case.to_string()).collect();
        cases.sort();
        cases.dedup();
        assert!(!cases.is_empty(), "{} has no cases", self.name);
        cases
    }

    pub fn find(&self, case: &str, name: &str) -> Option<&Tensor> {
        self.io.get(&format!("{case}.{name}"))
    }

    pub fn get(&self, case: &str, name: &str) -> &Tensor {
        self.find(case, name).unwrap_or_else(|| panic!("{} has no {case}.{name}", self.name))
    }

    pub fn top(&self, name: &str) -> &Tensor {
        &self.io[name]
    }
}
