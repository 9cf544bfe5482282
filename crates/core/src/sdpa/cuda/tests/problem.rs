//! A call with its inputs, and the comparison of its results on the emulators with the results of other paths.

use candle_attention_call::RequestedResults;
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::mask::AttentionMask;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::metal::MetalKernelCall;
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::packed::PackedSequences;
use crate::sdpa::run::run;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::init::TorchSeed;

/// The element types of the kernels.
pub const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Returns whether the emulator runs here, and prints why a test is skipped where it does not.
pub fn emulator_runs() -> bool {
    match candle_attention_cuda::is_available(&Device::Cpu) {
        Ok(()) => true,
        Err(reason) => {
            println!("skipped: {reason}");
            false
        }
    }
}

/// Returns the largest difference that a result may have, as a part of its largest number.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 3e-5,
        DType::F16 => 4e-3,
        _ => 3e-2,
    }
}

/// The sizes of a call; of packed sequences, T_q and T_kv are totals.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

/// Small sizes with grouped heads, of which tests change some.
pub const SIZES: Sizes = Sizes { b: 2, h: 4, h_kv: 2, t_q: 19, t_kv: 37, d: 16, d_v: 16 };

/// The order of queries, keys and values in memory, from which their strides follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Contiguous (B, H, T, D).
    Contiguous,
    /// As a layer projects them: (B, T, H, D).
    HeadsInRows,
    /// Views into wider rows, whose first element is not aligned.
    OddRows,
    /// (B, H, D, T), which is made contiguous before a kernel reads it.
    ColumnMajor,
    /// Keys and values with a batch of one, which all sequences share.
    SharedKeys,
}

/// The inputs of a call, and everything else that describes it.
#[derive(Debug, Clone)]
pub struct Problem {
    pub dtype: DType,
    pub sizes: Sizes,
    pub order: Order,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
    pub sequences: Option<PackedSequences>,
    /// The dimensions of a bias, if there is one.
    pub bias: Option<[usize; 4]>,
    /// Whether the kernels read the bias in the dtype of the queries, which rounds it, instead of in f32.
    pub bias_in_half: bool,
    /// The number that every bias and every relative bias is, instead of random ones.
    pub bias_value: Option<f64>,
    pub has_slopes: bool,
    /// The dimensions of a relative bias, if there is one.
    pub relative_bias: Option<Vec<usize>>,
    pub has_sinks: bool,
    /// Whether the log-sum-exp is requested, and has a gradient.
    pub with_lse: bool,
}

/// The inputs that gradients flow into.
struct Variables {
    q: Var,
    k: Var,
    v: Var,
    bias: Option<Var>,
    slopes: Option<Var>,
    relative_bias: Option<Var>,
    sinks: Option<Var>,
}

/// A result or a gradient, with its name for messages.
struct Named {
    name: &'static str,
    numbers: Vec<f64>,
}

/// A path that computes a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Path {
    /// The CUDA kernels on the emulator.
    Emulator,
    /// The Metal kernels on the emulator.
    Metal,
    Cpu,
    Reference,
}

impl Problem {
    /// Returns a call without score modifiers.
    pub fn new(dtype: DType, mask: AttentionMask) -> Self {
        Self {
            dtype,
            sizes: SIZES,
            order: Order::Contiguous,
            mask,
            options: SdpaOptions::default(),
            sequences: None,
            bias: None,
            bias_in_half: false,
            bias_value: None,
            has_slopes: false,
            relative_bias: None,
            has_sinks: false,
            with_lse: false,
        }
    }

    /// Checks the output, the log-sum-exp and all gradients of the CUDA and of the Metal kernels against the reference
    /// path in f64, and the output against the CPU kernel. `seed` draws the inputs.
    pub fn check(&self, seed: u64) -> Result<()> {
        let variables = self.draw(seed)?;
        let exact = self.results(&variables.to_f64()?, seed, Path::Reference)?;
        let on_cuda = self.results(&variables, seed, Path::Emulator)?;
        self.assert_close(Path::Emulator, &on_cuda, &exact);
        self.assert_close(Path::Metal, &self.results(&variables, seed, Path::Metal)?, &exact);
        let on_cpu = self.results(&variables, seed, Path::Cpu)?;
        self.assert_close(Path::Emulator, &on_cuda[..1], &on_cpu[..1]);
        Ok(())
    }

    /// Checks the results of a path against others.
    fn assert_close(&self, path: Path, all_found: &[Named], all_expected: &[Named]) {
        assert_eq!(all_found.len(), all_expected.len(), "{path:?}: {self:?}");
        for (found, expected) in all_found.iter().zip(all_expected) {
            assert_eq!(found.name, expected.name);
            assert_eq!(found.numbers.len(), expected.numbers.len(), "{} on {path:?}", found.name);
            let finite = expected.numbers.iter().filter(|number| number.is_finite());
            let largest = finite.fold(0.1, |largest: f64, number| largest.max(number.abs()));
            for (index, (own, wanted)) in found.numbers.iter().zip(&expected.numbers).enumerate() {
                let is_close = own == wanted || (own - wanted).abs() <= tolerance(self.dtype) * largest;
                assert!(
                    is_close,
                    "{} {index} on {path:?} is {own}, expected {wanted} of {largest}: {self:?}",
                    found.name
                );
            }
        }
    }

    fn draw(&self, seed: u64) -> Result<Variables> {
        let generator = TorchSeed::new(seed);
        let Sizes { b, h, h_kv, t_q, t_kv, d, d_v } = self.sizes;
        let draw = |dims: &[usize], dtype: DType| Var::from_tensor(&generator.randn(dims)?.to_dtype(dtype)?);
        let rows = |batch: usize, heads: usize, t: usize, width: usize| match (&self.sequences, self.order) {
            (Some(_), _) => draw(&[t, heads, width], self.dtype),
            (None, Order::HeadsInRows) => draw(&[batch, t, heads, width], self.dtype),
            (None, Order::OddRows) => draw(&[batch, heads, t, width + 3], self.dtype),
            (None, Order::ColumnMajor) => draw(&[batch, heads, width, t], self.dtype),
            (None, Order::Contiguous | Order::SharedKeys) => draw(&[batch, heads, t, width], self.dtype),
        };
        let b_kv = if self.order == Order::SharedKeys { 1 } else { b };
        let optional = |dims: Option<&[usize]>| dims.map(|dims| draw(dims, DType::F32)).transpose();
        let biases = |dims: Option<&[usize]>| -> Result<Option<Var>> {
            let (Some(dims), Some(value)) = (dims, self.bias_value) else { return optional(dims) };
            Ok(Some(Var::from_tensor(&Tensor::full(value as f32, dims, &Device::Cpu)?)?))
        };
        Ok(Variables {
            q: rows(b, h, t_q, d)?,
            k: rows(b_kv, h_kv, t_kv, d)?,
            v: rows(b_kv, h_kv, t_kv, d_v)?,
            bias: biases(self.bias.as_ref().map(|dims| dims.as_slice()))?,
            slopes: optional(self.has_slopes.then_some(&[h][..]))?,
            relative_bias: biases(self.relative_bias.as_deref())?,
            sinks: optional(self.has_sinks.then_some(&[h][..]))?,
        })
    }

    /// Returns a view (B, H, T, d) of a variable.
    fn view(&self, variable: &Var, d: usize) -> Result<Tensor> {
        match (&self.sequences, self.order) {
            (None, Order::HeadsInRows) => variable.transpose(1, 2),
            (None, Order::OddRows) => variable.narrow(3, 1, d),
            (None, Order::ColumnMajor) => variable.transpose(2, 3),
            _ => Ok(variable.as_tensor().clone()),
        }
    }

    /// Returns the call of these inputs.
    fn call(&self, variables: &Variables, path: Path) -> Result<Call> {
        let mut options = self.options.clone();
        options.backend = if path == Path::Reference { Backend::Reference } else { Backend::Auto };
        let tensor = |variable: &Option<Var>| variable.as_ref().map(|own| own.as_tensor().clone());
        options.alibi_slopes = tensor(&variables.slopes);
        options.relative_bias = tensor(&variables.relative_bias);
        options.sinks = tensor(&variables.sinks);
        let mask = match &variables.bias {
            Some(bias) => self.mask.clone().with_bias(bias),
            None => self.mask.clone(),
        };
        let q = self.view(&variables.q, self.sizes.d)?;
        let k = self.view(&variables.k, self.sizes.d)?;
        let v = self.view(&variables.v, self.sizes.d_v)?;
        let mut call = Call::new("test", Qkv { q: &q, k: &k, v: &v }, self.sequences.as_ref(), &mask, &options)?;
        if self.bias_in_half && matches!(path, Path::Emulator | Path::Metal) {
            let bias = &mut call.attention.scores.bias;
            *bias = bias.take().map(|own| own.to_dtype(self.dtype)).transpose()?;
        }
        Ok(call)
    }

    /// Returns the output, the log-sum-exp if it is requested, and the gradients of all inputs for a loss that depends
    /// on all results.
    fn results(&self, variables: &Variables, seed: u64, path: Path) -> Result<Vec<Named>> {
        let call = self.call(variables, path)?;
        let (output, lse) = match path {
            Path::Emulator => self.on_cuda(&call)?,
            Path::Metal => self.on_metal(&call)?,
            Path::Cpu | Path::Reference => {
                let wanted = RequestedResults { log_sum_exp: true, ..RequestedResults::default() };
                let (output, lse) = run(call, wanted)?.output_and_log_sum_exp()?;
                (output, self.with_lse.then_some(lse))
            }
        };
        let generator = TorchSeed::new(seed + 1);
        let mut loss = weighted_sum(&output, &generator)?;
        let mut results = vec![Named::new("output", &output)?];
        if let Some(lse) = &lse {
            loss = (loss + weighted_sum(lse, &generator)?)?;
            results.push(Named::new("log-sum-exp", lse)?);
        }
        let gradients = loss.backward()?;
        for (name, variable) in variables.named() {
            let Some(gradient) = gradients.get(variable) else { panic!("{name} has no gradient on {path:?}") };
            results.push(Named::new(name, gradient)?);
        }
        Ok(results)
    }

    /// Runs a call with the CUDA kernels.
    fn on_cuda(&self, call: &Call) -> Result<(Tensor, Option<Tensor>)> {
        let wanted = RequestedResults { log_sum_exp: self.with_lse, ..RequestedResults::default() };
        let cuda_path = CudaPath::plan(call, wanted).map_err(candle_core::Error::msg)?;
        let attended = cuda_path.attend(wanted)?;
        Ok((attended.output, attended.log_sum_exp))
    }

    /// Runs a call with the Metal kernels.
    fn on_metal(&self, call: &Call) -> Result<(Tensor, Option<Tensor>)> {
        let wanted = RequestedResults { log_sum_exp: self.with_lse, ..RequestedResults::default() };
        let kernel_call = MetalKernelCall::plan(call, wanted).map_err(candle_core::Error::msg)?;
        let attended = kernel_call.attend(wanted)?;
        Ok((attended.output, attended.log_sum_exp))
    }
}

impl Variables {
    fn to_f64(&self) -> Result<Self> {
        let wide = |variable: &Var| Var::from_tensor(&variable.to_dtype(DType::F64)?);
        let optional = |variable: &Option<Var>| variable.as_ref().map(wide).transpose();
        Ok(Self {
            q: wide(&self.q)?,
            k: wide(&self.k)?,
            v: wide(&self.v)?,
            bias: optional(&self.bias)?,
            slopes: optional(&self.slopes)?,
            relative_bias: optional(&self.relative_bias)?,
            sinks: optional(&self.sinks)?,
        })
    }

    /// Returns the variables of the call with the names of their gradients.
    fn named(&self) -> Vec<(&'static str, &Var)> {
        let mut named = vec![("gradient of q", &self.q), ("gradient of k", &self.k), ("gradient of v", &self.v)];
        for (name, variable) in [
            ("gradient of the bias", &self.bias),
            ("gradient of the slopes", &self.slopes),
            ("gradient of the relative bias", &self.relative_bias),
            ("gradient of the sinks", &self.sinks),
        ] {
            named.extend(variable.as_ref().map(|own| (name, own)));
        }
        named
    }
}

impl Named {
    fn new(name: &'static str, tensor: &Tensor) -> Result<Self> {
        Ok(Self { name, numbers: to_vec(tensor)? })
    }
}

/// Returns the sum of a tensor with weights that every dtype represents.
fn weighted_sum(tensor: &Tensor, generator: &TorchSeed) -> Result<Tensor> {
    let weights = (generator.randn(tensor.shape())?.clamp(-3f32, 3f32)? * 4.0)?.round()?;
    let weights = (weights.to_dtype(DType::F64)? / 4.0)?;
    tensor.to_dtype(DType::F64)?.mul(&weights)?.sum_all()
}
