//! The crate's answer to a case, held against the oracle's.
//!
//! Tolerances are a bound on the rounding of each result, worked out from the terms that were summed: with the machine
//! epsilon ε of the accumulation (twice the rounding error of one operation, so the bound has a factor of two to spare),
//! a score of D products errs by at most (D + 8) ε times the sum of their absolute values; the log-sum-exp errs as the
//! largest such error and by the sum over T_kv; a weight errs by twice that, relatively; a context by the same on each of
//! its terms. Half precision adds the rounding of the result, nothing else, since scores and sums are f32 there.

use candle_attention::{
    AttentionMask, Backend, EmptyRows, SdpaOptions, ValidLens, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::Array;
use crate::common::values;
use crate::oracle::{Alignment, Attended, Case, Lens, Part};
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
pub struct Arguments {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

impl Arguments {
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
        let mut whole: Option<AttentionMask> = None;
        for (m, mask) in case.masks.iter().enumerate() {
            let mut one = match mask.alignment {
                Alignment::Free => AttentionMask::none(),
                Alignment::Causal => AttentionMask::causal(),
                Alignment::UpperLeft => AttentionMask::causal_upper_left(),
                Alignment::Offset(n) => AttentionMask::causal_with_offset(n),
            };
            for (p, part) in mask.parts.iter().enumerate() {
                one = match part {
                    Part::ValidLens(lens) => one.with_valid_lens(valid_lens(lens)),
                    Part::Starts(lens) => one.with_starts(valid_lens(lens)),
                    Part::Prefix(lens) => one.with_prefix(valid_lens(lens)),
                    Part::Window(w) => one.with_window(*w),
                    Part::Band(left, right) => one.with_band(*left, *right),
                    Part::Keep(keep) => one.with_keep(&keep.tensor(DType::U8, device)?),
                    Part::Bias(bias) => one.with_bias(&viewed(Leaf::Bias(m, p), bias, wide(dtype))?),
                };
            }
            whole = Some(match whole {
                None => one,
                Some(whole) => whole.and(&one),
            });
        }
        let empty_rows = if case.uniform_empty_rows { EmptyRows::Uniform } else { EmptyRows::Zero };
        let mask = whole.unwrap_or_else(AttentionMask::none).with_empty_rows(empty_rows);
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
    let Arguments { q, k, v, mask, options } = Arguments::new(case, dtype, device).map_err(|e| e.to_string())?;
    let options = options.with_backend(backend);
    // No fused path has weights.
    let for_weights = match backend {
        Backend::Fused => options.clone().with_backend(Backend::Auto),
        _ => options.clone(),
    };
    let attend = || -> Result<_> {
        let context = scaled_dot_product_attention(&q, &k, &v, &mask, &options)?;
        let output = scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &for_weights)?;
        let with_lse = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &options)?;
        Ok((context, output, with_lse, plan(&q, &k, &v, &mask, &options)?.backend))
    };
    let (context, output, (context_beside_lse, lse), ran) = attend().map_err(|error| error.to_string())?;
    let expected = case.attend();
    let bounds = match ran {
        Backend::Fused => Bounds::fused(case, &expected, dtype),
        _ => Bounds::new(case, &expected, dtype),
    };
    for (what, context) in [
        ("context", &context),
        ("context beside weights", &output.context),
        ("context beside lse", &context_beside_lse),
    ] {
        compare_context(what, context, case, &expected, &bounds, dtype)?;
    }
    let dims = case.dims;
    compare("weights", &output.weights, (&[dims.b, dims.h, dims.t_q, dims.t_kv], dtype), &expected.weights, |n| {
        bounds.weight(n, expected.weights[n])
    })?;
    compare_lse("lse", &lse, case, &expected, &bounds, dtype)
}

pub fn compare_context(
    what: &str,
    context: &Tensor,
    case: &Case,
    expected: &Attended,
    bounds: &Bounds,
    dtype: DType,
) -> Outcome {
    let dims = case.dims;
    compare(what, context, (&[dims.b, dims.h, dims.t_q, dims.d_v], dtype), &expected.context, |n| {
        bounds.context(n, expected.context[n])
    })
}

pub fn compare_lse(
    what: &str,
    lse: &Tensor,
    case: &Case,
    expected: &Attended,
    bounds: &Bounds,
    dtype: DType,
) -> Outcome {
    let dims = case.dims;
    compare(what, lse, (&[dims.b, dims.h, dims.t_q], wide(dtype)), &expected.lse, |n| bounds.lse(n, expected.lse[n]))
}

/// How far each result may be off; `n` counts its entries in row-major order.
pub struct Bounds<'a> {
    expected: &'a Attended,
    t_kv: usize,
    d_v: usize,
    d: usize,
    epsilon: f64,
    /// Of the result: the rounding error of one number, relative, and absolute below the smallest normal one.
    unit: f64,
    smallest: f64,
    /// Of each weight before it meets its value, relative.
    rounded_weights: f64,
    /// Of each score, absolute.
    cap: f64,
}

impl<'a> Bounds<'a> {
    pub fn new(case: &Case, expected: &'a Attended, dtype: DType) -> Self {
        let (unit, smallest) = match dtype {
            DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
            DType::BF16 => (2f64.powi(-8), 1e-37),
            _ => (0.0, 1e-37),
        };
        let epsilon = if dtype == DType::F64 { f64::EPSILON } else { f64::from(f32::EPSILON) };
        let dims = case.dims;
        Self {
            expected,
            t_kv: dims.t_kv,
            d_v: dims.d_v,
            d: dims.d,
            epsilon,
            unit,
            smallest,
            rounded_weights: 0.0,
            cap: 0.0,
        }
    }

    /// For a fused kernel, which may round weights to bf16 before their product with bf16 values, as PyTorch's does, and
    /// may take the cap's hyperbolic tangent from an exponential, so that it errs by some ε of 1 even near 0.
    pub fn fused(case: &Case, expected: &'a Attended, dtype: DType) -> Self {
        let bounds = Self::new(case, expected, dtype);
        let rounded_weights = if dtype == DType::BF16 { bounds.unit } else { 0.0 };
        Self { rounded_weights, cap: 4.0 * bounds.epsilon * case.options.softcap.unwrap_or(0.0), ..bounds }
    }

    fn score(&self, row: usize) -> f64 {
        (self.d + 8) as f64 * self.epsilon * self.expected.score_terms[row] + self.cap
    }

    /// Relative to the weight.
    fn share(&self, row: usize) -> f64 {
        2.0 * self.score(row) + (2 * self.t_kv + 16) as f64 * self.epsilon
    }

    pub fn lse(&self, n: usize, expected: f64) -> f64 {
        let sum = self.score(n) + (self.t_kv + 8) as f64 * self.epsilon;
        if expected.is_finite() { sum + self.epsilon * expected.abs() } else { sum }
    }

    pub fn weight(&self, n: usize, expected: f64) -> f64 {
        expected * (self.share(n / self.t_kv) + self.unit) + self.smallest
    }

    /// A share of the whole errs as a log-sum-exp does, and in half precision each part's context was rounded before.
    pub fn merged_context(&self, n: usize, lse: &[f64]) -> f64 {
        let row = n / self.d_v;
        let lse = if lse[row].is_finite() { self.lse(row, lse[row]) } else { 0.0 };
        let share = self.share(row) + self.rounded_weights + 2.0 * lse + 2.0 * self.unit;
        self.expected.context_terms[n] * share + 2.0 * self.smallest
    }

    pub fn context(&self, n: usize, expected: f64) -> f64 {
        let share = self.share(n / self.d_v) + self.rounded_weights;
        self.expected.context_terms[n] * share + expected.abs() * self.unit + self.smallest
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
