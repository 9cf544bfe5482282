//! From any layout to four linear layers.

use candle_core::{Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder};

use super::joint::Joint;
use super::layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use super::pack::PackedRows;
use super::source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, Source, linear_bias};
use crate::MultiHeadAttentionConfig;

/// The projections of a layer: q (H·D, E), k (H_kv·D, key_size), v (H_kv·D_v, value_size), o (out_dim, H·D_v).
#[derive(Debug, Clone)]
pub(crate) struct Projections {
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Option<Linear>,
    /// Where q, k and v are copies that were put together from variables.
    pub parts: Option<Parts>,
    /// Where q, k and v, or k and v, are views of one weight.
    pub joint: Option<Joint>,
}

impl Projections {
    /// Projections over tensors of their own.
    pub(super) fn apart([q, k, v]: [Linear; 3], o: Option<Linear>) -> Self {
        Self { q, k, v, o, parts: None, joint: None }
    }

    /// The same numbers in one weight, where that can be.
    pub(super) fn joined(self) -> Result<Self> {
        if self.parts.is_some() || self.joint.is_some() {
            return Ok(self);
        }
        let apart = [&self.q, &self.k, &self.v];
        let Some(joint) = Joint::of(apart)? else { return Ok(self) };
        let [q, k, v] = joint.views(apart)?;
        Ok(Self { q, k, v, joint: Some(joint), ..self })
    }

    /// Query, key and value projections with what their variables hold now.
    pub(crate) fn current(&self) -> Result<[Linear; 3]> {
        match &self.parts {
            Some(parts) => parts.assemble(),
            None => Ok([self.q.clone(), self.k.clone(), self.v.clone()]),
        }
    }
}

/// What query, key and value projections were put together from. Training changes variables in place, which a copy made
/// at loading does not see: a layer over variables puts its projections together for each call.
#[derive(Debug, Clone)]
pub(crate) enum Parts {
    /// A projection for each head.
    Heads([Vec<Linear>; 3]),
    /// One projection of all rows.
    Packed(PackedRows, Linear),
}

impl Parts {
    pub(crate) fn assemble(&self) -> Result<[Linear; 3]> {
        match self {
            Self::Heads([q, k, v]) => Ok([side_by_side(q)?, side_by_side(k)?, side_by_side(v)?]),
            Self::Packed(rows, packed) => rows.split(packed),
        }
    }

    fn into_projections(self, o: Option<Linear>) -> Result<Projections> {
        if let Self::Packed(rows, packed) = &self
            && let Some(joint) = rows.joint(packed)?
        {
            let [q, k, v] = joint.views([packed; 3])?;
            return Ok(Projections { q, k, v, o, parts: None, joint: Some(joint) });
        }
        let assembled = self.assemble()?;
        let has_variables = assembled.iter().any(|linear| linear.weight().track_op());
        Ok(Projections { parts: has_variables.then_some(self), ..Projections::apart(assembled, o) })
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

pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    vb: VarBuilder,
) -> Result<Projections> {
    let source = Source::new("multi_head_attention", layout, vb);
    let projections = match layout {
        WeightLayout::StackedHeads(naming, storage) => stacked(cfg, naming, storage, &source),
        WeightLayout::Torch => torch(cfg, &source),
        WeightLayout::Conv1d => conv1d(cfg, &source),
        WeightLayout::Packed(naming, order) => packed(cfg, naming, order, &source),
        _ => separate(cfg, layout, &source),
    };
    projections?.joined()
}

fn separate(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, source: &Source) -> Result<Projections> {
    let Some((names, storage)) = layout.separate() else { return source.fail("the projections are not apart") };
    let shapes = projection_shapes(cfg);
    let biases = cfg.qkv_bias();
    let load = |i: usize, bias: bool| one(source, names[i], storage, shapes[i], bias);
    let qkv = [load(0, biases[0])?, load(1, biases[1])?, load(2, biases[2])?];
    let o = if cfg.out_proj() { Some(load(3, cfg.out_bias())?) } else { None };
    if o.is_none() {
        refuse_out_proj(source)?;
    }
    Ok(Projections::apart(qkv, o))
}

/// One projection, whichever way it is stored.
fn one(source: &Source, name: &str, storage: Storage, shape: (usize, usize), bias: bool) -> Result<Linear> {
    let (out_dim, in_dim) = shape;
    let uniform = Init::Uniform { lo: 0.0, up: 1.0 };
    let weight = match storage {
        Storage::Linear => return source.linear(name, shape, bias),
        Storage::Raw(Orientation::InOut) => source.get((in_dim, out_dim), name, uniform)?.t()?,
        Storage::Raw(Orientation::OutIn) => source.get((out_dim, in_dim), name, uniform)?,
    };
    if bias {
        return source.fail(format!("the config wants a bias on {name}, which plain parameters do not have"));
    }
    Ok(Linear::new(weight, None))
}

/// No layout's output projection may be there, whatever its name: without it the numbers are others.
pub(super) fn refuse_out_proj(source: &Source) -> Result<()> {
    for name in WeightLayout::output_names() {
        for name in [format!("{name}.weight"), name.to_string()] {
            source.refuse(&name, "the config says there is no output projection")?;
        }
    }
    Ok(())
}

fn stacked(cfg: &MultiHeadAttentionConfig, naming: Naming, storage: Storage, source: &Source) -> Result<Projections> {
    let h = cfg.num_heads();
    if cfg.out_proj() {
        return source.fail("a stack of heads has no output projection, but the config wants one");
    }
    if cfg.num_kv_heads() != h {
        return source.fail(format!(
            "a stack of heads has keys for each of its {h} heads, but the config has num_kv_heads {}",
            cfg.num_kv_heads()
        ));
    }
    let names = naming.names();
    let shapes = projection_shapes(cfg).map(|(out_dim, in_dim)| (out_dim / h, in_dim));
    let mut heads: [Vec<Linear>; 3] = Default::default();
    for head in 0..h {
        let source = source.pp("heads").pp(head);
        for (i, part) in heads.iter_mut().enumerate() {
            part.push(one(&source, names[i], storage, shapes[i], cfg.qkv_bias()[i])?);
        }
        refuse_out_proj(&source)?;
    }
    refuse_out_proj(source)?;
    if source.has(&format!("heads.{h}.{}.weight", names[0])) || source.has(&format!("heads.{h}.{}", names[0])) {
        return source.fail(format!("the file has more than the {h} heads of the config"));
    }
    Parts::Heads(heads).into_projections(None)
}

/// The rows of several projections of the same input as one.
fn side_by_side(parts: &[Linear]) -> Result<Linear> {
    let weights: Vec<_> = parts.iter().map(Linear::weight).collect();
    let biases: Option<Vec<_>> = parts.iter().map(Linear::bias).collect();
    let bias = biases.map(|biases| Tensor::cat(&biases, 0)).transpose()?;
    Ok(Linear::new(Tensor::cat(&weights, 0)?, bias))
}

fn torch(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<Projections> {
    fits_torch(cfg, source)?;
    let [q, k, v, o] = projection_shapes(cfg);
    let biases = cfg.qkv_bias();
    // PyTorch draws out_proj first, then the packed weight; seeded initialisation has to follow.
    let o = {
        let source = source.pp("out_proj");
        let weight = source.get(o, "weight", LINEAR_WEIGHT)?;
        let bias = if cfg.out_bias() {
            Some(source.get(o.0, "bias", DRAWN_THEN_ZEROED)?)
        } else {
            source.bias("bias", o.0, false, Init::Const(0.0))?
        };
        Linear::new(weight, bias)
    };
    let in_proj_bias = |source: &Source| source.bias("in_proj_bias", q.0 + k.0 + v.0, biases[0], Init::Const(0.0));
    if q.1 == k.1 && q.1 == v.1 {
        let rows = PackedRows::new(cfg, QkvOrder::ByPart, source)?;
        let weight = source.get((rows.len(), q.1), "in_proj_weight", xavier(rows.len(), q.1))?;
        let packed = Linear::new(weight, in_proj_bias(source)?);
        return Parts::Packed(rows, packed).into_projections(Some(o));
    }
    let weights = [
        source.get(q, "q_proj_weight", xavier(q.0, q.1))?,
        source.get(k, "k_proj_weight", xavier(k.0, k.1))?,
        source.get(v, "v_proj_weight", xavier(v.0, v.1))?,
    ];
    let bias = in_proj_bias(source)?;
    let bias = |start: usize, len: usize| bias.as_ref().map(|bias| bias.narrow(0, start, len)).transpose();
    let [wq, wk, wv] = weights;
    let qkv =
        [Linear::new(wq, bias(0, q.0)?), Linear::new(wk, bias(q.0, k.0)?), Linear::new(wv, bias(q.0 + k.0, v.0)?)];
    Ok(Projections::apart(qkv, Some(o)))
}

/// An error if `torch.nn.MultiheadAttention` has no arguments for the config.
pub(super) fn fits_torch(cfg: &MultiHeadAttentionConfig, errors: &Source) -> Result<()> {
    if !cfg.out_proj() {
        return errors.fail("torch.nn.MultiheadAttention has an output projection, but the config has none");
    }
    if cfg.num_kv_heads() != cfg.num_heads() || cfg.value_head_dim() != cfg.head_dim() {
        return errors.fail("torch.nn.MultiheadAttention has as many key heads as query heads, all of one width");
    }
    let embed_dim = cfg.embed_dim();
    if cfg.num_heads() * cfg.head_dim() != embed_dim || cfg.out_dim() != embed_dim {
        return errors.fail(format!("torch.nn.MultiheadAttention has heads and an output of {embed_dim} in all"));
    }
    if cfg.qkv_bias() != [cfg.out_bias(); 3] {
        return errors.fail("torch.nn.MultiheadAttention has all four biases or none, but the config has some");
    }
    Ok(())
}

/// `xavier_uniform_` of a (rows, columns) matrix.
fn xavier(rows: usize, columns: usize) -> Init {
    let bound = 3f64.sqrt() * (2.0 / (rows + columns) as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

fn conv1d(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<Projections> {
    let rows = PackedRows::new(cfg, QkvOrder::ByPart, source)?;
    let init = Init::Randn { mean: 0.0, stdev: 0.02 };
    let attn = source.pp("c_attn");
    let weight = attn.get((cfg.embed_dim(), rows.len()), "weight", init)?.t()?;
    let bias = attn.bias("bias", rows.len(), rows.bias, Init::Const(0.0))?;
    let packed = Linear::new(weight, bias);
    let o = if cfg.out_proj() {
        let (out_dim, in_dim) = projection_shapes(cfg)[3];
        let proj = source.pp("c_proj");
        let weight = proj.get((in_dim, out_dim), "weight", init)?.t()?;
        Some(Linear::new(weight, proj.bias("bias", out_dim, cfg.out_bias(), Init::Const(0.0))?))
    } else {
        refuse_out_proj(source)?;
        None
    };
    Parts::Packed(rows, packed).into_projections(o)
}

fn packed(
    cfg: &MultiHeadAttentionConfig,
    naming: PackedNaming,
    order: QkvOrder,
    source: &Source,
) -> Result<Projections> {
    let rows = PackedRows::new(cfg, order, source)?;
    let [qkv, out] = naming.names();
    let qkv = source.pp(qkv);
    let weight = qkv.get((rows.len(), cfg.embed_dim()), "weight", LINEAR_WEIGHT)?;
    let bias = qkv.bias("bias", rows.len(), rows.bias, linear_bias(cfg.embed_dim()))?;
    let packed = Linear::new(weight, bias);
    let o = if cfg.out_proj() {
        Some(source.linear(out, projection_shapes(cfg)[3], cfg.out_bias())?)
    } else {
        refuse_out_proj(source)?;
        None
    };
    Parts::Packed(rows, packed).into_projections(o)
}
