//! Small calls of attention that show whether the kernels of a device are right: fixed inputs, and the results of the
//! reference path in f64 on the CPU.

use candle_attention_call::{KvCodeFormat, KvScales, RequestedResults};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::call::{Call, Qkv};
use super::options::SdpaOptions;
use super::reference;
use super::results::Attended;
use crate::mask::AttentionMask;
use candle_attention_modules::base::first_use::{
    ComparedResult, ResultWithGradients, case_numbers, variables_in, variables_on,
};

/// The sequences, query heads, key heads and the width of a head.
const B: usize = 2;
const H: usize = 2;
const H_KV: usize = 1;
const D: usize = 64;

/// The keys that the second sequence lacks.
const MISSING_KEYS: usize = 9;

/// Runs a call on the kernels of a device, whether or not they passed a check.
pub(super) type RunCall = fn(&Call, RequestedResults) -> Result<Attended>;

/// A call with grouped heads and a causal mask, of sequences of two lengths.
#[derive(Debug, Clone, Copy)]
pub(super) struct SmallCall {
    pub t_q: usize,
    pub t_kv: usize,
    /// Whether keys and values are codes of 8 bits.
    pub has_codes: bool,
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
    pub const PROMPT: Self = Self { t_q: 72, t_kv: 136, has_codes: false, has_gradients: false };

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

    /// Draws the inputs on the CPU.
    fn inputs(self, dtype: DType) -> Result<SmallCallInputs> {
        let Self { t_q, t_kv, has_codes, .. } = self;
        let q = case_numbers(&[B, H, t_q, D], 1, dtype)?;
        let rows = |seed: u64, own: DType| case_numbers(&[B, H_KV, t_kv, D], seed, own);
        if !has_codes {
            return Ok(SmallCallInputs { q, k: rows(2, dtype)?, v: rows(3, dtype)?, scales: None });
        }
        // From 0 to 255.
        let codes = |seed: u64| rows(seed, DType::F32)?.affine(85.0, 127.5)?.to_dtype(DType::U8);
        // From 0.001 to 0.019.
        let scales = |seed: u64| case_numbers(&[B, H_KV, t_kv, 1], seed, DType::F32)?.affine(0.006, 0.01);
        Ok(SmallCallInputs {
            q,
            k: codes(2)?,
            v: codes(3)?,
            scales: Some(KvScales { format: KvCodeFormat::Q8, k: scales(4)?, v: scales(5)? }),
        })
    }

    /// Returns the output (B, H, T_q, D) of a call.
    fn output(self, inputs: &SmallCallInputs, attend: RunCall) -> Result<Tensor> {
        let SmallCallInputs { q, k, v, scales } = inputs;
        let mask = AttentionMask::causal().with_valid_lens(vec![self.t_kv, self.t_kv - MISSING_KEYS]);
        let options = SdpaOptions::default();
        let call = Call::with_all_dims("check at first use", Qkv { q, k, v }, scales.as_ref(), None, &mask, &options)?;
        Ok(attend(&call, RequestedResults::default())?.output)
    }
}

/// Runs a call on the reference path.
fn on_reference(call: &Call, wanted: RequestedResults) -> Result<Attended> {
    reference::attend(call, wanted)
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
