//! Small calls of attention that show whether the kernels of a device are right: fixed inputs, and the results of the
//! reference path in f64 on the CPU.

use candle_attention_call::{KvCodeFormat, KvScales, RequestedResults};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::call::{Call, Qkv};
use super::gather::with_keys_in_one_piece;
use super::options::SdpaOptions;
use super::paged::PagedSequences;
use super::reference;
use super::results::Attended;
use crate::mask::AttentionMask;
use candle_attention_modules::base::first_use::{
    ComparedResult, ResultWithGradients, case_numbers, variables_in, variables_on,
};

/// The sequences, query heads and key heads.
const B: usize = 2;
const H: usize = 2;
const H_KV: usize = 1;

/// The positions of a page.
const PAGE_SIZE: usize = 8;

/// The keys that the second sequence lacks.
const MISSING_KEYS: usize = 9;

/// Runs a call on the kernels of a device, whether or not they passed a check.
pub(super) type RunCall = fn(&Call, RequestedResults) -> Result<Attended>;

/// A call with grouped heads and a causal mask, of sequences of two lengths.
#[derive(Debug, Clone, Copy)]
pub(super) struct SmallCall {
    pub t_q: usize,
    pub t_kv: usize,
    /// The format of keys and values that are codes.
    pub codes: Option<KvCodeFormat>,
    /// Whether keys and values are in pages.
    pub in_pages: bool,
    /// Whether the gradients of queries, keys and values are compared too.
    pub has_gradients: bool,
}

/// The inputs of a call.
struct SmallCallInputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scales: Option<KvScales<Tensor>>,
}

impl SmallCall {
    /// Queries for which forward kernels run, and keys of several tiles.
    pub const PROMPT: Self = Self { t_q: 72, t_kv: 136, codes: None, in_pages: false, has_gradients: false };

    /// One query, and keys that are split over blocks.
    pub const TOKEN: Self = Self { t_q: 1, t_kv: 600, ..Self::PROMPT };

    /// Returns the results on a device and on the CPU.
    pub fn compare(self, device: &Device, dtype: DType, attend: RunCall) -> Result<Vec<ComparedResult>> {
        let inputs = self.inputs(dtype)?;
        if !self.has_gradients {
            let found = self.output(&inputs.map(|tensor| tensor.to_device(device))?, attend)?;
            let expected = self.output(&inputs.map(in_f64)?, on_reference)?;
            return Ok(vec![ComparedResult { name: "the output", found, expected }]);
        }
        let all = [inputs.q, inputs.k, inputs.v];
        let own = variables_on(device, &all)?;
        let other = variables_in(DType::F64, &all)?;
        let found = self.output(&SmallCallInputs::of_variables(&own), attend)?;
        let expected = self.output(&SmallCallInputs::of_variables(&other), on_reference)?;
        let names = ["the gradient of queries", "the gradient of keys", "the gradient of values"];
        ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)
    }

    /// Returns the width of a head. Two groups of 64 numbers have separate scales.
    fn width(self) -> usize {
        if self.codes == Some(KvCodeFormat::Q4) { 128 } else { 64 }
    }

    /// Draws the inputs on the CPU: a batch, or packed queries with pools of pages.
    fn inputs(self, dtype: DType) -> Result<SmallCallInputs> {
        let Self { t_q, t_kv, codes, in_pages, .. } = self;
        let width = self.width();
        let queries = case_numbers(&[B, H, t_q, width], 1, dtype)?;
        let q = if in_pages { queries.transpose(1, 2)?.reshape((B * t_q, H, width))? } else { queries };
        let stored = |rows: Tensor| if in_pages { as_pages(&rows) } else { Ok(rows) };
        let rows = |columns: usize, seed: u64, own: DType| case_numbers(&[B, H_KV, t_kv, columns], seed, own);
        let Some(format) = codes else {
            return Ok(SmallCallInputs {
                q,
                k: stored(rows(width, 2, dtype)?)?,
                v: stored(rows(width, 3, dtype)?)?,
                scales: None,
            });
        };
        let bytes = |seed: u64| -> Result<Tensor> {
            let numbers = rows(format.bytes(width), seed, DType::F32)?;
            if format != KvCodeFormat::E4M3 {
                // From 0 to 255.
                return stored(numbers.affine(85.0, 127.5)?.to_dtype(DType::U8)?);
            }
            // Up to 120, without the codes of NaN, and a sign.
            let signs = rows(width, seed + 4, DType::F32)?.ge(0f32)?.to_dtype(DType::F32)?;
            let sizes = numbers.affine(40.0, 60.0)?.to_dtype(DType::U8)?.to_dtype(DType::F32)?;
            stored((sizes + (signs * 128.0)?)?.to_dtype(DType::U8)?)
        };
        // Numbers of a few units: from 0.1 to 1.9 of this for the largest code.
        let size = if format == KvCodeFormat::Q4 { 0.15 } else { 0.01 };
        let scales = |seed: u64| stored(rows(format.scales(width), seed, DType::F32)?.affine(0.6 * size, size)?);
        Ok(SmallCallInputs {
            q,
            k: bytes(2)?,
            v: bytes(3)?,
            scales: Some(KvScales { format, k: scales(4)?, v: scales(5)? }),
        })
    }

    /// Returns the output of a call: (B, H, T_q, D), or of packed queries.
    fn output(self, inputs: &SmallCallInputs, attend: RunCall) -> Result<Tensor> {
        const OP: &str = "check at first use";
        let SmallCallInputs { q, k, v, scales } = inputs;
        let (qkv, options) = (Qkv { q, k, v }, SdpaOptions::default());
        let lengths = vec![self.t_kv, self.t_kv - MISSING_KEYS];
        let call = if self.in_pages {
            let pages = (0..B).map(|b| self.pages(b)).collect();
            let sequences = PagedSequences::new(vec![0, self.t_q, 2 * self.t_q], lengths, pages)?;
            Call::over_pages(OP, qkv, scales.as_ref(), &sequences, &AttentionMask::causal(), &options)?
        } else {
            let mask = AttentionMask::causal().with_valid_lens(lengths);
            Call::with_all_dims(OP, qkv, scales.as_ref(), None, &mask, &options)?
        };
        Ok(attend(&call, RequestedResults::default())?.output)
    }

    /// Returns the pages of a sequence in the pools of [`as_pages`].
    fn pages(self, sequence: usize) -> Vec<u32> {
        let pages = self.t_kv / PAGE_SIZE;
        (0..pages).map(|n| (B * pages - 1 - sequence * pages - n) as u32).collect()
    }
}

/// Returns rows (B, H_kv, T_kv, ..) as a pool (pages, page size, H_kv, ..) whose pages are in the reverse order.
fn as_pages(rows: &Tensor) -> Result<Tensor> {
    let (b, h_kv, t_kv, width) = rows.dims4()?;
    let pages = b * t_kv / PAGE_SIZE;
    let in_order = rows.transpose(1, 2)?.reshape((pages, PAGE_SIZE, h_kv, width))?;
    let reverse: Vec<u32> = (0..pages as u32).rev().collect();
    in_order.index_select(&Tensor::new(reverse, rows.device())?, 0)
}

/// Runs a call on the reference path.
fn on_reference(call: &Call, wanted: RequestedResults) -> Result<Attended> {
    reference::attend(&with_keys_in_one_piece(call.clone())?, wanted)
}

/// Returns a tensor in f64; codes stay as they are.
fn in_f64(tensor: &Tensor) -> Result<Tensor> {
    if tensor.dtype() == DType::U8 { Ok(tensor.clone()) } else { tensor.to_dtype(DType::F64) }
}

impl SmallCallInputs {
    /// Returns variables of queries, keys and values as inputs.
    fn of_variables(variables: &[Var]) -> Self {
        let [q, k, v] = [0, 1, 2].map(|at: usize| variables[at].as_tensor().clone());
        Self { q, k, v, scales: None }
    }

    /// Returns the inputs with a function applied to each.
    fn map(&self, own: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let scales = self.scales.as_ref().map(|scales| scales.try_map(&own)).transpose()?;
        Ok(Self { q: own(&self.q)?, k: own(&self.k)?, v: own(&self.v)?, scales })
    }
}
