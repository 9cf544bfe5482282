//! The tensors that hold a layer's projections in each layout: the one list that loading and saving go by.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use candle_nn::{Init, Linear};

use super::layout::{Kind, LayoutTensor, QkvOrder, WeightLayout};
use crate::config::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::base::{
    DRAWN_THEN_ZEROED, Heads, Joint, LINEAR_WEIGHT, NO_BIAS, QueryHeadOrder, Share, Spec, linear_bias,
};
use candle_attention_modules::gate::{GateLayout, OutputGate};
use candle_attention_modules::linear::{ByPlace, Projection};

use Projection::{Gate, Key, Output, Query, Value};

/// A weight or a bias of projections, as a checkpoint has it.
pub(super) struct ProjectionTensor {
    /// The tensor, and the rows (out, ..) that it has of each projection.
    pub joint: Joint,
    pub is_bias: bool,
    /// The projections.
    pub places: &'static [Projection],
    /// Of a stack, the head whose rows they are.
    head: usize,
}

impl ProjectionTensor {
    /// The tensor as stored, of whole projections; `None` where one of them, or its bias, is not there.
    pub fn join(&self, projections: &ByPlace<Linear>) -> Result<Option<Tensor>> {
        let part = |(place, &(rows, _)): (&Projection, &(usize, _))| {
            let linear = projections.get(place)?;
            let whole = if self.is_bias { linear.bias()? } else { linear.weight() };
            Some(whole.narrow(0, self.head * rows, rows))
        };
        let own: Option<Result<Vec<_>>> = self.places.iter().zip(&self.joint.parts).map(part).collect();
        own.map(|own| self.joint.join(&own?)).transpose()
    }
}

/// (out, in) of a projection; one that there is not has no outputs.
pub fn projection_shape(cfg: &MultiHeadAttentionConfig, place: Projection) -> (usize, usize) {
    let (h, h_kv, d_v, source) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.value_head_dim(), cfg.kv_sharing());
    let gate = cfg.output_gate().map_or(0, |gate| h * gate.width(d_v));
    match place {
        Query => (h * cfg.head_dim(), cfg.embed_dim()),
        Gate => (gate, cfg.embed_dim()),
        Key if source == KvSharing::EarlierLayer => (0, cfg.kdim()),
        Key => (h_kv * cfg.head_dim(), cfg.kdim()),
        Value if source != KvSharing::None => (0, cfg.vdim()),
        Value => (h_kv * d_v, cfg.vdim()),
        Output => (if cfg.out_proj() { cfg.out_dim() } else { 0 }, h * d_v),
    }
}

/// Whether the config has a bias on a projection.
fn has_bias(cfg: &MultiHeadAttentionConfig, place: Projection) -> bool {
    let [q, k, v] = cfg.qkv_bias();
    match place {
        Query => q,
        Key => k,
        Value => v,
        Output => cfg.out_bias(),
        Gate => cfg.output_gate().is_some_and(|gate| gate.layout == GateLayout::Separate { bias: true }),
    }
}

/// The tensors of a layer, in the order in which PyTorch draws them: one after the other, since a config may claim more
/// heads than any file has; of a stack those of some `heads`.
///
/// # Errors
/// Of the operation `op`, where the layout cannot hold the config.
pub(super) fn projection_tensors(
    op: &str,
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    heads: Range<usize>,
) -> Result<impl Iterator<Item = ProjectionTensor>> {
    if let Some(problem) = problem(cfg, layout) {
        bail!("[{op}] {problem} (layout {layout})")
    }
    let one_width = [cfg.kdim(), cfg.vdim()] == [cfg.embed_dim(); 2];
    let heads = if layout.is_stacked() { heads } else { 0..1 };
    let all = heads.flat_map(move |head| layout.tensors(head, one_width).into_iter().map(move |own| (head, own)));
    Ok(all.filter_map(move |(head, tensor)| ProjectionTensor::new(cfg, layout, head, &tensor)))
}

impl ProjectionTensor {
    /// `None` for projections that the config does not have.
    fn new(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, head: usize, named: &LayoutTensor) -> Option<Self> {
        let LayoutTensor { is_bias, kind, .. } = *named;
        let (h, is_transposed) = (cfg.num_heads(), named.is_transposed());
        let gate_place = cfg.output_gate().map(|gate| gate.layout);
        let places = match (named.places, gate_place) {
            ([Query], Some(GateLayout::FusedWithQuery)) => &[Query, Gate],
            ([Gate], Some(GateLayout::FusedWithQuery)) => return None,
            (places, _) => places,
        };
        let groups = match (places, layout) {
            // Each head's query, then its gate.
            ([Query, Gate], _) => h,
            ([_, _, ..], WeightLayout::Packed(_, QkvOrder::ByHead)) => cfg.num_kv_heads(),
            _ => 1,
        };
        let (is_stacked, (_, in_dim)) = (layout.is_stacked(), projection_shape(cfg, places[0]));
        let part = |&place: &Projection| match (projection_shape(cfg, place).0, place) {
            (rows, _) if is_stacked => (rows / h, None),
            (rows, Output) => (rows, None),
            (rows, Key | Value) => (rows, Some(Heads::Key)),
            (rows, Query | Gate) => (rows, Some(Heads::Query)),
        };
        let parts: Vec<_> = places.iter().map(part).collect();
        let out_dim = parts.iter().map(|(rows, _)| rows).sum::<usize>();
        let init = match (kind, is_bias) {
            (Kind::Linear | Kind::OutProj, false) => LINEAR_WEIGHT,
            (Kind::Linear, true) => linear_bias(in_dim),
            (Kind::OutProj, true) => DRAWN_THEN_ZEROED,
            (_, true) => Init::Const(0.0),
            (Kind::Conv1d, _) => Init::Randn { mean: 0.0, stdev: 0.02 },
            (Kind::Raw(_), _) => Init::Uniform { lo: 0.0, up: 1.0 },
            // `xavier_uniform_`.
            (Kind::InProj, _) => {
                let bound = 3f64.sqrt() * (2.0 / (out_dim + in_dim) as f64).sqrt();
                Init::Uniform { lo: -bound, up: bound }
            }
        };
        let shape = match (is_bias, is_transposed) {
            (true, _) => vec![out_dim],
            (false, true) => vec![in_dim, out_dim],
            (false, false) => vec![out_dim, in_dim],
        };
        let share = match places {
            [Output] if is_bias => Some(Share::Sum),
            [Output] => Some(Share::Heads(Heads::Query, usize::from(!is_transposed))),
            _ => None,
        };
        let spec = Spec { share, ..Spec::new(named.name(), shape, init) }
            .only_if(!is_bias || has_bias(cfg, places[0]), NO_BIAS);
        let joint = Joint { spec, is_transposed, groups, parts, query_heads: query_head_order(cfg, layout) };
        (out_dim > 0).then_some(Self { joint, is_bias, places, head })
    }
}

/// Returns the order of query heads in a layout. x-transformers repeats all its key heads one after the other.
fn query_head_order(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> QueryHeadOrder {
    let (num_heads, num_kv_heads) = (cfg.num_heads(), cfg.num_kv_heads());
    match layout {
        WeightLayout::XTransformers if num_kv_heads > 1 && num_kv_heads < num_heads => {
            QueryHeadOrder::Cyclic { num_heads, num_kv_heads }
        }
        _ => QueryHeadOrder::Grouped,
    }
}

/// Why the layout cannot hold the config, if it cannot.
fn problem(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Option<String> {
    let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
    let widths @ [q, k, v] = [cfg.embed_dim(), cfg.kdim(), cfg.vdim()];
    let (tensors, [q_bias, ..]) = (layout.tensors(0, true), cfg.qkv_bias());
    // The first of torch's is that of its output projection.
    let (is_packed, is_torch, is_stack) =
        (tensors[0].places.len() > 1, layout == WeightLayout::Torch, layout.is_stacked());
    let has_place = |gate: OutputGate| {
        tensors.iter().any(|tensor| tensor.holds(Gate)) && !(is_packed && gate.layout == GateLayout::FusedWithQuery)
    };
    let plain = tensors.iter().find(|tensor| matches!(tensor.kind, Kind::Raw(_)) && has_bias(cfg, tensor.places[0]));
    let plain = plain.map(|tensor| tensor.module.trim_start_matches("heads.0."));
    let torch = |what: &str| format!("torch.nn.MultiheadAttention has {what}");
    let problems = [
        (
            !cfg.output_gate().is_none_or(has_place),
            "the config wants an output gate, for which the layout has no place".into(),
        ),
        (
            cfg.kv_sharing() != KvSharing::None && (is_packed || is_torch || is_stack),
            "the layout keeps keys and values with the queries, but the config says they are not all projected".into(),
        ),
        (is_stack && cfg.out_proj(), "a stack of heads has no output projection, but the config has one".into()),
        (
            is_stack && h_kv != h,
            format!("a stack of heads has keys for each of its {h} heads, but num_kv_heads is {h_kv}"),
        ),
        (
            plain.is_some(),
            format!("the config wants a bias on {}, which plain parameters do not have", plain.unwrap_or_default()),
        ),
        (
            is_packed && widths != [q; 3],
            format!("one packed weight reads one input, but the config has input widths {q}, {k} and {v}"),
        ),
        (
            is_packed && cfg.qkv_bias() != [q_bias; 3],
            "one packed bias covers q, k and v, but the config wants some of them only".into(),
        ),
        (is_torch && !cfg.out_proj(), torch("an output projection, but the config has none")),
        (is_torch && [h_kv, d_v] != [h, d], torch("as many key heads as query heads, all of one width")),
        (is_torch && [h * d, cfg.out_dim()] != [q; 2], torch(&format!("heads and an output of {q} in all"))),
        (is_torch && cfg.qkv_bias() != [cfg.out_bias(); 3], torch("all four biases or none, but the config has some")),
    ];
    problems.into_iter().find(|&(is_there, _)| is_there).map(|(_, text)| text)
}
