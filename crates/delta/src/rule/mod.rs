//! Linear attention by the gated delta rule: one function for every device and dtype.
//!
//! Instead of keys and values, a head has a state (D_k, D_v), which each token updates and each query reads. The
//! recurrence in `reference` is the specification; the CPU kernel is tested against it.

mod cpu;
mod reference;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use macro_rules_attribute::apply;

use candle_attention_core::{Backend, PackedSequences};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::delta::Dims;
use candle_attention_modules::base::Dim::{self, Any, Named};
use candle_attention_modules::base::{Expect, FLOATS, accumulation_dtype, fits_in_memory, number, options};

/// Options of [`gated_delta_rule`], built with `with_*`.
#[apply(options)]
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct DeltaOptions {
    /// The factor on the queries; 1/sqrt(D_k) unless given.
    #[methods(with)]
    scale: Option<f64>,
    /// The eps of an L2 norm of queries and keys: each row is divided by `sqrt(sum of its squares + eps)`, queries
    /// before they are scaled. No norm unless given.
    #[methods(with)]
    qk_norm: Option<f64>,
    /// Which implementation runs; [`Backend::Auto`] unless given.
    #[methods(with)]
    backend: Backend,
    /// The instruction set of the fused CPU kernel, for tests and comparisons; the fastest available unless given. A
    /// call fails if the processor lacks it.
    #[methods(with)]
    instruction_set: Option<InstructionSet>,
}

/// Linear attention by the gated delta rule: each token updates the state S (D_k, D_v) of its head, and its query then
/// reads it. For one token after the other
///
/// ```text
/// S = exp(decay) S                   with decay
/// S = S + k vᵀ                       without beta
/// S = S + beta k (v - Sᵀ k)ᵀ         with beta
/// o = scale Sᵀ q
/// ```
///
/// Which of `decay` and `beta` are given decides the rule: neither is linear attention (Katharopoulos et al.,
/// <https://arxiv.org/abs/2006.16236>), decay alone gated linear attention (Yang et al.,
/// <https://arxiv.org/abs/2312.06635>), beta alone the delta rule (Yang et al., <https://arxiv.org/abs/2406.06484>),
/// and both the gated delta rule (Yang et al., <https://arxiv.org/abs/2412.06464>).
///
/// | input | shape | |
/// | --- | --- | --- |
/// | `q` | (B, H_q, T, D_k) | f32, bf16, f16 or f64 |
/// | `k` | (B, H_k, T, D_k) | in q's dtype |
/// | `v` | (B, H_v, T, D_v) | in q's dtype |
/// | `decay` | (B, H_s, T), or (B, H_s, T, D_k) for a factor of each row of S | the logarithm of the factor: 0 keeps the state, -inf clears it |
/// | `beta` | (B, H_s, T) | usually from 0 to 1, or to 2 |
/// | `state` | (B, H_s, D_k, D_v) | before the first token; zeros unless given |
///
/// H_s, the number of states, is the larger of H_k and H_v. The heads of q, k, v, decay and beta may be fewer: any
/// number that divides H_s. H_q may also be a multiple of H_s. With H the larger of H_q and H_s, head h of H reads head
/// `h / (H / n)` of an input with n heads. Decay, beta and state may have any float dtype, and all inputs any strides.
/// Decays above 0 and any beta are computed as the formula says, though a state may then grow beyond its dtype.
/// Decays above 2.5, and with a norm a scale that is not 0 whose magnitude is below 1e-15 or above 1e15, take the
/// reference path: the products that the fused kernel computes would overflow.
///
/// Returns the outputs o, (B, H, T, D_v) in q's dtype, and the state after the last token, (B, H_s, D_k, D_v), in f32,
/// or f64 where q is; everything is computed in that dtype. Gradients reach all inputs. For f32, bf16 and f16 on the
/// CPU a fused kernel runs, whose output is a view of a contiguous (B, T, H, D_v).
///
/// ```
/// use candle_attention::{DeltaOptions, gated_delta_rule};
/// use candle_core::{D, DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 4, 5, 16), &Device::Cpu)?;
/// let v = Tensor::randn(0f32, 1., (2, 8, 5, 32), &Device::Cpu)?;
/// let decay = Tensor::rand(-1f32, 0., (2, 8, 5), &Device::Cpu)?;
/// let beta = Tensor::rand(0f32, 1., (2, 8, 5), &Device::Cpu)?;
/// let options = DeltaOptions::default().with_qk_norm(1e-6);
/// let (y, state) = gated_delta_rule(&q, &q, &v, Some(&decay), Some(&beta), None, &options)?;
/// assert_eq!((y.dims(), state.dims()), ([2, 8, 5, 32].as_slice(), [2, 8, 16, 32].as_slice()));
/// # Ok(()) }
/// ```
///
/// # Errors
/// For shapes, numbers of heads, dtypes or devices that do not fit together, for a scale that is not finite or an eps
/// that is negative or not finite, and for [`Backend::Fused`] where no fused kernel can run the call.
pub fn gated_delta_rule(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    decay: Option<&Tensor>,
    beta: Option<&Tensor>,
    state: Option<&Tensor>,
    options: &DeltaOptions,
) -> Result<(Tensor, Tensor)> {
    run(Call::new("gated_delta_rule", [q, k, v], [decay, beta, state], None, options)?)
}

/// [`gated_delta_rule`] over n sequences of different lengths, packed one after the other, each with a state of its
/// own.
///
/// q is (total, H_q, D_k), k (total, H_k, D_k), v (total, H_v, D_v), decay (total, H_s) or (total, H_s, D_k), beta
/// (total, H_s) and state (n, H_s, D_k, D_v). Returns the outputs (total, H, D_v) and the states after the last token
/// of each sequence, (n, H_s, D_k, D_v). The queries and the keys of a sequence are the same tokens:
/// [`PackedSequences::self_attention`].
///
/// ```
/// use candle_attention::{DeltaOptions, PackedSequences, gated_delta_rule_varlen};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::self_attention(vec![0, 5, 8])?;
/// let q = Tensor::randn(0f32, 1., (8, 4, 16), &Device::Cpu)?;
/// let options = DeltaOptions::default();
/// let (y, states) = gated_delta_rule_varlen(&q, &q, &q, None, None, None, &sequences, &options)?;
/// assert_eq!((y.dims(), states.dims()), ([8, 4, 16].as_slice(), [2, 4, 16, 16].as_slice()));
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`gated_delta_rule`], and for sequences whose keys are not their queries' tokens, or whose total is not that of
/// the tensors.
#[expect(clippy::too_many_arguments, reason = "six tensors of the rule, as in every other library")]
pub fn gated_delta_rule_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    decay: Option<&Tensor>,
    beta: Option<&Tensor>,
    state: Option<&Tensor>,
    sequences: &PackedSequences,
    options: &DeltaOptions,
) -> Result<(Tensor, Tensor)> {
    let call = Call::new("gated_delta_rule_varlen", [q, k, v], [decay, beta, state], Some(sequences), options)?;
    let (y, states) = run(call)?;
    Ok((y.transpose(1, 2)?.squeeze(0)?.contiguous()?, states))
}

/// Runs a call: the attention output (B, H, T, D_v), and the states.
fn run(call: Call) -> Result<(Tensor, Tensor)> {
    let (ys, states) = run_by_head(&call)?;
    let Dims { h, h_k, h_v, .. } = call.dims;
    let ([n, .., d_k, d_v], h_s) = (call.state_dims(), h_k.max(h_v));
    if h == h_s {
        return Ok((ys, states));
    }
    // Heads of queries that read one state have it once each.
    Ok((ys, states.reshape((n, h_s, h / h_s, d_k, d_v))?.narrow(2, 0, 1)?.squeeze(2)?.contiguous()?))
}

/// Runs a call with one state for each of the H heads: the kernel where it computes the call, else the reference path.
fn run_by_head(call: &Call) -> Result<(Tensor, Tensor)> {
    let (instruction_set, Dims { b, t, h, d_v, .. }) = (kernel_instruction_set(call)?, call.dims);
    if [b, t, d_v].contains(&0) {
        let ys = Tensor::zeros((b, h, t, d_v), call.dtype(), call.rows[0].device())?;
        return Ok((ys, call.states_before()?));
    }
    if let Some(instruction_set) = instruction_set {
        match cpu::run(call, instruction_set)? {
            cpu::Outcome::Computed(ys, states) => return Ok((ys, states)),
            cpu::Outcome::OutOfRange(obstacle) if call.options.backend == Backend::Fused => {
                bail!("[{}] no fused path: {obstacle}", call.op)
            }
            cpu::Outcome::OutOfRange(_) => (),
        }
    }
    reference::run(call)
}

/// The instruction set of the kernel that runs a call; none where the reference path does.
fn kernel_instruction_set(call: &Call) -> Result<Option<InstructionSet>> {
    let options = &call.options;
    let obstacle = match (call.rows[0].device(), call.dtype()) {
        _ if options.backend == Backend::Reference => return Ok(None),
        (Device::Cpu, DType::F64) => "the CPU kernel computes in f32, and the inputs are F64",
        (Device::Cpu, dtype) => match InstructionSet::choose(options.instruction_set, dtype == DType::BF16) {
            Ok(instruction_set) => return Ok(Some(instruction_set)),
            Err(error) => bail!("[{}] {error}", call.op),
        },
        _ => "the kernel is the CPU's, and the inputs are on another device",
    };
    if options.backend == Backend::Fused {
        bail!("[{}] no fused path: {obstacle}", call.op)
    }
    Ok(None)
}

/// Arguments that were found to fit together: every shape, dtype and device is checked here, once. Those of a packed
/// call have a batch of one.
#[derive(Debug, Clone)]
struct Call {
    op: &'static str,
    /// q (B, H_q, T, D_k), k (B, H_k, T, D_k) and v (B, H_v, T, D_v).
    rows: [Tensor; 3],
    /// Decay (B, H, T, 1), or with D_k in the place of 1 for a factor of each row of a state, beta (B, H, T, 1), and
    /// states (n, H, D_k, D_v), contiguous: of all heads, in the dtype that all is computed in.
    factors: [Option<Tensor>; 3],
    /// B is 1 for packed sequences.
    dims: Dims,
    scale: f64,
    sequences: Option<PackedSequences>,
    options: DeltaOptions,
}

impl Call {
    /// Of q, k and v, and of decay, beta and state: tensors (B, heads, T, ..), or packed sequences and (total, heads,
    /// ..).
    fn new(
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
        let is_finite = |scale: f64| scale.abs() <= most;
        number::expect(op, "scale", options.scale, is_finite, format_args!("a finite number in {dtype:?}"))?;
        number::epsilon(op, "qk_norm", options.qk_norm)?;
        // (total, heads, ..) is (1, heads, total, ..), and one factor a token is a row of one.
        let batched = |x: &Tensor| if sequences.is_some() { x.transpose(0, 1)?.unsqueeze(0) } else { Ok(x.clone()) };
        let factor = |x: &Tensor| {
            let x = batched(x)?;
            with_heads(&if x.rank() == 3 { x.unsqueeze(3)? } else { x }, dims.h, dtype)
        };
        let states = |x: &Tensor| with_heads(x, dims.h, dtype)?.contiguous();
        Ok(Self {
            op,
            rows: [batched(rows[0])?, batched(rows[1])?, batched(rows[2])?],
            factors: [decay.map(factor).transpose()?, beta.map(factor).transpose()?, state.map(states).transpose()?],
            dims,
            scale,
            sequences: sequences.cloned(),
            options: options.clone(),
        })
    }

    fn dtype(&self) -> DType {
        self.rows[0].dtype()
    }

    fn tracks_gradients(&self) -> bool {
        self.rows.iter().chain(self.factors.iter().flatten()).any(Tensor::track_op)
    }

    /// (n, H, D_k, D_v), where n is the number of states: of the batch, or of the packed sequences.
    fn state_dims(&self) -> [usize; 4] {
        let Dims { b, h, d_k, d_v, .. } = self.dims;
        [self.sequences.as_ref().map_or(b, PackedSequences::len), h, d_k, d_v]
    }

    /// Those before the first tokens.
    fn states_before(&self) -> Result<Tensor> {
        let zeros = || Tensor::zeros(&self.state_dims(), accumulation_dtype(self.dtype()), self.rows[0].device());
        self.factors[2].clone().map_or_else(zeros, Ok)
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
    let ([h_q, h_k, h_v], d_v) = ([q.dim(1)?, k.dim(1)?, v.dim(1)?], v.dim(D::Minus1)?);
    let h_s = h_k.max(h_v);
    let (count, n) = sequences.map_or(("B", b), |sequences| ("n", sequences.len()));
    let of_states = [Named(count, n), Named("H_s", h_s), Named("D_k", d_k), Named("D_v", d_v)];
    state.map(|state| Expect::one(op, "state", state).shape(&of_states)).transpose()?;

    let given = rows.map(Some).into_iter().chain([decay, beta, state]);
    for (name, tensor) in ["q", "k", "v", "decay", "beta", "state"].into_iter().zip(given) {
        let Some(tensor) = tensor else { continue };
        let expected = Expect::one(op, name, tensor).same_device("q", q.device())?;
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
    number::expect(op, "q's head dimension", d_k, |d: usize| d > 0, "at least 1")?;
    let h = h_q.max(h_s);
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
    Ok(Dims { b, t, h, h_q, h_k, h_v, d_k, d_v })
}

/// (B, heads, T, D) in a dtype and with `h` heads, of which head i is head `i / (h / heads)`.
fn with_heads(xs: &Tensor, h: usize, dtype: DType) -> Result<Tensor> {
    let (b, heads, t, d) = xs.dims4()?;
    if xs.elem_count() == 0 {
        // A view of nothing may begin past the end of its buffer, where Candle's copies panic.
        return Tensor::zeros((b, h, t, d), dtype, xs.device());
    }
    let xs = xs.to_dtype(dtype)?;
    if heads == h {
        return Ok(xs);
    }
    xs.unsqueeze(2)?.broadcast_as((b, heads, h / heads, t, d))?.reshape((b, h, t, d))
}
