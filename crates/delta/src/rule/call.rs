//! The arguments of the gated delta rule, checked once: shapes, dtypes, devices and options.

use candle_core::{D, DType, Result, Tensor, bail};

use super::options::DeltaOptions;
use candle_attention_core::PackedSequences;
use candle_attention_kernels::delta::DeltaDims;
use candle_attention_modules::base::Dim::{self, Any, Named};
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{Expect, accumulation_dtype, fits_in_memory, number};

/// The tensors of a call as the caller passed them: (B, heads, T, ..), or (total, heads, ..) for packed sequences.
#[derive(Clone, Copy)]
pub(super) struct DeltaTensors<'a> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub decay: Option<&'a Tensor>,
    pub beta: Option<&'a Tensor>,
    pub state: Option<&'a Tensor>,
}

/// The checked arguments of a call. A call of packed sequences has a batch of one.
#[derive(Debug, Clone)]
pub(super) struct CheckedDelta {
    pub op: &'static str,
    /// (B, H_q, T, D_k).
    pub q: Tensor,
    /// (B, H_k, T, D_k).
    pub k: Tensor,
    /// (B, H_v, T, D_v).
    pub v: Tensor,
    /// (B, H, T, 1), or (B, H, T, D_k) with a factor for each row of a state; in the accumulation dtype.
    pub decay: Option<Tensor>,
    /// (B, H, T, 1), in the accumulation dtype.
    pub beta: Option<Tensor>,
    /// The states before the first tokens, (n, H, D_k, D_v), contiguous, in the accumulation dtype.
    pub states: Option<Tensor>,
    pub dims: DeltaDims,
    pub scale: f64,
    pub sequences: Option<PackedSequences>,
    pub options: DeltaOptions,
}

impl CheckedDelta {
    /// Checks the arguments of a call.
    pub fn new(
        op: &'static str,
        tensors: DeltaTensors,
        sequences: Option<&PackedSequences>,
        options: &DeltaOptions,
    ) -> Result<Self> {
        let dims = check_tensors(op, tensors, sequences)?;
        let DeltaTensors { q, k, v, decay, beta, state } = tensors;
        let dtype = accumulation_dtype(q.dtype());
        let largest_scale = if dtype == DType::F64 { f64::MAX } else { f32::MAX.into() };
        let is_finite = |scale: f64| scale.abs() <= largest_scale;
        number::expect(op, "scale", options.scale, is_finite, format_args!("a finite number in {dtype:?}"))?;
        number::epsilon(op, "qk_norm", options.qk_norm)?;
        // (total, heads, ..) becomes (1, heads, total, ..).
        let batched = |x: &Tensor| if sequences.is_some() { x.transpose(0, 1)?.unsqueeze(0) } else { Ok(x.clone()) };
        // One factor for each token becomes a row of one number.
        let factor = |x: &Tensor| {
            let x = batched(x)?;
            let rows = if x.rank() == 3 { x.unsqueeze(3)? } else { x };
            repeat_heads(&rows, dims.h, dtype)
        };
        let states = |x: &Tensor| repeat_heads(x, dims.h, dtype)?.contiguous();
        Ok(Self {
            op,
            q: batched(q)?,
            k: batched(k)?,
            v: batched(v)?,
            decay: decay.map(factor).transpose()?,
            beta: beta.map(factor).transpose()?,
            states: state.map(states).transpose()?,
            dims,
            scale: options.scale.unwrap_or(1.0 / (dims.d_k as f64).sqrt()),
            sequences: sequences.cloned(),
            options: options.clone(),
        })
    }

    pub fn dtype(&self) -> DType {
        self.q.dtype()
    }

    /// Returns the call with tensors whose rows the kernels can read.
    pub fn with_contiguous_rows(&self) -> Result<Self> {
        Ok(Self {
            q: with_contiguous_rows(&self.q)?,
            k: with_contiguous_rows(&self.k)?,
            v: with_contiguous_rows(&self.v)?,
            decay: self.decay.as_ref().map(with_contiguous_rows).transpose()?,
            beta: self.beta.as_ref().map(with_contiguous_rows).transpose()?,
            states: self.states.as_ref().map(with_contiguous_rows).transpose()?,
            ..self.clone()
        })
    }

    /// Returns the gradients of the operands that are tracked, in the order of [`operands`](Self::operands).
    pub fn gradients_of(&self, gradients: AllHeadGradients) -> Result<Vec<Option<Tensor>>> {
        let AllHeadGradients { q, k, v, decay, beta, states } = gradients;
        let of_all_heads = [Some(q), Some(k), Some(v), decay, beta, Some(states)];
        let mut tracked = Vec::with_capacity(of_all_heads.len());
        for (operand, gradient) in self.operands().into_iter().zip(of_all_heads) {
            tracked.push(match (operand, gradient) {
                (Some(operand), Some(gradient)) if operand.track_op() => Some(sum_over_heads(&gradient, operand)?),
                _ => None,
            });
        }
        Ok(tracked)
    }

    /// Returns the tensors as operands of a recorded operation, in the order of its gradients.
    pub fn operands(&self) -> [Option<&Tensor>; 6] {
        let Self { q, k, v, decay, beta, states, .. } = self;
        [Some(q), Some(k), Some(v), decay.as_ref(), beta.as_ref(), states.as_ref()]
    }

    pub fn tracks_gradients(&self) -> bool {
        self.operands().into_iter().flatten().any(Tensor::track_op)
    }

    /// Returns the shape of the states, (n, H, D_k, D_v). n is the number of packed sequences, or B.
    pub fn state_dims(&self) -> [usize; 4] {
        let DeltaDims { b, h, d_k, d_v, .. } = self.dims;
        [self.sequences.as_ref().map_or(b, PackedSequences::len), h, d_k, d_v]
    }

    /// Returns the states before the first tokens: zeros unless the caller passed some.
    pub fn initial_states(&self) -> Result<Tensor> {
        match &self.states {
            Some(states) => Ok(states.clone()),
            None => Tensor::zeros(&self.state_dims(), accumulation_dtype(self.dtype()), self.q.device()),
        }
    }
}

/// The gradients that kernels compute for each of the H heads.
pub(super) struct AllHeadGradients {
    /// (B, H, T, D_k).
    pub q: Tensor,
    /// (B, H, T, D_k).
    pub k: Tensor,
    /// (B, H, T, D_v).
    pub v: Tensor,
    /// In the decay's shape.
    pub decay: Option<Tensor>,
    /// In the beta's shape.
    pub beta: Option<Tensor>,
    /// (n, H, D_k, D_v).
    pub states: Tensor,
}

/// Returns the gradient of an operand (B, heads, T, D), in its dtype, from the gradient (B, H, T, D) of all heads. The
/// heads that read one head of the operand add to its gradient.
fn sum_over_heads(gradient: &Tensor, operand: &Tensor) -> Result<Tensor> {
    let (b, heads, t, d) = operand.dims4()?;
    let h = gradient.dim(1)?;
    let own = if heads == h { gradient.clone() } else { gradient.reshape((b, heads, h / heads, t, d))?.sum(2)? };
    own.to_dtype(operand.dtype())
}

/// Checks that shapes, dtypes, devices and numbers of heads fit together, and returns the dimensions.
fn check_tensors(op: &str, tensors: DeltaTensors, sequences: Option<&PackedSequences>) -> Result<DeltaDims> {
    let DeltaTensors { q, k, v, decay, beta, state } = tensors;
    let shape = |[b, t]: [Dim; 2], heads: &'static str, row: &[Dim]| match sequences {
        None => [&[b, Any(heads), t], row].concat(),
        Some(_) => [&[t, Any(heads)], row].concat(),
    };
    let total = sequences.map(|sequences| Named("total", sequences.total_queries()));
    Expect::one(op, "q", q).shape(&shape([Any("B"), total.unwrap_or(Any("T"))], "H_q", &[Any("D_k")]))?;
    let (b, t) = if total.is_some() { (1, q.dim(0)?) } else { (q.dim(0)?, q.dim(2)?) };
    let d_k = q.dim(D::Minus1)?;
    let tokens = [Named("B", b), total.unwrap_or(Named("T", t))];
    Expect::one(op, "k", k).shape(&shape(tokens, "H_k", &[Named("D_k", d_k)]))?;
    Expect::one(op, "v", v).shape(&shape(tokens, "H_v", &[Any("D_v")]))?;
    let per_head = shape(tokens, "H_s", &[]);
    let per_channel = shape(tokens, "H_s", &[Named("D_k", d_k)]);
    if let Some(decay) = decay {
        Expect::one(op, "decay", decay).shape_of(&[&per_head, &per_channel])?;
    }
    if let Some(beta) = beta {
        Expect::one(op, "beta", beta).shape(&per_head)?;
    }
    let (h_q, h_k, h_v, d_v) = (q.dim(1)?, k.dim(1)?, v.dim(1)?, v.dim(D::Minus1)?);
    let h_s = h_k.max(h_v);
    let (count_name, n) = sequences.map_or(("B", b), |sequences| ("n", sequences.len()));
    if let Some(state) = state {
        let expected = [Named(count_name, n), Named("H_s", h_s), Named("D_k", d_k), Named("D_v", d_v)];
        Expect::one(op, "state", state).shape(&expected)?;
    }

    Expect::one(op, "q", q).float("")?;
    check_heads(op, "q", h_q, h_s, true)?;
    for (name, tensor) in [("k", k), ("v", v)] {
        Expect::one(op, name, tensor).same_device("q", q.device())?.dtype(q.dtype(), "q's")?;
        check_heads(op, name, tensor.dim(1)?, h_s, false)?;
    }
    for (name, tensor) in [("decay", decay), ("beta", beta), ("state", state)] {
        let Some(tensor) = tensor else { continue };
        Expect::one(op, name, tensor).same_device("q", q.device())?.float("")?;
        check_heads(op, name, tensor.dim(1)?, h_s, false)?;
    }
    number::expect(op, "q's head dimension", d_k, |d: usize| d > 0, "at least 1")?;
    let h = h_q.max(h_s);
    for result in [[b, h, t, d_k.max(d_v)], [n, h, d_k, d_v]] {
        if !fits_in_memory(&result) {
            bail!("[{op}] q {:?} and v {:?} give tensors of {result:?}, which do not fit in memory", q.dims(), v.dims())
        }
    }
    if let Some(sequences) = sequences {
        check_same_tokens(op, sequences)?;
    }
    Ok(DeltaDims { b, t, h, h_q, h_k, h_v, d_k, d_v })
}

/// Checks that the heads of an input divide the number of states H_s, or may be a multiple of it.
fn check_heads(op: &str, name: &str, heads: usize, h_s: usize, may_be_multiple: bool) -> Result<()> {
    if heads == 0 {
        bail!("[{op}] {name} has 0 heads, expected at least one")
    }
    if h_s.is_multiple_of(heads) || may_be_multiple && heads.is_multiple_of(h_s) {
        return Ok(());
    }
    let or_more = if may_be_multiple { " or is a multiple of it" } else { "" };
    bail!("[{op}] {name} has {heads} heads, expected a number that divides k's or v's {h_s}{or_more}")
}

/// Checks that the queries and the keys of each packed sequence are the same tokens.
fn check_same_tokens(op: &str, sequences: &PackedSequences) -> Result<()> {
    for s in 0..sequences.len() {
        let (queries, keys) = (sequences.queries(s), sequences.keys(s));
        if queries != keys {
            bail!("[{op}] sequence {s} has queries {queries:?} and keys {keys:?}, expected the same")
        }
    }
    Ok(())
}

/// Returns (B, heads, T, D) in a dtype and with `h` heads, of which head i is head `i / (h / heads)`.
pub(super) fn repeat_heads(xs: &Tensor, h: usize, dtype: DType) -> Result<Tensor> {
    let (b, heads, t, d) = xs.dims4()?;
    if xs.elem_count() == 0 {
        // An empty view may begin past the end of its buffer, where Candle's copies panic.
        return Tensor::zeros((b, h, t, d), dtype, xs.device());
    }
    let xs = xs.to_dtype(dtype)?;
    if heads == h {
        return Ok(xs);
    }
    xs.unsqueeze(2)?.broadcast_as((b, heads, h / heads, t, d))?.reshape((b, h, t, d))
}
