//! The crate's answer to a case, held against the oracle's.
//!
//! Tolerances are a bound on the rounding of each result, worked out from the terms that were summed: with the machine
//! epsilon ε of the accumulation (twice the rounding error of one operation, so the bound has a factor of two to
//! spare), a score of D products errs by at most (D + 8) ε times the sum of their absolute values; the log-sum-exp errs
//! as the largest such error and by the sum over T_kv; a weight errs by twice that, relatively; a context by the same
//! on each of its terms. Half precision adds the rounding of the result, nothing else, since scores and sums are f32
//! there.

use candle_attention::cpu::InstructionSet;
use candle_attention::{
    AttentionMask, AttentionOutput, Backend, FullyMaskedRows, OutputLayout, Plan, SdpaOptions, ValidLens, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::array::Array;
use crate::common::{bits, compare, values};
use crate::oracle::{Alignment, Attended, Case, Dims, Lens, Mask, Options, Part};
use crate::recipe::wide;

pub const CPU: Device = Device::Cpu;

/// A way to compute a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Path {
    Asked(Backend),
    /// The CPU's kernel.
    Kernel(InstructionSet),
}

impl Path {
    pub const REFERENCE: Self = Self::Asked(Backend::Reference);

    /// Returns the kernel on every instruction set of this processor.
    pub fn kernels() -> Vec<Self> {
        InstructionSet::available().into_iter().map(Self::Kernel).collect()
    }

    /// Returns all paths that can compute a case.
    pub fn of(case: &Case, dtype: DType, device: &Device) -> Vec<Self> {
        match device.is_cpu() {
            true if dtype == DType::F64 || case.uniform_fully_masked_rows => vec![Self::REFERENCE],
            true => [vec![Self::REFERENCE], Self::kernels()].concat(),
            // The kernels for CUDA are compiled for each size by themselves, so that they have separate tests.
            false if device.is_cuda() => vec![Self::REFERENCE],
            false => vec![Self::REFERENCE, Self::Asked(Backend::Auto)],
        }
    }
}

/// A case as the crate takes it.
#[derive(Clone)]
pub struct Call {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

impl Call {
    /// Returns a call with default options, on the fused path.
    pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask) -> Self {
        let options = SdpaOptions::default().with_backend(Backend::Fused);
        Self { q: q.clone(), k: k.clone(), v: v.clone(), mask: mask.clone(), options }
    }

    /// Returns a call on the fused path of the CPU.
    pub fn fused(case: &Case, dtype: DType) -> Result<Self> {
        Ok(Self::new(case, dtype, &Device::Cpu)?.on(Backend::Fused))
    }

    pub fn with(mut self, change: impl FnOnce(SdpaOptions) -> SdpaOptions) -> Self {
        self.options = change(self.options);
        self
    }

    pub fn on(&self, backend: Backend) -> Self {
        self.clone().with(|options| options.with_backend(backend))
    }

    pub fn by(&self, path: Path) -> Self {
        match path {
            Path::Asked(backend) => self.on(backend),
            Path::Kernel(instruction_set) => self.on(Backend::Fused).on_instruction_set(instruction_set),
        }
    }

    pub fn on_instruction_set(&self, instruction_set: InstructionSet) -> Self {
        self.clone().with(|options| options.with_instruction_set(instruction_set))
    }

    pub fn context(&self) -> Result<Tensor> {
        scaled_dot_product_attention(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    pub fn with_lse(&self) -> Result<(Tensor, Tensor)> {
        scaled_dot_product_attention_with_lse(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    pub fn with_weights(&self) -> Result<AttentionOutput> {
        scaled_dot_product_attention_with_weights(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    /// Returns output, log-sum-exp and, on paths that have them, weights, by all three functions. The output of each
    /// function is compared with the others. The functions that need the least memory come first.
    pub fn results(&self) -> Result<Vec<Tensor>> {
        let context = self.context()?;
        let plan = self.plan()?;
        let is_reference = plan.backend == Backend::Reference;
        let (sequence_first, lse) =
            self.clone().with(|options| options.with_output_layout(OutputLayout::Bthd)).with_lse()?;
        let lie_so = context.is_contiguous() && sequence_first.transpose(1, 2)?.is_contiguous();
        if !lie_so && context.elem_count() > 0 {
            bail!("strides {:?} and {:?} of {:?}", context.stride(), sequence_first.stride(), context.shape());
        }
        // No fused path returns weights, and Candle's operation on Metal returns no log-sum-exp.
        let output = if is_reference { Some(self.with_weights()?) } else { None };
        let is_of_candle = plan.reason.starts_with("candle_nn::ops::sdpa");
        let beside = std::iter::once(&sequence_first).filter(|_| !is_of_candle);
        if beside.chain(output.as_ref().map(|output| &output.output)).any(|other| bits(other) != bits(&context)) {
            bail!("another context beside the log-sum-exp or the weights");
        }
        Ok([context, lse].into_iter().chain(output.map(|output| output.weights)).collect())
    }

    pub fn plan(&self) -> Result<Plan> {
        plan(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    pub fn new(case: &Case, dtype: DType, device: &Device) -> Result<Self> {
        Self::with_leaves(case, dtype, device, &mut |_, tensor| Ok(tensor))
    }

    /// Builds the call with `leaf` applied to each buffer that can have a gradient, for example to make it a variable.
    pub fn with_leaves(
        case: &Case,
        dtype: DType,
        device: &Device,
        leaf: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut viewed = |name: &str, array: &Array, leaf_dtype: DType| -> Result<Tensor> {
            array.look(&leaf(name, array.leaf(leaf_dtype, device)?)?)
        };
        let q = viewed("q", &case.q, dtype)?;
        let k = viewed("k", &case.k, dtype)?;
        let v = viewed("v", &case.v, dtype)?;
        let mask =
            attention_mask(&case.masks, device, |m, p, bias| viewed(&format!("bias {m} {p}"), bias, wide(dtype)))?;
        let fully_masked_rows =
            if case.uniform_fully_masked_rows { FullyMaskedRows::Uniform } else { FullyMaskedRows::Zero };
        let mask = mask.with_fully_masked_rows(fully_masked_rows);
        let distances = case.options.relative_bias.as_ref();
        let distances = distances.map(|biases| viewed("distances", biases, wide(dtype))?.squeeze(2)).transpose()?;
        let mut heads = |name: &str, numbers: &[f64]| {
            leaf(name, Tensor::new(numbers, &Device::Cpu)?.to_dtype(wide(dtype))?.to_device(device)?)
        };
        let mut options = numbers(&case.options);
        if let Some(biases) = &distances {
            let is_shared = biases.dim(0)? == 1;
            options = options.with_relative_bias(&if is_shared { biases.squeeze(0)? } else { biases.clone() });
        }
        if let Some(slopes) = &case.options.alibi_slopes {
            options = options.with_alibi_slopes(&heads("slopes", slopes)?);
        }
        if let Some(sinks) = &case.options.sinks {
            options = options.with_sinks(&heads("sinks", sinks)?);
        }
        Ok(Self { q, k, v, mask, options })
    }
}

/// Converts masks of the oracle to a mask of the crate; `bias` returns the tensor of a bias.
pub fn attention_mask(
    masks: &[Mask],
    device: &Device,
    mut bias: impl FnMut(usize, usize, &Array) -> Result<Tensor>,
) -> Result<AttentionMask> {
    let mut whole: Option<AttentionMask> = None;
    for (m, mask) in masks.iter().enumerate() {
        let mut one = match &mask.alignment {
            Alignment::Free => AttentionMask::none(),
            Alignment::Causal => AttentionMask::causal(),
            Alignment::UpperLeft => AttentionMask::causal_upper_left(),
            Alignment::Offset(n) => AttentionMask::causal_with_offset(*n),
            Alignment::Offsets(offsets) => AttentionMask::causal_with_offsets(offsets.clone()),
        };
        for (p, part) in mask.parts.iter().enumerate() {
            one = match part {
                Part::ValidLens(lens) => one.with_valid_lens(valid_lens(lens)),
                Part::Starts(lens) => one.with_starts(valid_lens(lens)),
                Part::Prefix(lens) => one.with_prefix(valid_lens(lens)),
                Part::Window(w) => one.with_window(*w),
                Part::LocalWindow(left, right) => one.with_local_window(*left, *right),
                Part::Chunk(size) => one.with_chunk(*size),
                Part::BoolMask(keep) => one.with_bool_mask(&keep.tensor(DType::U8, device)?),
                Part::Bias(array) => one.with_bias(&bias(m, p, array)?),
            };
        }
        whole = Some(whole.map_or(one.clone(), |whole| whole.and(&one)));
    }
    Ok(whole.unwrap_or_else(AttentionMask::none))
}

fn valid_lens(lens: &Lens) -> ValidLens {
    match lens {
        Lens::PerSequence(lens) => lens.clone().into(),
        Lens::PerQuery(rows) => rows.clone().into(),
    }
}

/// Returns the options of the reference path.
pub fn reference() -> SdpaOptions {
    SdpaOptions::default().with_backend(Backend::Reference)
}

/// Returns scale and softcap, on the reference path.
pub fn numbers(given: &Options) -> SdpaOptions {
    let options = given.scale.map_or(reference(), |scale| reference().with_scale(scale));
    given.softcap.map_or(options.clone(), |softcap| options.with_softcap(softcap))
}

/// Compares a case with the oracle on every path that can compute it.
pub fn check(case: &Case, dtype: DType, device: &Device) -> Result<()> {
    check_on(case, dtype, device, &Path::of(case, dtype, device))
}

pub fn check_on(case: &Case, dtype: DType, device: &Device, paths: &[Path]) -> Result<()> {
    let expected = Expected::new(case, dtype);
    for &path in paths {
        let run = || -> Result<_> {
            let call = Call::new(case, dtype, device)?;
            let plan = call.by(path).plan()?;
            // Calls that the kernel supports are planned for it, whether requested or automatic, and the reason names
            // the instruction set.
            if let Path::Kernel(instruction_set) = path
                && !(has_word(&plan.reason, &instruction_set.to_string())
                    && call.on(Backend::Auto).plan()?.backend == plan.backend)
            {
                bail!("planned as {plan}")
            }
            call.by(path).results()
        };
        let outcome = run().and_then(|results| expected.on(path).check(&results));
        outcome.map_err(|difference| difference.context(format!("{path:?}")))?;
    }
    Ok(())
}

/// Returns whether a sentence contains the word, not only within a longer word.
pub fn has_word(sentence: &str, word: &str) -> bool {
    sentence.split(|c: char| !c.is_ascii_alphanumeric()).any(|other| other == word)
}

/// The oracle's numbers, and how far each result may be off them.
#[derive(Clone)]
pub struct Expected {
    pub attended: Attended,
    dims: Dims,
    dtype: DType,
    softcap: f64,
    epsilon: f64,
    /// The rounding error of one number of the result: relative, and absolute below the smallest normal number.
    unit: f64,
    smallest: f64,
    /// The relative rounding error of each weight before it is multiplied by its value.
    rounded_weights: f64,
    /// The absolute error of each score.
    cap: f64,
}

impl Expected {
    pub fn new(case: &Case, dtype: DType) -> Self {
        let (unit, smallest) = match dtype {
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            DType::BF16 => (2f64.powi(-8), 1e-37),
            _ => (0.0, 1e-37),
        };
        let epsilon = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let attended = case.attend();
        let dims = case.dims;
        let softcap = case.options.softcap.unwrap_or(0.0);
        Self { attended, dims, dtype, softcap, epsilon, unit, smallest, rounded_weights: 0.0, cap: 0.0 }
    }

    /// Returns the bounds for a path. A fused kernel may round weights to bf16 before their product with bf16 values,
    /// as PyTorch's does, and may compute the cap's hyperbolic tangent from an exponential, with an error of some ε of
    /// 1 even near 0.
    pub fn on(&self, path: Path) -> Self {
        let mut expected = self.clone();
        if path != Path::REFERENCE {
            expected.rounded_weights = if self.dtype == DType::BF16 { self.unit } else { 0.0 };
            expected.cap = 4.0 * self.epsilon * self.softcap;
        }
        expected
    }

    /// Compares output, log-sum-exp and, where there are any, weights.
    pub fn check(&self, results: &[Tensor]) -> Result<()> {
        self.context(&results[0])?;
        self.lse(&results[1])?;
        results.get(2).map_or(Ok(()), |weights| self.weights(weights))
    }

    fn score_bound(&self, row: usize) -> f64 {
        (self.dims.d + 8) as f64 * self.epsilon * self.attended.score_terms[row] + self.cap
    }

    /// Returns the bound of a weight, relative to it.
    pub fn share_bound(&self, row: usize) -> f64 {
        2.0 * self.score_bound(row) + (2 * self.dims.t_kv + 16) as f64 * self.epsilon
    }

    fn lse_bound(&self, row: usize) -> f64 {
        let sum = self.score_bound(row) + (self.dims.t_kv + 8) as f64 * self.epsilon;
        let lse = self.attended.lse[row];
        if lse.is_finite() { sum + self.epsilon * lse.abs() } else { sum }
    }

    pub fn context(&self, context: &Tensor) -> Result<()> {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        compare("context", context, (&[b, h, t_q, d_v], self.dtype), &self.attended.context, |n| {
            let share = self.share_bound(n / d_v) + self.rounded_weights;
            self.attended.context_terms[n] * share + self.attended.context[n].abs() * self.unit + self.smallest
        })
    }

    /// Compares a merged output. The fraction of a part has the error of a log-sum-exp, and in half precision each
    /// part's output was rounded before, in each of several `stages`.
    pub fn merged_context(&self, context: &Tensor, stages: f64) -> Result<()> {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        compare("context", context, (&[b, h, t_q, d_v], self.dtype), &self.attended.context, |n| {
            let row = n / d_v;
            let lse = if self.attended.lse[row].is_finite() { self.lse_bound(row) } else { 0.0 };
            let share = self.share_bound(row) + self.rounded_weights + 2.0 * lse + 2.0 * self.unit;
            stages * (self.attended.context_terms[n] * share + 2.0 * self.smallest)
        })
    }

    /// Compares weights. In a row of NaN, weights of masked keys are not compared.
    pub fn weights(&self, weights: &Tensor) -> Result<()> {
        let Dims { b, h, t_q, t_kv, .. } = self.dims;
        let expected = self.attended.weights.iter().zip(values(weights)).enumerate();
        let is_nan = |n: usize| self.attended.lse[n / t_kv].is_nan();
        let expected = expected.map(|(n, (&x, found))| if is_nan(n) && !x.is_nan() { found } else { x });
        let expected: Vec<f64> = expected.collect();
        compare("weights", weights, (&[b, h, t_q, t_kv], self.dtype), &expected, |n| {
            expected[n] * (self.share_bound(n / t_kv) + self.unit) + self.smallest
        })
    }

    pub fn lse(&self, lse: &Tensor) -> Result<()> {
        let Dims { b, h, t_q, .. } = self.dims;
        compare("lse", lse, (&[b, h, t_q], wide(self.dtype)), &self.attended.lse, |n| self.lse_bound(n))
    }
}
