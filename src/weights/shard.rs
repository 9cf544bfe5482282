//! One process's rows of the projections, through Candle's sharded builder.

use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Device, Error, Result, Shape, Tensor};
use candle_nn::var_builder::{Shard, ShardedVarBuilder, SimpleBackend};
use candle_nn::{Init, Linear, VarBuilder};

use super::layout::{Orientation, Storage, WeightLayout};
use super::load::{LoadedProjections, load_projections, output, projection_shapes};
use super::rows::ProjectionRows;
use super::source::Source;
use crate::MultiHeadAttentionConfig;
use crate::shard::{HeadShard, Share};

/// Whole tensors through a sharded builder.
struct Whole(ShardedVarBuilder<'static>);

impl SimpleBackend for Whole {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.clone().set_dtype(dtype).set_device(device.clone()).get_with_hints(shape, name, Shard::default())
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        self.0.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

/// The same tensors from an ordinary builder, whole.
pub(crate) fn whole(vb: &ShardedVarBuilder<'static>) -> VarBuilder<'static> {
    let (prefix, dtype, device) = (vb.prefix(), vb.dtype(), vb.device().clone());
    let root = VarBuilder::from_backend(Box::new(Whole(vb.root())), dtype, device);
    if prefix.is_empty() { root } else { root.pp(prefix) }
}

/// The part of each projection that is one process's, of a config of the whole layer.
pub(crate) fn load_shard(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    shard: HeadShard,
    vb: &ShardedVarBuilder<'static>,
) -> Result<LoadedProjections> {
    let (queries, keys) = (shard.query_share(), shard.key_share(cfg.num_kv_heads()));
    let shares = [queries, keys, keys];
    let source = Source::new("multi_head_attention", layout, whole(vb));
    let (qkv, o) = match layout.separate() {
        Some((names, storage)) => {
            let reader = ShardReader { source, vb, storage };
            let (shapes, biases) = (projection_shapes(cfg), cfg.qkv_bias());
            let rows = |i: usize| -> Result<Linear> {
                let weight = reader.weight(names[i], shapes[i], WeightPart { dim: 0, share: shares[i] })?;
                let bias = reader.bias(names[i], shapes[i].0, biases[i])?;
                Ok(Linear::new(weight, bias.map(|bias| shares[i].copy(&bias, 0)).transpose()?))
            };
            let qkv = [rows(0)?, rows(1)?, rows(2)?];
            let o = output(cfg, &reader.source, || {
                let weight = reader.weight(names[3], shapes[3], WeightPart { dim: 1, share: queries })?;
                Ok(Linear::new(weight, reader.bias(names[3], shapes[3].0, cfg.out_bias())?))
            })?;
            (qkv, o)
        }
        None => {
            let LoadedProjections { qkv: [q, k, v], o } = load_projections(cfg, layout, &source)?;
            let rows = |rows: ProjectionRows, i: usize| -> Result<Linear> {
                let linear = rows.to_linear()?;
                let bias = linear.bias().map(|bias| shares[i].copy(bias, 0)).transpose()?;
                Ok(Linear::new(shares[i].copy(linear.weight(), 0)?, bias))
            };
            let columns = |o: Linear| Ok::<_, Error>(Linear::new(queries.copy(o.weight(), 1)?, o.bias().cloned()));
            ([rows(q, 0)?, rows(k, 1)?, rows(v, 2)?], o.map(columns).transpose()?)
        }
    };
    // Each process's output is added to the others': one of them adds the bias.
    let o = o.map(|o| match o.bias() {
        Some(bias) if shard.rank() > 0 => Ok::<_, Error>(Linear::new(o.weight().clone(), Some(bias.zeros_like()?))),
        _ => Ok(o),
    });
    Ok(LoadedProjections { qkv: qkv.map(ProjectionRows::from), o: o.transpose()? })
}

/// A share of dimension 0 (rows) or 1 (columns) of a weight (out, in).
#[derive(Clone, Copy)]
struct WeightPart {
    dim: usize,
    share: Share,
}

/// Reads projections of separate tensors.
struct ShardReader<'a> {
    source: Source<'static>,
    vb: &'a ShardedVarBuilder<'static>,
    storage: Storage,
}

impl ShardReader<'_> {
    fn weight(&self, name: &str, shape: (usize, usize), part: WeightPart) -> Result<Tensor> {
        let (out_dim, in_dim) = shape;
        let (name, shape, transposed) = match self.storage {
            Storage::Linear => (format!("{name}.weight"), (out_dim, in_dim), false),
            Storage::Raw(Orientation::OutIn) => (name.to_string(), (out_dim, in_dim), false),
            Storage::Raw(Orientation::InOut) => (name.to_string(), (in_dim, out_dim), true),
        };
        let dim = if transposed { 1 - part.dim } else { part.dim };
        let Share { index: rank, of: world_size } = part.share;
        let mut expected = [shape.0, shape.1];
        expected[dim] /= world_size;
        let hint = Shard { dim, rank, world_size };
        self.source.refuse_scale(&name)?;
        // Candle indexes the shape in the file, and panics where it has fewer dimensions.
        let read = catch_unwind(AssertUnwindSafe(|| self.vb.get_with_hints(shape, &name, hint)));
        let own = match read {
            Ok(Ok(own)) if own.dims() == expected => own,
            // Reading all of it says what is wrong.
            _ => part.share.copy(&self.source.get(shape, &name, Init::Const(0.0))?, dim)?,
        };
        if transposed { own.t() } else { Ok(own) }
    }

    /// A whole bias.
    fn bias(&self, name: &str, len: usize, wanted: bool) -> Result<Option<Tensor>> {
        match self.storage {
            Storage::Linear => self.source.pp(name).bias("bias", len, wanted, Init::Const(0.0)),
            Storage::Raw(_) if wanted => {
                self.source.fail(format!("the config wants a bias on {name}, which plain parameters do not have"))
            }
            Storage::Raw(_) => Ok(None),
        }
    }
}
