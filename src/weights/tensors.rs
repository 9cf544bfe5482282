//! The tensors that hold a layer's projections in each layout: the one list that loading and saving go by.

use candle_core::{Result, Tensor};
use candle_nn::Init;

use super::layout::{Form, Kind, Orientation, QkvOrder, WeightLayout};
use super::rows::Piece;
use super::source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, linear_bias};
use crate::MultiHeadAttentionConfig;

/// Or why the layout cannot hold the config.
type Fits<T> = std::result::Result<T, String>;

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

/// What the rows of a tensor are. Query, key, value and output projections are numbered from 0 to 3.
#[derive(Clone, Copy)]
pub(super) enum Rows {
    /// Those of one projection.
    Projection(usize),
    /// Those of one of the heads of a projection.
    Head { projection: usize, head: usize, heads: usize },
    /// Those of query, key and value, so many of each in every one of `groups`: in one group they follow each other, by head
    /// there is a group for each key head.
    Qkv { groups: usize, each: [usize; 3] },
}

impl Rows {
    fn qkv(cfg: &MultiHeadAttentionConfig, order: QkvOrder) -> Self {
        let [q, k, v, _] = projection_shapes(cfg).map(|(rows, _)| rows);
        let groups = if order == QkvOrder::ByHead { cfg.num_kv_heads() } else { 1 };
        Self::Qkv { groups, each: [q / groups, k / groups, v / groups] }
    }

    /// The parts of a tensor (rows, ..), each with the projection that it belongs to.
    pub fn split(&self, tensor: Tensor) -> Vec<(usize, Piece)> {
        match *self {
            Self::Projection(projection) | Self::Head { projection, .. } => vec![(projection, Piece::whole(tensor))],
            Self::Qkv { groups, each: [q, k, v] } => {
                let ranges = [0..q, q..q + k, q + k..q + k + v];
                let piece = |range| Piece { tensor: tensor.clone(), groups, range };
                ranges.into_iter().map(piece).enumerate().collect()
            }
        }
    }

    /// The inverse of [`split`](Self::split), from the rows of whole projections; `None` where one of them is not there.
    pub fn join<'a>(&self, of: impl Fn(usize) -> Option<&'a Tensor>) -> Result<Option<Tensor>> {
        match *self {
            Self::Projection(projection) => Ok(of(projection).cloned()),
            Self::Head { projection, head, heads } => {
                let rows_of = |whole: &Tensor| whole.narrow(0, head * (whole.dim(0)? / heads), whole.dim(0)? / heads);
                of(projection).map(rows_of).transpose()
            }
            Self::Qkv { groups, each } => {
                let mut grouped = Vec::with_capacity(3);
                for (i, len) in each.into_iter().enumerate() {
                    let Some(part) = of(i) else { return Ok(None) };
                    grouped.push(part.reshape([&[groups, len], &part.dims()[1..]].concat())?);
                }
                Tensor::cat(&grouped, 1)?.flatten(0, 1).map(Some)
            }
        }
    }
}

/// (out, in) of the query, key, value and output projections.
pub(crate) fn projection_shapes(cfg: &MultiHeadAttentionConfig) -> [(usize, usize); 4] {
    let (h, h_kv) = (cfg.num_heads(), cfg.num_kv_heads());
    [
        (h * cfg.head_dim(), cfg.embed_dim()),
        (h_kv * cfg.head_dim(), cfg.key_size()),
        (h_kv * cfg.value_head_dim(), cfg.value_size()),
        (cfg.out_dim(), h * cfg.value_head_dim()),
    ]
}

/// The tensors of a layer, in the order in which PyTorch draws them.
///
/// # Errors
/// Says why the layout cannot hold the config.
pub(super) fn projection_tensors(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Fits<Vec<ProjectionTensor>> {
    let shapes = projection_shapes(cfg);
    let [q_bias, k_bias, v_bias] = cfg.qkv_bias();
    let biases = [q_bias, k_bias, v_bias, cfg.out_bias()];
    let list = match layout.form() {
        Form::Separate(names, kind) => (0..if cfg.out_proj() { 4 } else { 3 })
            .map(|i| Module { name: names[i], kind, rows: Rows::Projection(i), shape: shapes[i] }.tensors(biases[i]))
            .collect::<Fits<Vec<_>>>()?,
        Form::Stacked(names, kind) => {
            let h = cfg.num_heads();
            if cfg.out_proj() {
                return Err("a stack of heads has no output projection, but the config has one".into());
            }
            if cfg.num_kv_heads() != h {
                let found = cfg.num_kv_heads();
                return Err(format!(
                    "a stack of heads has keys for each of its {h} heads, but num_kv_heads is {found}"
                ));
            }
            let of_head = |head| {
                (0..3).map(move |projection| {
                    let (name, rows) =
                        (format!("heads.{head}.{}", names[projection]), Rows::Head { projection, head, heads: h });
                    let (out_dim, in_dim) = shapes[projection];
                    Module { name: &name, kind, rows, shape: (out_dim / h, in_dim) }.tensors(biases[projection])
                })
            };
            (0..h).flat_map(of_head).collect::<Fits<Vec<_>>>()?
        }
        Form::Packed([qkv, out], kind, order) => {
            let [q, k, v, o] = shapes;
            if q.1 != k.1 || q.1 != v.1 {
                return Err(format!(
                    "one packed weight reads one input, but the config has input widths {}, {} and {}",
                    q.1, k.1, v.1
                ));
            }
            if q_bias != k_bias || q_bias != v_bias {
                return Err("one packed bias covers q, k and v, but the config wants some of them only".into());
            }
            let shape = (q.0 + k.0 + v.0, q.1);
            let mut list = vec![Module { name: qkv, kind, rows: Rows::qkv(cfg, order), shape }.tensors(q_bias)?];
            if cfg.out_proj() {
                list.push(Module { name: out, kind, rows: Rows::Projection(3), shape: o }.tensors(biases[3])?);
            }
            list
        }
        Form::Torch => {
            fits_torch(cfg)?;
            let [q, k, v, o] = shapes;
            let out = Module { name: "out_proj", kind: Kind::Linear, rows: Rows::Projection(3), shape: o };
            let mut list = vec![out.weight(), ProjectionTensor { init: DRAWN_THEN_ZEROED, ..out.bias(biases[3]) }];
            let shape = (q.0 + k.0 + v.0, q.1);
            let packed = Module { name: "in_proj", kind: Kind::InProj, rows: Rows::qkv(cfg, QkvOrder::ByPart), shape };
            if q.1 == k.1 && q.1 == v.1 {
                list.push(packed.weight());
            } else {
                for (i, name) in ["q_proj", "k_proj", "v_proj"].into_iter().enumerate() {
                    let rows = Rows::Projection(i);
                    list.push(Module { name, kind: Kind::InProj, rows, shape: shapes[i] }.weight());
                }
            }
            list.push(packed.bias(q_bias));
            return Ok(list);
        }
    };
    Ok(list.into_iter().flatten().collect())
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
    fn tensors(&self, bias: bool) -> Fits<Vec<ProjectionTensor>> {
        match self.kind {
            Kind::Raw(_) if bias => {
                Err(format!("the config wants a bias on {}, which plain parameters do not have", self.name))
            }
            Kind::Raw(_) => Ok(vec![self.weight()]),
            _ => Ok(vec![self.weight(), self.bias(bias)]),
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

/// An error if `torch.nn.MultiheadAttention` has no arguments for the config.
fn fits_torch(cfg: &MultiHeadAttentionConfig) -> Fits<()> {
    let embed_dim = cfg.embed_dim();
    if !cfg.out_proj() {
        return Err("torch.nn.MultiheadAttention has an output projection, but the config has none".into());
    }
    if cfg.num_kv_heads() != cfg.num_heads() || cfg.value_head_dim() != cfg.head_dim() {
        return Err("torch.nn.MultiheadAttention has as many key heads as query heads, all of one width".into());
    }
    if cfg.num_heads() * cfg.head_dim() != embed_dim || cfg.out_dim() != embed_dim {
        return Err(format!("torch.nn.MultiheadAttention has heads and an output of {embed_dim} in all"));
    }
    if cfg.qkv_bias() != [cfg.out_bias(); 3] {
        return Err("torch.nn.MultiheadAttention has all four biases or none, but the config has some".into());
    }
    Ok(())
}
