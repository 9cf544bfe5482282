//! The crate's answer to a case, held against the oracle's.
//!
//! Tolerances are a bound on the rounding of each result, worked out from the terms that were summed: with the machine
//! epsilon ε of the accumulation (twice the rounding error of one operation, so the bound has a factor of two to
//! spare), a score of D products errs by at most (D + 8) ε times the sum of their absolute values; the log-sum-exp errs
//! as the largest such error and by the sum over T_kv; a weight errs by twice that, relatively; a context by the same
//! on each of its terms. Half precision adds the rounding of the result, nothing else, since scores and sums are f32
//! there.

use candle_attention::cpu::Tier;
use candle_attention::{
    AttentionMask, AttentionOutput, Backend, EmptyRows, OutputOrder, Plan, SdpaOptions, ValidLens, plan,
    scaled_dot_product_attention, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::Array;
use crate::common::values;
use crate::oracle::{Alignment, Attended, Case, Dims, Lens, Mask, Part};
use crate::recipe::wide;

/// What differs, and where.
pub type Outcome = std::result::Result<(), String>;

/// The numbers of a case that gradients can flow into.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leaf {
    Q,
    K,
    V,
    /// The part of a mask.
    Bias(usize, usize),
    Sinks,
    Slopes,
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
    /// Standard options, on the fused path.
    pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask) -> Self {
        let options = SdpaOptions::default().with_backend(Backend::Fused);
        Self { q: q.clone(), k: k.clone(), v: v.clone(), mask: mask.clone(), options }
    }

    /// On the fused path of the CPU.
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

    pub fn on_reference(&self) -> Self {
        self.on(Backend::Reference)
    }

    pub fn on_tier(&self, tier: Tier) -> Self {
        self.clone().with(|options| options.with_cpu_tier(tier))
    }

    pub fn in_order(&self, order: OutputOrder) -> Self {
        self.clone().with(|options| options.with_output_order(order))
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

    pub fn plan(&self) -> Result<Plan> {
        plan(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    pub fn new(case: &Case, dtype: DType, device: &Device) -> Result<Self> {
        Self::with_leaves(case, dtype, device, &mut |_, tensor| Ok(tensor))
    }

    /// `leaf` may put another tensor of the same numbers in the place of each buffer, a variable say.
    pub fn with_leaves(
        case: &Case,
        dtype: DType,
        device: &Device,
        leaf: &mut dyn FnMut(Leaf, Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let mut viewed = |which: Leaf, array: &Array, dtype: DType| -> Result<Tensor> {
            array.look(&leaf(which, array.leaf(dtype, device)?)?)
        };
        let q = viewed(Leaf::Q, &case.q, dtype)?;
        let k = viewed(Leaf::K, &case.k, dtype)?;
        let v = viewed(Leaf::V, &case.v, dtype)?;
        let mask = attention_mask(&case.masks, device, |m, p, bias| viewed(Leaf::Bias(m, p), bias, wide(dtype)))?;
        let empty_rows = if case.uniform_empty_rows { EmptyRows::Uniform } else { EmptyRows::Zero };
        let mask = mask.with_empty_rows(empty_rows);
        let mut heads = |which: Leaf, numbers: &[f64]| {
            leaf(which, Tensor::new(numbers, &Device::Cpu)?.to_dtype(wide(dtype))?.to_device(device)?)
        };
        let mut options = reference();
        if let Some(scale) = case.options.scale {
            options = options.with_scale(scale);
        }
        if let Some(softcap) = case.options.softcap {
            options = options.with_softcap(softcap);
        }
        if let Some(slopes) = &case.options.alibi_slopes {
            options = options.with_alibi_slopes(&heads(Leaf::Slopes, slopes)?);
        }
        if let Some(sinks) = &case.options.sinks {
            options = options.with_sinks(&heads(Leaf::Sinks, sinks)?);
        }
        Ok(Self { q, k, v, mask, options })
    }
}

/// The crate's mask for the oracle's; `bias` gives the tensor of a part of a mask.
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
                Part::Band(left, right) => one.with_band(*left, *right),
                Part::Chunk(size) => one.with_chunk(*size),
                Part::Keep(keep) => one.with_keep(&keep.tensor(DType::U8, device)?),
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

/// All three functions of the reference path against the oracle.
pub fn check(case: &Case, dtype: DType, device: &Device) -> Outcome {
    check_with(case, dtype, device, Backend::Reference)
}

/// Options of the reference path.
pub fn reference() -> SdpaOptions {
    SdpaOptions::default().with_backend(Backend::Reference)
}

pub fn check_with(case: &Case, dtype: DType, device: &Device, backend: Backend) -> Outcome {
    let run = || -> Result<_> {
        let call = Call::new(case, dtype, device)?.on(backend);
        // No fused path has weights.
        let for_weights = if backend == Backend::Fused { call.on(Backend::Auto) } else { call.clone() };
        Ok((call.context()?, for_weights.with_weights()?, call.with_lse()?, call.plan()?.backend))
    };
    let (context, output, (context_beside_lse, lse), ran) = run().map_err(|error| error.to_string())?;
    let expected = if ran == Backend::Fused { Expected::fused(case, dtype) } else { Expected::new(case, dtype) };
    expected.context("context", &context)?;
    expected.context("context beside weights", &output.context)?;
    expected.context("context beside lse", &context_beside_lse)?;
    expected.weights("weights", &output.weights)?;
    expected.lse("lse", &lse)
}

/// The oracle's numbers, and how far each result may be off them.
pub struct Expected {
    pub attended: Attended,
    dims: Dims,
    dtype: DType,
    epsilon: f64,
    /// Of the result: the rounding error of one number, relative, and absolute below the smallest normal one.
    unit: f64,
    smallest: f64,
    /// Of each weight before it meets its value, relative.
    rounded_weights: f64,
    /// Of each score, absolute.
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
        let (attended, dims) = (case.attend(), case.dims);
        Self { attended, dims, dtype, epsilon, unit, smallest, rounded_weights: 0.0, cap: 0.0 }
    }

    /// For a fused kernel, which may round weights to bf16 before their product with bf16 values, as PyTorch's does,
    /// and may take the cap's hyperbolic tangent from an exponential, so that it errs by some ε of 1 even near 0.
    pub fn fused(case: &Case, dtype: DType) -> Self {
        let expected = Self::new(case, dtype);
        let rounded_weights = if dtype == DType::BF16 { expected.unit } else { 0.0 };
        Self { rounded_weights, cap: 4.0 * expected.epsilon * case.options.softcap.unwrap_or(0.0), ..expected }
    }

    fn score_bound(&self, row: usize) -> f64 {
        (self.dims.d + 8) as f64 * self.epsilon * self.attended.score_terms[row] + self.cap
    }

    /// Relative to the weight.
    fn share_bound(&self, row: usize) -> f64 {
        2.0 * self.score_bound(row) + (2 * self.dims.t_kv + 16) as f64 * self.epsilon
    }

    fn lse_bound(&self, row: usize) -> f64 {
        let (sum, lse) = (self.score_bound(row) + (self.dims.t_kv + 8) as f64 * self.epsilon, self.attended.lse[row]);
        if lse.is_finite() { sum + self.epsilon * lse.abs() } else { sum }
    }

    pub fn context(&self, what: &str, context: &Tensor) -> Outcome {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        compare(what, context, (&[b, h, t_q, d_v], self.dtype), &self.attended.context, |n| {
            let share = self.share_bound(n / d_v) + self.rounded_weights;
            self.attended.context_terms[n] * share + self.attended.context[n].abs() * self.unit + self.smallest
        })
    }

    /// A share of the whole errs as a log-sum-exp does, and in half precision each part's context was rounded before;
    /// so it is in each of several `stages`.
    pub fn merged_context(&self, what: &str, context: &Tensor, stages: f64) -> Outcome {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        compare(what, context, (&[b, h, t_q, d_v], self.dtype), &self.attended.context, |n| {
            let row = n / d_v;
            let lse = if self.attended.lse[row].is_finite() { self.lse_bound(row) } else { 0.0 };
            let share = self.share_bound(row) + self.rounded_weights + 2.0 * lse + 2.0 * self.unit;
            stages * (self.attended.context_terms[n] * share + 2.0 * self.smallest)
        })
    }

    pub fn weights(&self, what: &str, weights: &Tensor) -> Outcome {
        let Dims { b, h, t_q, t_kv, .. } = self.dims;
        let expected = &self.attended.weights;
        compare(what, weights, (&[b, h, t_q, t_kv], self.dtype), expected, |n| {
            expected[n] * (self.share_bound(n / t_kv) + self.unit) + self.smallest
        })
    }

    pub fn lse(&self, what: &str, lse: &Tensor) -> Outcome {
        let Dims { b, h, t_q, .. } = self.dims;
        compare(what, lse, (&[b, h, t_q], wide(self.dtype)), &self.attended.lse, |n| self.lse_bound(n))
    }
}

pub fn compare(
    what: &str,
    got: &Tensor,
    (shape, dtype): (&[usize], DType),
    expected: &[f64],
    tolerance: impl Fn(usize) -> f64,
) -> Outcome {
    if got.dims() != shape || got.dtype() != dtype {
        return Err(format!("{what}: shape {:?} in {:?}, expected {shape:?} in {dtype:?}", got.dims(), got.dtype()));
    }
    for (n, (got, &expected)) in values(got).into_iter().zip(expected).enumerate() {
        let equal = got == expected || (got.is_nan() && expected.is_nan());
        let within = (got - expected).abs() <= tolerance(n);
        if !equal && !within {
            let most = tolerance(n);
            return Err(format!("{what}: entry {n} is {got}, expected {expected} to within {most:e}"));
        }
    }
    Ok(())
}
