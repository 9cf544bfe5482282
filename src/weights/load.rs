//! From any layout to the rows of four projections.

use candle_core::Result;
use candle_nn::{Init, Linear};

use super::layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use super::rows::{PackedQkv, ProjectionRows};
use super::source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, Source, linear_bias};
use crate::MultiHeadAttentionConfig;

/// The four projections of a layer as linear layers: q (H·D, E), k (H_kv·D, key_size), v (H_kv·D_v, value_size), o
/// (out_dim, H·D_v).
#[derive(Debug, Clone)]
pub(crate) struct Linears {
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Option<Linear>,
}

/// The projections of a layer as a checkpoint has them: query, key and value, and output.
pub(crate) struct LoadedProjections {
    pub qkv: [ProjectionRows; 3],
    pub o: Option<Linear>,
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

/// The projections in any layout.
///
/// # Errors
/// For a config that the layout cannot hold, and for a missing or misshapen tensor.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    source: &Source,
) -> Result<LoadedProjections> {
    match layout {
        WeightLayout::StackedHeads(naming, storage) => stacked(cfg, naming, storage, source),
        WeightLayout::Torch => torch(cfg, source),
        WeightLayout::Conv1d => conv1d(cfg, source),
        WeightLayout::Packed(naming, order) => packed(cfg, naming, order, source),
        _ => separate(cfg, layout, source),
    }
}

fn separate(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, source: &Source) -> Result<LoadedProjections> {
    let Some((names, storage)) = layout.separate() else { return source.fail("the projections are not apart") };
    let shapes = projection_shapes(cfg);
    let biases = cfg.qkv_bias();
    let load = |i: usize, bias: bool| one(source, names[i], storage, shapes[i], bias);
    let qkv = [load(0, biases[0])?.into(), load(1, biases[1])?.into(), load(2, biases[2])?.into()];
    let o = output(cfg, source, || load(3, cfg.out_bias()))?;
    Ok(LoadedProjections { qkv, o })
}

/// The output projection, if the config wants one.
pub(super) fn output(
    cfg: &MultiHeadAttentionConfig,
    source: &Source,
    load: impl FnOnce() -> Result<Linear>,
) -> Result<Option<Linear>> {
    if cfg.out_proj() {
        return load().map(Some);
    }
    refuse_out_proj(source)?;
    Ok(None)
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
fn refuse_out_proj(source: &Source) -> Result<()> {
    for name in WeightLayout::output_names() {
        for name in [format!("{name}.weight"), name.to_string()] {
            source.refuse(&name, "the config says there is no output projection")?;
        }
    }
    Ok(())
}

fn stacked(
    cfg: &MultiHeadAttentionConfig,
    naming: Naming,
    storage: Storage,
    source: &Source,
) -> Result<LoadedProjections> {
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
    Ok(LoadedProjections { qkv: heads.map(ProjectionRows::of_heads), o: None })
}

fn torch(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<LoadedProjections> {
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
        let rows = PackedQkv::new(cfg, QkvOrder::ByPart, source)?;
        let weight = source.get((rows.len(), q.1), "in_proj_weight", xavier(rows.len(), q.1))?;
        let packed = Linear::new(weight, in_proj_bias(source)?);
        return Ok(LoadedProjections { qkv: rows.split(&packed), o: Some(o) });
    }
    let weights = [
        source.get(q, "q_proj_weight", xavier(q.0, q.1))?,
        source.get(k, "k_proj_weight", xavier(k.0, k.1))?,
        source.get(v, "v_proj_weight", xavier(v.0, v.1))?,
    ];
    let bias = in_proj_bias(source)?;
    let bias = |start: usize, len: usize| bias.as_ref().map(|bias| bias.narrow(0, start, len)).transpose();
    let [wq, wk, wv] = weights;
    let qkv = [
        Linear::new(wq, bias(0, q.0)?).into(),
        Linear::new(wk, bias(q.0, k.0)?).into(),
        Linear::new(wv, bias(q.0 + k.0, v.0)?).into(),
    ];
    Ok(LoadedProjections { qkv, o: Some(o) })
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

fn conv1d(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<LoadedProjections> {
    let rows = PackedQkv::new(cfg, QkvOrder::ByPart, source)?;
    let init = Init::Randn { mean: 0.0, stdev: 0.02 };
    let attn = source.pp("c_attn");
    let weight = attn.get((cfg.embed_dim(), rows.len()), "weight", init)?.t()?;
    let bias = attn.bias("bias", rows.len(), rows.bias, Init::Const(0.0))?;
    let packed = Linear::new(weight, bias);
    let o = output(cfg, source, || {
        let (out_dim, in_dim) = projection_shapes(cfg)[3];
        let proj = source.pp("c_proj");
        let weight = proj.get((in_dim, out_dim), "weight", init)?.t()?;
        Ok(Linear::new(weight, proj.bias("bias", out_dim, cfg.out_bias(), Init::Const(0.0))?))
    })?;
    Ok(LoadedProjections { qkv: rows.split(&packed), o })
}

fn packed(
    cfg: &MultiHeadAttentionConfig,
    naming: PackedNaming,
    order: QkvOrder,
    source: &Source,
) -> Result<LoadedProjections> {
    let rows = PackedQkv::new(cfg, order, source)?;
    let [qkv, out] = naming.names();
    let qkv = source.pp(qkv);
    let weight = qkv.get((rows.len(), cfg.embed_dim()), "weight", LINEAR_WEIGHT)?;
    let bias = qkv.bias("bias", rows.len(), rows.bias, linear_bias(cfg.embed_dim()))?;
    let packed = Linear::new(weight, bias);
    let o = output(cfg, source, || source.linear(out, projection_shapes(cfg)[3], cfg.out_bias()))?;
    Ok(LoadedProjections { qkv: rows.split(&packed), o })
}
