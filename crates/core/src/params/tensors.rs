//! The tensors that hold a layer's projections in each layout: the one list that loading and saving go by.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_nn::Init;

use super::layout::{Form, Kind, QkvOrder, WeightLayout};
use crate::config::{KvSource, MultiHeadAttentionConfig};
use candle_attention_modules::base::{DRAWN_THEN_ZEROED, Heads, LINEAR_WEIGHT, Rows, Source, Spec, linear_bias};
use candle_attention_modules::gate::{GatePlace, OutputGate};
use candle_attention_modules::linear::ProjectionPlace;

use ProjectionPlace::{Gate, Key, Output, Query, Value};

/// A weight or a bias of projections, as a checkpoint has it.
pub(super) struct ProjectionTensor {
    pub spec: Spec,
    /// Whether a weight is stored (in, out).
    pub is_transposed: bool,
    pub is_bias: bool,
    /// What its rows (out, ..) are.
    pub parts: Vec<Part>,
    /// Whether the config has it.
    pub is_wanted: bool,
}

/// The rows of a projection in a tensor.
#[derive(Clone)]
pub(super) struct Part {
    pub place: ProjectionPlace,
    /// Where they are in the tensor.
    pub rows: Rows,
    /// The first of them in the projection.
    pub first: usize,
}

/// The projections in the order in which layouts name them.
const PLACES: [ProjectionPlace; 4] = [Query, Key, Value, Output];

/// The names of a gate's own projection, the first of which is the crate's own.
pub(super) const GATE_NAMES: [&str; 2] = ["gate_proj", "g_proj"];

/// The heads that divide the outputs of a projection, or the inputs of the output projection.
pub(super) fn heads_of(place: ProjectionPlace) -> Heads {
    if matches!(place, Key | Value) { Heads::Key } else { Heads::Query }
}

impl ProjectionTensor {
    /// The whole tensor as (out, ..).
    pub fn read(&self, source: &Source) -> Result<Tensor> {
        self.read_part(0, 0..self.spec.shape[usize::from(self.is_transposed)], source)
    }

    /// Some of the outputs, dimension 0, or of the inputs, dimension 1.
    pub fn read_part(&self, dim: usize, own: Range<usize>, source: &Source) -> Result<Tensor> {
        if !self.is_transposed {
            return source.read_part(&self.spec, dim, own);
        }
        source.read_part(&self.spec, 1 - dim, own)?.t()
    }

    /// The tensor as stored, of the rows of whole projections; `None` where one of them is not there.
    pub fn join<'a>(&self, of: impl Fn(ProjectionPlace) -> Option<&'a Tensor>) -> Result<Option<Tensor>> {
        let mut own = Vec::with_capacity(self.parts.len());
        for Part { place, rows, first } in &self.parts {
            let Some(whole) = of(*place) else { return Ok(None) };
            own.push((rows.clone(), whole.narrow(0, *first, rows.count())?));
        }
        let joined = Rows::join(&own)?;
        let stored = if self.is_transposed { joined.t()? } else { joined };
        stored.contiguous().map(Some)
    }
}

/// All rows of projections, so many of each in every one of `groups`: in one group they follow each other, by head
/// there is a group for each.
fn rows_of(groups: usize, each: impl IntoIterator<Item = (ProjectionPlace, usize)>) -> Vec<Part> {
    let mut end = 0;
    let part = |(place, len)| {
        end += len;
        Part { place, rows: Rows { groups, range: end - len..end }, first: 0 }
    };
    each.into_iter().map(part).collect()
}

/// Of a query projection, which may hold the gate too, each head's after its query.
fn query_rows(cfg: &MultiHeadAttentionConfig) -> Vec<Part> {
    let h = cfg.num_heads();
    match cfg.output_gate().filter(|gate| gate.place == GatePlace::Query) {
        Some(gate) => rows_of(h, [(Query, cfg.head_dim()), (Gate, gate.width(cfg.value_head_dim()))]),
        None => rows_of(1, [(Query, h * cfg.head_dim())]),
    }
}

/// (out, in) of a projection; one that there is not has no outputs.
pub fn projection_shape(cfg: &MultiHeadAttentionConfig, place: ProjectionPlace) -> (usize, usize) {
    let (h, h_kv, d_v, source) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.value_head_dim(), cfg.kv_source());
    let gate = cfg.output_gate().map_or(0, |gate| h * gate.width(d_v));
    match place {
        Query => (h * cfg.head_dim(), cfg.embed_dim()),
        Gate => (gate, cfg.embed_dim()),
        Key if source == KvSource::EarlierLayer => (0, cfg.key_size()),
        Key => (h_kv * cfg.head_dim(), cfg.key_size()),
        Value if source != KvSource::Projected => (0, cfg.value_size()),
        Value => (h_kv * d_v, cfg.value_size()),
        Output => (if cfg.out_proj() { cfg.out_dim() } else { 0 }, h * d_v),
    }
}

/// The tensors of a layer, in the order in which PyTorch draws them: one after the other, since a config may claim more
/// heads than any file has. A gate's own projection is that of `gate_name`.
///
/// # Errors
/// Says why the layout cannot hold the config.
pub(super) fn projection_tensors(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    gate_name: &'static str,
) -> std::result::Result<Box<dyn Iterator<Item = ProjectionTensor>>, String> {
    fits(cfg, layout)?;
    let [q_bias, k_bias, v_bias] = cfg.qkv_bias();
    let biases = [q_bias, k_bias, v_bias, cfg.out_bias()];
    let shapes @ [q, k, v, _] = PLACES.map(|place| projection_shape(cfg, place));
    let projection = |place: ProjectionPlace, name, kind| {
        let (rows, in_dim) = projection_shape(cfg, place);
        let parts = if place == Query { query_rows(cfg) } else { rows_of(1, [(place, rows)]) };
        Module { name, kind, parts, in_dim }
    };
    let packed = |name, kind, order| {
        let groups = if order == QkvOrder::ByHead { cfg.num_kv_heads() } else { 1 };
        let parts = rows_of(groups, [(Query, q.0 / groups), (Key, k.0 / groups), (Value, v.0 / groups)]);
        Module { name, kind, parts, in_dim: q.1 }
    };
    let gate = match cfg.output_gate() {
        Some(OutputGate { place: GatePlace::Own { bias }, .. }) => {
            projection(Gate, gate_name, Kind::Linear).tensors(bias)
        }
        _ => Vec::new(),
    };
    Ok(match layout.form() {
        Form::Separate(names, kind) => {
            let mut tensors = Vec::new();
            for n in (0..PLACES.len()).filter(|&n| shapes[n].0 > 0) {
                tensors.extend(projection(PLACES[n], names[n], kind).tensors(biases[n]));
            }
            Box::new(tensors.into_iter().chain(gate))
        }
        Form::Stacked(names, kind) => {
            let heads = cfg.num_heads();
            let of_head = move |n: usize, head| {
                let (rows, in_dim) = shapes[n];
                let rows = Rows::first(rows / heads);
                let name = format!("heads.{head}.{}", names[n]);
                let parts = vec![Part { place: PLACES[n], first: head * rows.count(), rows }];
                Module { name: &name, kind, parts, in_dim }.tensors(biases[n])
            };
            let of_heads = move |head| (0..3).flat_map(move |n| of_head(n, head));
            Box::new((0..heads).flat_map(of_heads))
        }
        Form::Packed([qkv, out], kind, order) => {
            let mut tensors = packed(qkv, kind, order).tensors(q_bias);
            if cfg.out_proj() {
                tensors.extend(projection(Output, out, kind).tensors(cfg.out_bias()));
            }
            Box::new(tensors.into_iter().chain(gate))
        }
        Form::Torch => {
            let out = projection(Output, "out_proj", Kind::Linear);
            let mut out_bias = out.bias(cfg.out_bias());
            out_bias.spec.init = DRAWN_THEN_ZEROED;
            let mut tensors = vec![out.weight(), out_bias];
            let qkv = packed("in_proj", Kind::InProj, QkvOrder::ByPart);
            if q.1 == k.1 && q.1 == v.1 {
                tensors.push(qkv.weight());
            } else {
                let names = [(Query, "q_proj"), (Key, "k_proj"), (Value, "v_proj")];
                tensors.extend(names.map(|(place, name)| projection(place, name, Kind::InProj).weight()));
            }
            tensors.push(qkv.bias(q_bias));
            Box::new(tensors.into_iter())
        }
    })
}

/// An error if the layout cannot hold the config.
fn fits(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> std::result::Result<(), String> {
    let (h, h_kv, embed_dim) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.embed_dim());
    let ([q_bias, k_bias, v_bias], [q, k, v, _]) = (cfg.qkv_bias(), PLACES.map(|place| projection_shape(cfg, place)));
    let form = layout.form();
    let holds_gate = match (cfg.output_gate().map(|gate| gate.place), &form) {
        (None, _) | (Some(_), Form::Separate(_, Kind::Linear)) => true,
        (Some(place), Form::Packed(_, Kind::Linear, _)) => place != GatePlace::Query,
        _ => false,
    };
    if !holds_gate {
        return Err("the config wants an output gate, for which the layout has no place".into());
    }
    if cfg.kv_source() != KvSource::Projected && !matches!(form, Form::Separate(..)) {
        return Err(
            "the layout keeps keys and values with the queries, but the config says they are not all projected".into(),
        );
    }
    if let Form::Stacked(..) = form {
        if cfg.out_proj() {
            return Err("a stack of heads has no output projection, but the config has one".into());
        }
        if h_kv != h {
            return Err(format!("a stack of heads has keys for each of its {h} heads, but num_kv_heads is {h_kv}"));
        }
    }
    match form {
        Form::Separate(names, Kind::Raw(_)) | Form::Stacked(names, Kind::Raw(_)) => {
            let biases = [q_bias, k_bias, v_bias, cfg.out_bias()];
            match names.into_iter().zip(biases).find(|&(_, bias)| bias) {
                Some((name, _)) => {
                    Err(format!("the config wants a bias on {name}, which plain parameters do not have"))
                }
                None => Ok(()),
            }
        }
        Form::Packed(..) if q.1 != k.1 || q.1 != v.1 => Err(format!(
            "one packed weight reads one input, but the config has input widths {}, {} and {}",
            q.1, k.1, v.1
        )),
        Form::Packed(..) if q_bias != k_bias || q_bias != v_bias => {
            Err("one packed bias covers q, k and v, but the config wants some of them only".into())
        }
        Form::Torch if !cfg.out_proj() => {
            Err("torch.nn.MultiheadAttention has an output projection, but the config has none".into())
        }
        Form::Torch if h_kv != h || cfg.value_head_dim() != cfg.head_dim() => {
            Err("torch.nn.MultiheadAttention has as many key heads as query heads, all of one width".into())
        }
        Form::Torch if h * cfg.head_dim() != embed_dim || cfg.out_dim() != embed_dim => {
            Err(format!("torch.nn.MultiheadAttention has heads and an output of {embed_dim} in all"))
        }
        Form::Torch if cfg.qkv_bias() != [cfg.out_bias(); 3] => {
            Err("torch.nn.MultiheadAttention has all four biases or none, but the config has some".into())
        }
        _ => Ok(()),
    }
}

/// A linear layer of a file, or a plain parameter.
struct Module<'a> {
    name: &'a str,
    kind: Kind,
    parts: Vec<Part>,
    in_dim: usize,
}

impl Module<'_> {
    /// The weight, and the bias where there may be one.
    fn tensors(&self, bias: bool) -> Vec<ProjectionTensor> {
        match self.kind {
            Kind::Raw(_) => vec![self.weight()],
            _ => vec![self.weight(), self.bias(bias)],
        }
    }

    fn out_dim(&self) -> usize {
        self.parts.iter().map(|part| part.rows.count()).sum()
    }

    fn weight(&self) -> ProjectionTensor {
        let (out_dim, in_dim) = (self.out_dim(), self.in_dim);
        let is_transposed = self.kind.is_transposed();
        let init = match self.kind {
            Kind::Linear => LINEAR_WEIGHT,
            Kind::Conv1d => Init::Randn { mean: 0.0, stdev: 0.02 },
            Kind::Raw(_) => Init::Uniform { lo: 0.0, up: 1.0 },
            // `xavier_uniform_`.
            Kind::InProj => {
                let bound = 3f64.sqrt() * (2.0 / (out_dim + in_dim) as f64).sqrt();
                Init::Uniform { lo: -bound, up: bound }
            }
        };
        let shape = if is_transposed { [in_dim, out_dim] } else { [out_dim, in_dim] };
        let (spec, parts) = (Spec::new(self.kind.weight(self.name), shape, init), self.parts.clone());
        ProjectionTensor { spec, is_transposed, is_bias: false, parts, is_wanted: true }
    }

    fn bias(&self, is_wanted: bool) -> ProjectionTensor {
        let init = if self.kind == Kind::Linear { linear_bias(self.in_dim) } else { Init::Const(0.0) };
        let (spec, parts) = (Spec::new(self.kind.bias(self.name), [self.out_dim()], init), self.parts.clone());
        ProjectionTensor { spec, is_transposed: false, is_bias: true, parts, is_wanted }
    }
}
