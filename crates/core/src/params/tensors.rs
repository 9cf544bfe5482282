//! The tensors that hold a layer's projections in each layout: the one list that loading and saving go by.

use candle_core::{Result, Tensor};
use candle_nn::Init;

use super::layout::{Form, Kind, Orientation, QkvOrder, WeightLayout};
use crate::base::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, linear_bias};
use crate::config::{KvSource, MultiHeadAttentionConfig};
use crate::gate::{GatePlace, OutputGate};
use crate::linear::{PROJECTIONS, Piece};

/// A weight or a bias as a checkpoint has it.
pub(super) struct ProjectionTensor {
    pub name: String,
    /// As stored.
    pub shape: Vec<usize>,
    /// Whether a weight is stored (in, out).
    pub is_transposed: bool,
    pub is_bias: bool,
    pub rows: Rows,
    pub init: Init,
    /// Whether the config has it.
    pub is_wanted: bool,
}

/// What the rows of a tensor are. Query, key, value and output projections and the gate are numbered from 0 to 4.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// Those of one projection.
    Projection(usize),
    /// Those of one of the heads of a projection.
    Head { projection: usize, head: usize, heads: usize },
    /// Those of several projections, so many of each in every one of `groups`: in one group they follow each other, by
    /// head there is a group for each.
    Several { groups: usize, each: [usize; PROJECTIONS] },
}

/// The number of the gate.
const GATE: usize = 4;
/// The names of a gate's own projection, the first of which is the crate's own.
pub(super) const GATE_NAMES: [&str; 2] = ["gate_proj", "g_proj"];

impl Rows {
    fn qkv(cfg: &MultiHeadAttentionConfig, order: QkvOrder) -> Self {
        let [q, k, v, ..] = projection_shapes(cfg).map(|(rows, _)| rows);
        let groups = if order == QkvOrder::ByHead { cfg.num_kv_heads() } else { 1 };
        Self::Several { groups, each: [q / groups, k / groups, v / groups, 0, 0] }
    }

    /// Of a query projection, which may hold the gate too, each head's after its query.
    fn query(cfg: &MultiHeadAttentionConfig) -> Self {
        let width = |gate: OutputGate| gate.width(cfg.value_head_dim());
        match cfg.output_gate().filter(|gate| gate.place == GatePlace::Query) {
            Some(gate) => Self::Several { groups: cfg.num_heads(), each: [cfg.head_dim(), 0, 0, 0, width(gate)] },
            None => Self::Projection(0),
        }
    }

    /// The parts of a tensor (rows, ..), each with the projection that it belongs to.
    pub fn split(&self, tensor: Tensor) -> Vec<(usize, Piece)> {
        match *self {
            Self::Projection(projection) | Self::Head { projection, .. } => vec![(projection, Piece::whole(tensor))],
            Self::Several { groups, each } => {
                let mut end = 0;
                let piece = |(projection, len): (usize, usize)| {
                    end += len;
                    (projection, Piece { tensor: tensor.clone(), groups, range: end - len..end })
                };
                each.into_iter().enumerate().filter(|(_, len)| *len > 0).map(piece).collect()
            }
        }
    }

    /// The inverse of [`split`](Self::split), from the rows of whole projections; `None` where one of them is not
    /// there.
    pub fn join<'a>(&self, of: impl Fn(usize) -> Option<&'a Tensor>) -> Result<Option<Tensor>> {
        match *self {
            Self::Projection(projection) => Ok(of(projection).cloned()),
            Self::Head { projection, head, heads } => {
                let rows_of = |whole: &Tensor| whole.narrow(0, head * (whole.dim(0)? / heads), whole.dim(0)? / heads);
                of(projection).map(rows_of).transpose()
            }
            Self::Several { groups, each } => {
                let mut grouped = Vec::with_capacity(PROJECTIONS);
                for (i, len) in each.into_iter().enumerate().filter(|(_, len)| *len > 0) {
                    let Some(part) = of(i) else { return Ok(None) };
                    grouped.push(part.reshape([&[groups, len], &part.dims()[1..]].concat())?);
                }
                Tensor::cat(&grouped, 1)?.flatten(0, 1).map(Some)
            }
        }
    }
}

/// (out, in) of the query, key, value and output projections and of the gate; those that there are not have no outputs.
pub fn projection_shapes(cfg: &MultiHeadAttentionConfig) -> [(usize, usize); PROJECTIONS] {
    let (h, h_kv) = (cfg.num_heads(), cfg.num_kv_heads());
    let gate = cfg.output_gate().map_or(0, |gate| h * gate.width(cfg.value_head_dim()));
    let (key_heads, value_heads) = match cfg.kv_source() {
        KvSource::Projected => (h_kv, h_kv),
        KvSource::KeysAsValues => (h_kv, 0),
        KvSource::EarlierLayer => (0, 0),
    };
    [
        (h * cfg.head_dim(), cfg.embed_dim()),
        (key_heads * cfg.head_dim(), cfg.key_size()),
        (value_heads * cfg.value_head_dim(), cfg.value_size()),
        (if cfg.out_proj() { cfg.out_dim() } else { 0 }, h * cfg.value_head_dim()),
        (gate, cfg.embed_dim()),
    ]
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
    let shapes = projection_shapes(cfg);
    let ([q_bias, k_bias, v_bias], [q, k, v, ..]) = (cfg.qkv_bias(), shapes);
    let biases = [q_bias, k_bias, v_bias, cfg.out_bias()];
    let projection = move |i: usize, name, kind| Module { name, kind, rows: Rows::Projection(i), shape: shapes[i] };
    let packed = |name, kind, order| Module { name, kind, rows: Rows::qkv(cfg, order), shape: (q.0 + k.0 + v.0, q.1) };
    let gate = match cfg.output_gate() {
        Some(OutputGate { place: GatePlace::Own { bias }, .. }) => {
            projection(GATE, gate_name, Kind::Linear).tensors(bias)
        }
        _ => Vec::new(),
    };
    Ok(match layout.form() {
        Form::Separate(names, kind) => {
            let query = Rows::query(cfg);
            let module = move |i| match (i, query) {
                (0, Rows::Several { groups, each }) => {
                    let shape = (groups * each.iter().sum::<usize>(), shapes[0].1);
                    Module { name: names[0], kind, rows: query, shape }
                }
                _ => projection(i, names[i], kind),
            };
            let present = (0..names.len()).filter(move |&i| shapes[i].0 > 0);
            Box::new(present.flat_map(move |i| module(i).tensors(biases[i])).chain(gate))
        }
        Form::Stacked(names, kind) => {
            let heads = cfg.num_heads();
            let of_head = move |projection: usize, head| {
                let (out_dim, in_dim) = shapes[projection];
                let (name, rows) =
                    (format!("heads.{head}.{}", names[projection]), Rows::Head { projection, head, heads });
                Module { name: &name, kind, rows, shape: (out_dim / heads, in_dim) }.tensors(biases[projection])
            };
            Box::new((0..heads).flat_map(move |head| (0..3).flat_map(move |projection| of_head(projection, head))))
        }
        Form::Packed([qkv, out], kind, order) => {
            let out = cfg.out_proj().then(|| projection(3, out, kind).tensors(biases[3]));
            Box::new(packed(qkv, kind, order).tensors(q_bias).into_iter().chain(out.into_iter().flatten()).chain(gate))
        }
        Form::Torch => {
            let out = projection(3, "out_proj", Kind::Linear);
            let mut list = vec![out.weight(), ProjectionTensor { init: DRAWN_THEN_ZEROED, ..out.bias(biases[3]) }];
            let qkv = packed("in_proj", Kind::InProj, QkvOrder::ByPart);
            if q.1 == k.1 && q.1 == v.1 {
                list.push(qkv.weight());
            } else {
                let names = ["q_proj", "k_proj", "v_proj"].into_iter().enumerate();
                list.extend(names.map(|(i, name)| projection(i, name, Kind::InProj).weight()));
            }
            list.push(qkv.bias(q_bias));
            Box::new(list.into_iter())
        }
    })
}

/// An error if the layout cannot hold the config.
fn fits(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> std::result::Result<(), String> {
    let (h, h_kv, embed_dim) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.embed_dim());
    let ([q_bias, k_bias, v_bias], [q, k, v, ..]) = (cfg.qkv_bias(), projection_shapes(cfg));
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
    rows: Rows,
    /// (out, in).
    shape: (usize, usize),
}

impl Module<'_> {
    /// The weight, and the bias where there may be one.
    fn tensors(&self, bias: bool) -> Vec<ProjectionTensor> {
        match self.kind {
            Kind::Raw(_) => vec![self.weight()],
            _ => vec![self.weight(), self.bias(bias)],
        }
    }

    fn weight(&self) -> ProjectionTensor {
        let (out_dim, in_dim) = self.shape;
        let is_transposed = matches!(self.kind, Kind::Conv1d | Kind::Raw(Orientation::InOut));
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
        let shape = if is_transposed { vec![in_dim, out_dim] } else { vec![out_dim, in_dim] };
        let (name, rows) = (self.kind.weight(self.name), self.rows);
        ProjectionTensor { name, shape, is_transposed, is_bias: false, rows, init, is_wanted: true }
    }

    fn bias(&self, is_wanted: bool) -> ProjectionTensor {
        let init = if self.kind == Kind::Linear { linear_bias(self.shape.1) } else { Init::Const(0.0) };
        let (name, shape, rows) = (self.kind.bias(self.name), vec![self.shape.0], self.rows);
        ProjectionTensor { name, shape, is_transposed: false, is_bias: true, rows, init, is_wanted }
    }
}
