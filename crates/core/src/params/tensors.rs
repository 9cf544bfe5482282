//! The tensors of a layer's projections in each layout. Loading and saving go by this list.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::{Init, Linear};

use super::layout::{QkvOrder, WeightLayout};
use super::layout_tensors::{Kind, LayoutTensor};
use crate::config::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::base::{
    DRAWN_THEN_ZEROED, FusedRows, FusedTensor, Heads, LINEAR_WEIGHT, NO_BIAS, ParameterSpec, QueryHeadOrder, Share,
    StoredDims, linear_bias,
};
use candle_attention_modules::gate::{GateLayout, OutputGate};
use candle_attention_modules::linear::{ByProjection, Projection, ReplacedRows};

use Projection::{Gate, Key, Output, Query, Value};

/// A weight or a bias of projections in a checkpoint.
pub(super) struct ProjectionTensor {
    /// The tensor, and the rows (out, ..) that it has of each projection.
    pub tensor: FusedTensor,
    /// Whether it is a bias.
    pub is_bias: bool,
    /// The projections.
    pub projections: &'static [Projection],
    /// The head whose rows they are, in a stack of heads.
    head: usize,
}

impl ProjectionTensor {
    /// Returns the tensor as stored, made of whole projections; `None` where one of them, or its bias, is not there.
    pub fn join(&self, linears: &ByProjection<Linear>) -> Result<Option<Tensor>> {
        let mut parts = Vec::new();
        for (projection, rows) in self.projections.iter().zip(&self.tensor.parts) {
            let Some(linear) = linears.get(projection) else { return Ok(None) };
            let whole = if self.is_bias { linear.bias() } else { Some(linear.weight()) };
            let Some(whole) = whole else { return Ok(None) };
            let first = if *projection == Output { 0 } else { self.head * rows.count };
            parts.push(whole.narrow(0, first, rows.count)?);
        }
        self.tensor.join(&parts).map(Some)
    }
}

impl ProjectionTensor {
    /// Sets the rows of each projection that another value of the tensor, as stored, has. The layer computes in
    /// `dtype`; a variable of another dtype is read in every call.
    pub fn replace(&self, values: Tensor, dtype: DType, replaced: &mut ByProjection<ReplacedRows>) -> Result<()> {
        for (projection, rows) in self.projections.iter().zip(self.tensor.rows_of_values(values, dtype)?) {
            let own = replaced.entry(*projection).or_default();
            if self.is_bias {
                own.bias = Some(rows);
            } else {
                own.weight = Some(rows);
            }
        }
        Ok(())
    }
}

/// The numbers of outputs and inputs of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProjectionShape {
    /// The number of outputs; 0 for a projection that the layer does not have.
    pub outputs: usize,
    /// The number of inputs.
    pub inputs: usize,
}

/// Returns the shape of a projection.
pub fn projection_shape(cfg: &MultiHeadAttentionConfig, projection: Projection) -> ProjectionShape {
    let h = cfg.num_heads();
    let h_kv = cfg.num_kv_heads();
    let d_v = cfg.value_head_dim();
    let sharing = cfg.kv_sharing();
    let outputs = match projection {
        Query => h * cfg.head_dim(),
        Gate => cfg.output_gate().map_or(0, |gate| h * gate.width(d_v)),
        Key if sharing == KvSharing::EarlierLayer => 0,
        Key => h_kv * cfg.head_dim(),
        Value if sharing != KvSharing::None => 0,
        Value => h_kv * d_v,
        Output if cfg.out_proj() => cfg.out_dim(),
        Output => 0,
    };
    let inputs = match projection {
        Query | Gate => cfg.embed_dim(),
        Key => cfg.kdim(),
        Value => cfg.vdim(),
        Output => h * d_v,
    };
    ProjectionShape { outputs, inputs }
}

/// Returns whether the config has a bias on a projection.
fn has_bias(cfg: &MultiHeadAttentionConfig, projection: Projection) -> bool {
    match projection {
        Query => cfg.q_bias(),
        Key => cfg.k_bias(),
        Value => cfg.v_bias(),
        Output => cfg.out_bias(),
        Gate => cfg.output_gate().is_some_and(|gate| gate.layout == GateLayout::Separate { bias: true }),
    }
}

/// Returns whether a packed layer has separate biases: `q_bias` and `v_bias` without a bias of
/// keys, as in BEiT, EVA and VideoMAE.
pub(super) fn has_separate_biases(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> bool {
    let is_packed = matches!(layout, WeightLayout::Packed(..));
    is_packed && (cfg.k_bias() != cfg.q_bias() || cfg.v_bias() != cfg.q_bias())
}

/// Returns the tensors of a layer, in the order in which PyTorch draws them; for a stack only the tensors of `heads`.
/// They are made one after the other, since a config may claim more heads than any file has. With `separate_biases`
/// the biases of q, k and v are separate tensors.
///
/// # Errors
/// In the name of the operation `op`, if the config does not fit the layout.
pub(super) fn projection_tensors(
    op: &str,
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    heads: Range<usize>,
    separate_biases: bool,
) -> Result<impl Iterator<Item = ProjectionTensor>> {
    if let Some(problem) = problem(cfg, layout) {
        bail!("[{op}] {problem} (layout {layout})")
    }
    let one_width = [cfg.kdim(), cfg.vdim()] == [cfg.embed_dim(); 2];
    let heads = if layout.is_stacked() { heads } else { 0..1 };
    let last = heads.end.saturating_sub(1);
    let tensors_of_head = move |head| {
        let mut named = layout.tensors(head, one_width);
        // All heads of a stack have one output projection, which comes after them.
        named.retain(|tensor| head == last || tensor.projections != [Output]);
        if separate_biases {
            named.retain(|tensor| !(tensor.is_bias && tensor.projections.len() > 1));
            named.extend(LayoutTensor::separate_biases());
        }
        named.into_iter().filter_map(move |tensor| projection_tensor(cfg, layout, head, &tensor))
    };
    Ok(heads.flat_map(tensors_of_head))
}

/// Returns a tensor of a layout; `None` for projections that the config does not have.
fn projection_tensor(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    head: usize,
    named: &LayoutTensor,
) -> Option<ProjectionTensor> {
    let is_bias = named.is_bias;
    let projections = projections_of(cfg, named.projections)?;
    let parts: Vec<_> = projections.iter().map(|&projection| rows_of(cfg, layout, projection)).collect();
    let out_dim = parts.iter().map(|rows| rows.count).sum::<usize>();
    if out_dim == 0 {
        return None;
    }
    let in_dim = projection_shape(cfg, projections[0]).inputs;
    let dims = named.dims();
    let shape = match (dims, is_bias) {
        (StoredDims::InHeads, true) => by_heads(cfg, projections[0], out_dim).to_vec(),
        (_, true) => vec![out_dim],
        (StoredDims::OutIn, false) => vec![out_dim, in_dim],
        (StoredDims::InOut, false) => vec![in_dim, out_dim],
        (StoredDims::InHeads, false) => [&[in_dim][..], &by_heads(cfg, projections[0], out_dim)].concat(),
        (StoredDims::HeadsOut, false) => [&by_heads(cfg, projections[0], in_dim)[..], &[out_dim]].concat(),
    };
    let init = initialisation(named.kind, is_bias, in_dim, out_dim);
    let spec =
        ParameterSpec { share: share_of(projections, is_bias, dims), ..ParameterSpec::new(named.name(), shape, init) }
            .only_if(!is_bias || has_bias(cfg, projections[0]), NO_BIAS);
    let groups = groups_of(cfg, layout, projections);
    let tensor = FusedTensor { spec, dims, groups, parts, query_heads: query_head_order(cfg, layout) };
    Some(ProjectionTensor { tensor, is_bias, projections, head })
}

/// Returns the number of heads of a projection, and the width of one if all have `width`.
fn by_heads(cfg: &MultiHeadAttentionConfig, projection: Projection, width: usize) -> [usize; 2] {
    let heads = match projection {
        Key | Value => cfg.num_kv_heads(),
        Query | Gate | Output => cfg.num_heads(),
    };
    [heads, width / heads]
}

/// Returns the projections of a tensor of a layout, with a gate that is fused with the queries; `None` for a
/// separate gate that the config does not have.
fn projections_of(cfg: &MultiHeadAttentionConfig, named: &'static [Projection]) -> Option<&'static [Projection]> {
    if cfg.output_gate().is_none_or(|gate| gate.layout != GateLayout::FusedWithQuery) {
        return Some(named);
    }
    match named {
        [Query] => Some(&[Query, Gate]),
        [Gate] => None,
        other => Some(other),
    }
}

/// Returns the rows of a projection in a tensor, and the heads that they belong to.
fn rows_of(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, projection: Projection) -> FusedRows {
    let count = projection_shape(cfg, projection).outputs;
    if layout.is_stacked() && projection != Output {
        return FusedRows { count: count / cfg.num_heads(), heads: None };
    }
    let heads = match projection {
        Output => None,
        Key | Value => Some(Heads::Key),
        Query | Gate => Some(Heads::Query),
    };
    FusedRows { count, heads }
}

/// Returns the number of groups of rows in a tensor.
fn groups_of(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, projections: &[Projection]) -> usize {
    match (projections, layout) {
        // The query of each head, then its gate.
        ([Query, Gate], _) => cfg.num_heads(),
        ([_, _, ..], WeightLayout::Packed(_, QkvOrder::ByHead)) => cfg.num_kv_heads(),
        _ => 1,
    }
}

/// Returns the initialisation of a tensor by the library whose layout it is.
fn initialisation(kind: Kind, is_bias: bool, in_dim: usize, out_dim: usize) -> Init {
    match kind {
        Kind::Linear if is_bias => linear_bias(in_dim),
        Kind::OutProj if is_bias => DRAWN_THEN_ZEROED,
        Kind::Linear | Kind::OutProj => LINEAR_WEIGHT,
        Kind::Conv1d | Kind::Raw(_) | Kind::InProj | Kind::Dense | Kind::Heads(_) if is_bias => Init::Const(0.0),
        Kind::Bias => Init::Const(0.0),
        Kind::Conv1d => Init::Randn { mean: 0.0, stdev: 0.02 },
        Kind::Raw(_) => Init::Uniform { lo: 0.0, up: 1.0 },
        // The variance of flax' `lecun_normal`.
        Kind::Dense | Kind::Heads(_) => Init::Randn { mean: 0.0, stdev: (in_dim as f64).recip().sqrt() },
        // `xavier_uniform_`.
        Kind::InProj => {
            let bound = 3f64.sqrt() * (2.0 / (out_dim + in_dim) as f64).sqrt();
            Init::Uniform { lo: -bound, up: bound }
        }
    }
}

/// Returns the division among ranks of an output projection, whose columns belong to heads. The rows of the other
/// projections are divided by their [`FusedRows`].
fn share_of(projections: &[Projection], is_bias: bool, dims: StoredDims) -> Option<Share> {
    match projections {
        [Output] if is_bias => Some(Share::Sum),
        [Output] => Some(Share::Heads { heads: Heads::Query, dim: usize::from(dims == StoredDims::OutIn) }),
        _ => None,
    }
}

/// Returns the order of query heads in a layout. x-transformers repeats all its key heads one after the other.
fn query_head_order(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> QueryHeadOrder {
    let num_heads = cfg.num_heads();
    let num_kv_heads = cfg.num_kv_heads();
    match layout {
        WeightLayout::XTransformers if num_kv_heads > 1 && num_kv_heads < num_heads => {
            QueryHeadOrder::Cyclic { num_heads, num_kv_heads }
        }
        _ => QueryHeadOrder::Grouped,
    }
}

/// Returns the reason why the config does not fit the layout, if it does not.
fn problem(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Option<String> {
    let tensors = layout.tensors(0, true);
    // The first tensor of `torch` is that of its output projection.
    let is_packed = tensors[0].projections.len() > 1;
    let is_torch = layout == WeightLayout::Torch;
    let is_stack = layout.is_stacked();
    if let Some(gate) = cfg.output_gate()
        && !holds_gate(gate, &tensors, is_packed)
    {
        return Some("the config has an output gate, which the layout cannot hold".into());
    }
    if cfg.kv_sharing() != KvSharing::None && (is_packed || is_torch || is_stack) {
        return Some(
            "the layout stores keys and values with the queries, but the config says they are not all projected".into(),
        );
    }
    if is_stack && let Some(problem) = stack_problem(cfg) {
        return Some(problem);
    }
    if let Some(plain) =
        tensors.iter().find(|tensor| matches!(tensor.kind, Kind::Raw(_)) && has_bias(cfg, tensor.projections[0]))
    {
        let name = plain.module.trim_start_matches("heads.0.");
        return Some(format!("the config has a bias on {name}, which plain parameters do not have"));
    }
    if is_packed {
        return packed_problem(cfg, layout);
    }
    if is_torch { torch_problem(cfg) } else { None }
}

/// Returns whether a layout has a name for an output gate.
fn holds_gate(gate: OutputGate, tensors: &[LayoutTensor], is_packed: bool) -> bool {
    let has_module = tensors.iter().any(|tensor| tensor.holds(Gate));
    has_module && !(is_packed && gate.layout == GateLayout::FusedWithQuery)
}

fn stack_problem(cfg: &MultiHeadAttentionConfig) -> Option<String> {
    let h = cfg.num_heads();
    let h_kv = cfg.num_kv_heads();
    if h_kv != h {
        return Some(format!("a stack of heads has keys for each of its {h} heads, but num_kv_heads is {h_kv}"));
    }
    None
}

fn packed_problem(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Option<String> {
    let q = cfg.embed_dim();
    let k = cfg.kdim();
    let v = cfg.vdim();
    if [k, v] != [q, q] {
        return Some(format!("one packed weight reads one input, but the config has input widths {q}, {k} and {v}"));
    }
    let is_same = cfg.k_bias() == cfg.q_bias() && cfg.v_bias() == cfg.q_bias();
    if !is_same && !has_separate_biases(cfg, layout) {
        return Some("one packed bias covers q, k and v, but the config has some of them only".into());
    }
    None
}

fn torch_problem(cfg: &MultiHeadAttentionConfig) -> Option<String> {
    let h = cfg.num_heads();
    let d = cfg.head_dim();
    let embed_dim = cfg.embed_dim();
    let problem = |has: &str| Some(format!("torch.nn.MultiheadAttention has {has}"));
    if !cfg.out_proj() {
        return problem("an output projection, but the config has none");
    }
    if cfg.num_kv_heads() != h || cfg.value_head_dim() != d {
        return problem("the same number of key heads as query heads, all of one width");
    }
    if h * d != embed_dim || cfg.out_dim() != embed_dim {
        return problem(&format!("heads and an output of {embed_dim} in all"));
    }
    if [cfg.q_bias(), cfg.k_bias(), cfg.v_bias()] != [cfg.out_bias(); 3] {
        return problem("all four biases or none, but the config has some");
    }
    None
}
