//! The specification: the recurrence, token by token, in Candle's own operations, differentiable, on any device.
//!
//! Candle walks through a graph by recursion, forward when it sorts the operations and when it frees them, so that the
//! graph of a recurrence over thousands of tokens overflows the stack of a thread. A call with gradients is therefore
//! one operation in the graph. Its backward pass runs the recurrence again, a chunk of tokens at a time from the last
//! to the first, from the states that the forward pass kept, and differentiates each chunk in a separate graph.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, D, Error, Layout, MetalStorage, Result, Shape, Storage};
use candle_core::{Tensor, Var};

use super::call::{CheckedDelta, repeat_heads};
use candle_attention_kernels::delta::DeltaDims;
use candle_attention_modules::base::{accumulation_dtype, matmul};

/// The tokens of a chunk, which bound the depth of its graph.
const CHUNK: usize = 64;

/// Runs a call that has tokens and values, and returns the attention output (B, H, T, D_v) in q's dtype, and the states
/// (n, H, D_k, D_v).
pub(super) fn run(call: &CheckedDelta) -> Result<(Tensor, Tensor)> {
    let inputs = RecurrenceInputs::new(call)?;
    let sequences = sequences(call);
    let (ys, states) = if call.tracks_gradients() {
        RecurrenceOp::record(inputs, sequences)?
    } else {
        let ReferenceResults { ys, states, .. } = inputs.recur(&sequences)?;
        (ys, states)
    };
    Ok((ys.to_dtype(call.dtype())?, states))
}

/// Tokens that follow each other, and the rows of the states, along their first dimension, that the tokens update.
#[derive(Debug, Clone)]
struct Sequence {
    tokens: Range<usize>,
    states: Range<usize>,
}

/// Returns the sequences of a call: all entries of a batch are computed together, packed sequences one by one.
fn sequences(call: &CheckedDelta) -> Vec<Sequence> {
    let DeltaDims { b, t, .. } = call.dims;
    match &call.sequences {
        None => vec![Sequence { tokens: 0..t, states: 0..b }],
        Some(packed) => (0..packed.len()).map(|s| Sequence { tokens: packed.queries(s), states: s..s + 1 }).collect(),
    }
}

/// The inputs of the recurrence for some tokens, or the gradients of them, in the dtype that is computed in.
#[derive(Debug, Clone)]
struct RecurrenceInputs {
    /// (B, H, T, D_k), after the norm and the scale.
    q: Tensor,
    /// (B, H, T, D_k), after the norm.
    k: Tensor,
    /// (B, H, T, D_v).
    v: Tensor,
    /// The factors of the states before each token, (B, H, T, 1) or (B, H, T, D_k).
    factors: Option<Tensor>,
    /// (B, H, T, 1).
    beta: Option<Tensor>,
    /// The states before the first tokens, (n, H, D_k, D_v).
    states: Tensor,
}

/// The results of the recurrence.
struct ReferenceResults {
    /// (B, H, T, D_v).
    ys: Tensor,
    /// The states after the last tokens, (n, H, D_k, D_v).
    states: Tensor,
    /// The states before each chunk of each sequence.
    chunk_states: Vec<Vec<Tensor>>,
}

impl RecurrenceInputs {
    fn new(call: &CheckedDelta) -> Result<Self> {
        let h = call.dims.h;
        let dtype = accumulation_dtype(call.dtype());
        let normed = |x: &Tensor| {
            let x = x.to_dtype(dtype)?;
            let Some(eps) = call.options.qk_norm else { return Ok(x) };
            x.broadcast_div(&(x.sqr()?.sum_keepdim(D::Minus1)? + eps)?.sqrt()?)
        };
        Ok(Self {
            q: repeat_heads(&(normed(&call.q)? * call.scale)?, h, dtype)?,
            k: repeat_heads(&normed(&call.k)?, h, dtype)?,
            v: repeat_heads(&call.v, h, dtype)?,
            factors: call.decay.as_ref().map(Tensor::exp).transpose()?,
            beta: call.beta.clone(),
            states: call.initial_states()?,
        })
    }

    /// Returns the inputs in an order that [`try_map`](Self::try_map) and [`flatten`](Self::flatten) share.
    fn all(&self) -> impl Iterator<Item = &Tensor> {
        let Self { q, k, v, factors, beta, states } = self;
        [q, k, v].into_iter().chain(factors).chain(beta).chain([states])
    }

    /// Returns the inputs with `rows` applied to each tensor of tokens, and `states` to the states.
    fn try_map(
        &self,
        mut rows: impl FnMut(&Tensor) -> Result<Tensor>,
        states: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        Ok(Self {
            q: rows(&self.q)?,
            k: rows(&self.k)?,
            v: rows(&self.v)?,
            factors: self.factors.as_ref().map(&mut rows).transpose()?,
            beta: self.beta.as_ref().map(&mut rows).transpose()?,
            states: states(&self.states)?,
        })
    }

    /// Returns the rows of some tokens, from a state on.
    fn part(&self, tokens: Range<usize>, state: &Tensor) -> Result<Self> {
        self.try_map(|rows| rows.narrow(2, tokens.start, tokens.len()), |_| Ok(state.clone()))
    }

    /// Returns one tensor (numbers,) of all inputs.
    fn flatten(&self) -> Result<Tensor> {
        flatten(self.all())
    }

    /// Returns inputs with the shapes of these inputs from one tensor of all their numbers.
    fn unflatten(&self, all: &Tensor) -> Result<Self> {
        let mut at = 0;
        let mut next = |like: &Tensor| {
            at += like.elem_count();
            all.narrow(0, at - like.elem_count(), like.elem_count())?.reshape(like.shape())
        };
        // The states come after the rows.
        let rows = self.try_map(&mut next, |states| Ok(states.clone()))?;
        Ok(Self { states: next(&self.states)?, ..rows })
    }

    /// Runs the recurrence over each sequence.
    fn recur(&self, sequences: &[Sequence]) -> Result<ReferenceResults> {
        let mut ys = Vec::new();
        let mut states = Vec::new();
        let mut chunk_states = Vec::new();
        for sequence in sequences {
            let mut state = self.states.narrow(0, sequence.states.start, sequence.states.len())?;
            let mut before = Vec::new();
            for tokens in chunks(&sequence.tokens) {
                before.push(state.clone());
                let (chunk_ys, after) = self.part(tokens, &state)?.recur_chunk()?;
                ys.push(chunk_ys);
                state = after;
            }
            chunk_states.push(before);
            states.push(state);
        }
        Ok(ReferenceResults { ys: Tensor::cat(&ys, 2)?, states: Tensor::cat(&states, 0)?, chunk_states })
    }

    /// Runs the recurrence over all tokens from the states, and returns the outputs and the states after the last
    /// token.
    fn recur_chunk(&self) -> Result<(Tensor, Tensor)> {
        let q = split(&self.q)?;
        let k = split(&self.k)?;
        let v = split(&self.v)?;
        let factors = self.factors.as_ref().map(split).transpose()?;
        let beta = self.beta.as_ref().map(split).transpose()?;
        let mut state = self.states.clone();
        let mut ys = Vec::with_capacity(q.len());
        for t in 0..q.len() {
            if let Some(factors) = &factors {
                state = state.broadcast_mul(&factors[t].t()?)?;
            }
            let value = match &beta {
                Some(beta) => (&v[t] - matmul(&k[t], &state)?)?.broadcast_mul(&beta[t])?,
                None => v[t].clone(),
            };
            state = (state + k[t].t()?.broadcast_mul(&value)?)?;
            ys.push(matmul(&q[t], &state)?);
        }
        Ok((Tensor::cat(&ys, 2)?, state))
    }

    /// Returns the gradients of the inputs of a chunk from the gradients of its results.
    fn chunk_gradients(&self, ys_grad: &Tensor, states_grad: &Tensor) -> Result<Self> {
        let variable = |xs: &Tensor| Var::from_tensor(&xs.detach().force_contiguous()?).map(Var::into_inner);
        let inputs = self.try_map(variable, variable)?;
        let (ys, states) = inputs.recur_chunk()?;
        let loss = ((ys * ys_grad)?.sum_all()? + (states * states_grad)?.sum_all()?)?;
        let gradients = loss.backward()?;
        let gradient = |xs: &Tensor| gradients.get(xs).map_or_else(|| xs.zeros_like(), |gradient| Ok(gradient.clone()));
        inputs.try_map(gradient, gradient)
    }
}

/// Returns the chunks of some tokens.
fn chunks(tokens: &Range<usize>) -> impl DoubleEndedIterator<Item = Range<usize>> + ExactSizeIterator {
    let Range { start, end } = *tokens;
    (0..tokens.len().div_ceil(CHUNK)).map(move |n| start + n * CHUNK..end.min(start + (n + 1) * CHUNK))
}

/// Returns one tensor (numbers,) of the numbers of several.
fn flatten<'a>(tensors: impl IntoIterator<Item = &'a Tensor>) -> Result<Tensor> {
    let flat: Vec<_> = tensors.into_iter().map(Tensor::flatten_all).collect::<Result<_>>()?;
    Tensor::cat(&flat, 0)
}

/// The recurrence as one operation: from the inputs, flattened, to the outputs and the states, flattened.
struct RecurrenceOp {
    inputs: RecurrenceInputs,
    sequences: Vec<Sequence>,
    chunk_states: Vec<Vec<Tensor>>,
    /// The shapes of the outputs and of the states.
    shapes: [Shape; 2],
    /// The result, until it is in the graph.
    result: Mutex<Option<Tensor>>,
}

impl RecurrenceOp {
    /// Runs the recurrence and records it in Candle's graph: the outputs and the states.
    fn record(inputs: RecurrenceInputs, sequences: Vec<Sequence>) -> Result<(Tensor, Tensor)> {
        let operand = inputs.flatten()?;
        let inputs = inputs.unflatten(&operand.detach())?;
        let ReferenceResults { ys, states, chunk_states } = inputs.recur(&sequences)?;
        let result = Mutex::new(Some(flatten([&ys, &states])?));
        let shapes = [ys.shape().clone(), states.shape().clone()];
        let results = operand.apply_op1(Self { inputs, sequences, chunk_states, shapes, result })?;
        let count = ys.elem_count();
        let recorded_ys = results.narrow(0, 0, count)?.reshape(ys.shape())?;
        let recorded_states = results.narrow(0, count, states.elem_count())?.reshape(states.shape())?;
        Ok((recorded_ys, recorded_states))
    }

    /// Returns the gradients of the inputs from the gradients of the results.
    fn gradients(&self, ys_grad: &Tensor, states_grad: &Tensor) -> Result<RecurrenceInputs> {
        let mut chunk_gradients = Vec::new();
        let mut initial_states = Vec::new();
        for (sequence, chunk_states) in self.sequences.iter().zip(&self.chunk_states) {
            let mut state_grad = states_grad.narrow(0, sequence.states.start, sequence.states.len())?;
            let mut from_last = Vec::new();
            for (tokens, state) in chunks(&sequence.tokens).zip(chunk_states).rev() {
                let ys_grad = ys_grad.narrow(2, tokens.start, tokens.len())?;
                let gradients = self.inputs.part(tokens, state)?.chunk_gradients(&ys_grad, &state_grad)?;
                state_grad = gradients.states.clone();
                from_last.push(gradients);
            }
            chunk_gradients.extend(from_last.into_iter().rev());
            initial_states.push(state_grad);
        }
        let cat = |of: fn(&RecurrenceInputs) -> Option<&Tensor>| {
            Tensor::cat(&chunk_gradients.iter().filter_map(of).collect::<Vec<_>>(), 2)
        };
        Ok(RecurrenceInputs {
            q: cat(|chunk| Some(&chunk.q))?,
            k: cat(|chunk| Some(&chunk.k))?,
            v: cat(|chunk| Some(&chunk.v))?,
            factors: self.inputs.factors.as_ref().map(|_| cat(|chunk| chunk.factors.as_ref())).transpose()?,
            beta: self.inputs.beta.as_ref().map(|_| cat(|chunk| chunk.beta.as_ref())).transpose()?,
            states: Tensor::cat(&initial_states, 0)?,
        })
    }

    /// Returns the storage of the result on the device that `on_device` takes, and the shape of the result.
    fn take<S>(&self, on_device: impl FnOnce(&Storage, &Layout) -> Option<Result<S>>) -> Result<(S, Shape)> {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(result) = result else {
            return Err(Error::msg("[gated_delta_rule] the operation is in a graph already"));
        };
        let (storage, layout) = result.storage_and_layout();
        match on_device(&storage, layout) {
            Some(storage) => Ok((storage?, result.shape().clone())),
            None => Err(Error::msg("[gated_delta_rule] the result is on another device than the inputs")),
        }
    }
}

impl CustomOp1 for RecurrenceOp {
    fn name(&self) -> &'static str {
        "gated-delta-rule-reference"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cpu(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Cuda(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn metal_fwd(&self, _: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.take(|storage, layout| match storage {
            Storage::Metal(storage) => Some(storage.try_clone(layout)),
            _ => None,
        })
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        let [ys, states] = &self.shapes;
        let gradient = gradient.detach();
        let ys_grad = gradient.narrow(0, 0, ys.elem_count())?.reshape(ys)?;
        let states_grad = gradient.narrow(0, ys.elem_count(), states.elem_count())?.reshape(states)?;
        self.gradients(&ys_grad, &states_grad)?.flatten().map(Some)
    }
}

/// Splits rows (B, H, T, D) into one tensor (B, H, 1, D) for each token.
///
/// The rows are halved again and again, since the gradient of a view is as large as the tensor that is viewed.
fn split(xs: &Tensor) -> Result<Vec<Tensor>> {
    let t = xs.dim(2)?;
    if t == 1 {
        return Ok(vec![xs.contiguous()?]);
    }
    let mut rows = split(&xs.narrow(2, 0, t / 2)?)?;
    rows.extend(split(&xs.narrow(2, t / 2, t - t / 2)?)?);
    Ok(rows)
}
