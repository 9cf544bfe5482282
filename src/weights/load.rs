//! From any layout to the rows of four projections, of a whole layer or of one process's heads.

use candle_core::{Error, Result};
use candle_nn::var_builder::ShardedVarBuilder;
use candle_nn::{Init, Linear};

use super::layout::{Form, Kind, QkvOrder, WeightLayout};
use super::rows::{PackedQkv, ProjectionRows};
use super::source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, Part, Source, linear_bias};
use crate::MultiHeadAttentionConfig;
use crate::shard::HeadShard;

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
    match layout.form() {
        Form::Separate(names, kind) => separate(cfg, names, kind, [None; 4], source),
        Form::Stacked(names, kind) => stacked(cfg, names, kind, source),
        Form::Packed([qkv, out], kind, order) => {
            let rows = PackedQkv::new(cfg, order, source)?;
            let shape = (rows.len(), cfg.embed_dim());
            let packed = Projection { name: qkv, kind, shape, bias: rows.bias, part: None }.load(source)?;
            let shape = projection_shapes(cfg)[3];
            let out = Projection { name: out, kind, shape, bias: cfg.out_bias(), part: None };
            Ok(LoadedProjections { qkv: rows.split(&packed), o: output(cfg, source, &out)? })
        }
        Form::Torch => torch(cfg, source),
    }
}

/// The part of each projection that is one process's, of a config of the whole layer.
///
/// # Errors
/// As [`load_projections`].
pub(crate) fn load_shard(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    shard: HeadShard,
    vb: &ShardedVarBuilder<'static>,
) -> Result<LoadedProjections> {
    let source = Source::sharded("multi_head_attention", layout, vb);
    let (queries, keys) = (shard.query_share(), shard.key_share(cfg.num_kv_heads()));
    let rows = [queries, keys, keys].map(|share| Part { dim: 0, share });
    let columns = Part { dim: 1, share: queries };
    let mut own = match layout.form() {
        Form::Separate(names, kind) => {
            let parts = [Some(rows[0]), Some(rows[1]), Some(rows[2]), Some(columns)];
            separate(cfg, names, kind, parts, &source)?
        }
        _ => {
            let LoadedProjections { qkv: [q, k, v], o } = load_projections(cfg, layout, &source)?;
            let own = |whole: ProjectionRows, part: Part| Ok::<_, Error>(part.of(&whole.to_linear()?)?.into());
            let qkv = [own(q, rows[0])?, own(k, rows[1])?, own(v, rows[2])?];
            LoadedProjections { qkv, o: o.map(|o| columns.of(&o)).transpose()? }
        }
    };
    // Each process's output is added to the others': one of them adds the bias.
    if let Some(o) = own.o.as_mut().filter(|_| shard.rank() > 0)
        && let Some(bias) = o.bias()
    {
        *o = Linear::new(o.weight().clone(), Some(bias.zeros_like()?));
    }
    Ok(own)
}

/// One projection of a file.
struct Projection<'a> {
    name: &'a str,
    kind: Kind,
    /// (out, in).
    shape: (usize, usize),
    bias: bool,
    /// What is wanted of it, if not the whole.
    part: Option<Part>,
}

impl Projection<'_> {
    fn load(&self, source: &Source) -> Result<Linear> {
        let (out_dim, in_dim) = self.shape;
        let (weight_init, bias_init) = match self.kind {
            Kind::Linear => (LINEAR_WEIGHT, linear_bias(in_dim)),
            Kind::Conv1d => (Init::Randn { mean: 0.0, stdev: 0.02 }, Init::Const(0.0)),
            Kind::Raw(_) => (Init::Uniform { lo: 0.0, up: 1.0 }, Init::Const(0.0)),
        };
        let name = self.kind.weight(self.name);
        let weight = if self.kind.is_transposed() {
            source.get_part((in_dim, out_dim), &name, weight_init, self.part.map(Part::transposed))?.t()?
        } else {
            source.get_part((out_dim, in_dim), &name, weight_init, self.part)?
        };
        if let Kind::Raw(_) = self.kind {
            if self.bias {
                let name = self.name;
                return source.fail(format!("the config wants a bias on {name}, which plain parameters do not have"));
            }
            return Ok(Linear::new(weight, None));
        }
        let bias = source.bias(&format!("{}.bias", self.name), out_dim, self.bias, bias_init)?;
        let bias = match self.part {
            Some(part) => bias.map(|bias| part.of_bias(&bias)).transpose()?,
            None => bias,
        };
        Ok(Linear::new(weight, bias))
    }
}

/// `parts` is what is wanted of query, key, value and output, if not the whole.
fn separate(
    cfg: &MultiHeadAttentionConfig,
    names: [&str; 4],
    kind: Kind,
    parts: [Option<Part>; 4],
    source: &Source,
) -> Result<LoadedProjections> {
    let shapes = projection_shapes(cfg);
    let [q_bias, k_bias, v_bias] = cfg.qkv_bias();
    let projection = |i: usize, bias: bool| Projection { name: names[i], kind, shape: shapes[i], bias, part: parts[i] };
    let load = |i, bias| Ok::<_, Error>(projection(i, bias).load(source)?.into());
    let qkv = [load(0, q_bias)?, load(1, k_bias)?, load(2, v_bias)?];
    Ok(LoadedProjections { qkv, o: output(cfg, source, &projection(3, cfg.out_bias()))? })
}

/// The output projection, if the config wants one.
fn output(cfg: &MultiHeadAttentionConfig, source: &Source, out: &Projection) -> Result<Option<Linear>> {
    if cfg.out_proj() {
        return out.load(source).map(Some);
    }
    refuse_out_proj(source)?;
    Ok(None)
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

fn stacked(cfg: &MultiHeadAttentionConfig, names: [&str; 4], kind: Kind, source: &Source) -> Result<LoadedProjections> {
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
    let shapes = projection_shapes(cfg).map(|(out_dim, in_dim)| (out_dim / h, in_dim));
    let mut heads: [Vec<Linear>; 3] = Default::default();
    for head in 0..h {
        let source = source.pp("heads").pp(head);
        for (i, part) in heads.iter_mut().enumerate() {
            let (name, shape, bias) = (names[i], shapes[i], cfg.qkv_bias()[i]);
            part.push(Projection { name, kind, shape, bias, part: None }.load(&source)?);
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
