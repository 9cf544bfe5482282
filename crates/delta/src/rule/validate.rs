//! Every shape, dtype and device check of a call, once.

use candle_core::{D, DType, Result, Tensor, bail};

use super::DeltaOptions;
use Dim::{Any, Named};
use candle_attention_core::PackedSequences;
use candle_attention_modules::base::{Dim, Expect, FLOATS, accumulation_dtype, fits_in_memory, number};

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dims {
    /// 1 for packed sequences.
    pub b: usize,
    /// The number of states: of the batch, or of the packed sequences.
    pub n: usize,
    /// The most heads.
    pub h: usize,
    /// The heads that have states.
    pub h_s: usize,
    pub t: usize,
    pub d_k: usize,
    pub d_v: usize,
}

/// Arguments that were found to fit together. Those of a packed call have a batch of one.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub op: &'static str,
    /// q (B, H_q, T, D_k), k (B, H_k, T, D_k) and v (B, H_v, T, D_v).
    pub rows: [Tensor; 3],
    /// Decay (B, heads, T, 1), or with D_k in the place of 1 for a factor of each row of a state, beta (B, heads, T,
    /// 1), and states (n, H_s, D_k, D_v).
    pub factors: [Option<Tensor>; 3],
    pub dims: Dims,
    pub scale: f64,
    pub sequences: Option<PackedSequences>,
    pub options: DeltaOptions,
}

impl Call {
    /// Of q, k and v, and of decay, beta and state: tensors (B, heads, T, ..), or packed sequences and (total, heads,
    /// ..).
    pub(super) fn new(
        op: &'static str,
        rows: [&Tensor; 3],
        [decay, beta, state]: [Option<&Tensor>; 3],
        sequences: Option<&PackedSequences>,
        options: &DeltaOptions,
    ) -> Result<Self> {
        let dims = dims(op, rows, [decay, beta, state], sequences)?;
        let (scale, dtype) =
            (options.scale.unwrap_or(1.0 / (dims.d_k as f64).sqrt()), accumulation_dtype(rows[0].dtype()));
        let most = if dtype == DType::F64 { f64::MAX } else { f32::MAX.into() };
        if !(-most..=most).contains(&scale) {
            bail!("[{op}] scale is {scale:?}, expected a finite number in {dtype:?}")
        }
        number::epsilon(op, "qk_norm", options.qk_norm)?;
        // (total, heads, ..) is (1, heads, total, ..), and one factor a token is a row of one.
        let batched = |x: &Tensor| if sequences.is_some() { x.transpose(0, 1)?.unsqueeze(0) } else { Ok(x.clone()) };
        let factors = |x: &Tensor| batched(x).and_then(|x| if x.rank() == 3 { x.unsqueeze(3) } else { Ok(x) });
        Ok(Self {
            op,
            rows: [batched(rows[0])?, batched(rows[1])?, batched(rows[2])?],
            factors: [decay.map(factors).transpose()?, beta.map(factors).transpose()?, state.cloned()],
            dims,
            scale,
            sequences: sequences.cloned(),
            options: options.clone(),
        })
    }

    pub(super) fn dtype(&self) -> DType {
        self.rows[0].dtype()
    }

    pub(super) fn tracks_gradients(&self) -> bool {
        self.rows.iter().chain(self.factors.iter().flatten()).any(Tensor::track_op)
    }

    /// The same with a decay, a beta and a state for each of H heads, in the dtype that all is computed in.
    pub(super) fn for_all_heads(mut self) -> Result<Self> {
        let (dtype, h) = (accumulation_dtype(self.dtype()), self.dims.h);
        for factor in self.factors.iter_mut().flatten() {
            *factor = with_heads(&factor.to_dtype(dtype)?, h)?;
        }
        let states = self.factors[2].take().map(|states| states.contiguous());
        self.factors[2] = states.transpose()?;
        Ok(self)
    }

    /// States (n, heads, D_k, D_v) of zeros.
    pub(super) fn zero_states(&self, heads: usize) -> Result<Tensor> {
        let Dims { n, d_k, d_v, .. } = self.dims;
        Tensor::zeros((n, heads, d_k, d_v), accumulation_dtype(self.dtype()), self.rows[0].device())
    }
}

fn dims(
    op: &str,
    rows: [&Tensor; 3],
    [decay, beta, state]: [Option<&Tensor>; 3],
    sequences: Option<&PackedSequences>,
) -> Result<Dims> {
    let [q, k, v] = rows;
    let shape = |[b, t]: [Dim; 2], heads: &'static str, row: &[Dim]| match sequences {
        None => [&[b, Any(heads), t], row].concat(),
        Some(_) => [&[t, Any(heads)], row].concat(),
    };
    let total = sequences.map(|sequences| Named("total", sequences.total_queries()));
    Expect::one(op, "q", q).shape(&shape([Any("B"), total.unwrap_or(Any("T"))], "H_q", &[Any("D_k")]))?;
    let (b, t) = if total.is_some() { (1, q.dim(0)?) } else { (q.dim(0)?, q.dim(2)?) };
    let (tokens, d_k) = ([Named("B", b), total.unwrap_or(Named("T", t))], q.dim(D::Minus1)?);
    Expect::one(op, "k", k).shape(&shape(tokens, "H_k", &[Named("D_k", d_k)]))?;
    Expect::one(op, "v", v).shape(&shape(tokens, "H_v", &[Any("D_v")]))?;
    let (of_heads, of_channels) = (shape(tokens, "H_s", &[]), shape(tokens, "H_s", &[Named("D_k", d_k)]));
    decay.map(|decay| Expect::one(op, "decay", decay).shape_of(&[&of_heads, &of_channels])).transpose()?;
    beta.map(|beta| Expect::one(op, "beta", beta).shape(&of_heads)).transpose()?;
    let (d_v, h_s) = (v.dim(D::Minus1)?, k.dim(1)?.max(v.dim(1)?));
    let (count, n) = sequences.map_or(("B", b), |sequences| ("n", sequences.len()));
    let of_states = [Named(count, n), Named("H_s", h_s), Named("D_k", d_k), Named("D_v", d_v)];
    state.map(|state| Expect::one(op, "state", state).shape(&of_states)).transpose()?;

    let given = rows.map(Some).into_iter().chain([decay, beta, state]);
    for (name, tensor) in ["q", "k", "v", "decay", "beta", "state"].into_iter().zip(given) {
        let Some(tensor) = tensor else { continue };
        let expected = Expect::one(op, name, tensor).beside("q", q.device())?;
        match name {
            "k" | "v" => expected.dtype(q.dtype(), "q's")?,
            _ => expected.dtype_of(&FLOATS, "")?,
        };
        let (found, is_q) = (tensor.dim(1)?, name == "q");
        if found == 0 {
            bail!("[{op}] {name} has 0 heads, expected at least one")
        }
        if !(h_s.is_multiple_of(found) || is_q && found.is_multiple_of(h_s)) {
            let or_more = if is_q { " or is a multiple of it" } else { "" };
            bail!("[{op}] {name} has {found} heads, expected a number that divides k's or v's {h_s}{or_more}")
        }
    }
    if d_k == 0 {
        bail!("[{op}] q has head dimension 0, expected at least 1")
    }
    let h = q.dim(1)?.max(h_s);
    for shape in [[b, h, t, d_k.max(d_v)], [n, h, d_k, d_v]] {
        if !fits_in_memory(&shape) {
            bail!("[{op}] q {:?} and v {:?} give tensors of {shape:?}, which do not fit in memory", q.dims(), v.dims())
        }
    }
    if let Some(sequences) = sequences
        && let Some(s) = (0..n).find(|&s| sequences.queries(s) != sequences.keys(s))
    {
        let (queries, keys) = (sequences.queries(s), sequences.keys(s));
        bail!("[{op}] sequence {s} has queries {queries:?} and keys {keys:?}, expected the same")
    }
    Ok(Dims { b, n, h, h_s, t, d_k, d_v })
}

/// (B, heads, T, D) with `h` heads, of which head i is head `i / (h / heads)`.
pub(super) fn with_heads(xs: &Tensor, h: usize) -> Result<Tensor> {
    let (b, heads, t, d) = xs.dims4()?;
    if heads == h {
        return Ok(xs.clone());
    }
    xs.unsqueeze(2)?.broadcast_as((b, heads, h / heads, t, d))?.reshape((b, h, t, d))
}
