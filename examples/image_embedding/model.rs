//! Encoders of images on this crate's attention layer: patches, blocks of attention and MLP, norms.
//!
//! The blocks are those of `common/blocks/`. What remains of a model is its patches, and that is what stands here.

#[path = "../common/blocks/mod.rs"]
mod blocks;

use candle_attention::{PackedLinear, StatisticsOptions};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder, linear_no_bias};
use serde_json::Value;

use crate::resample::{Filter, Size, resample};
use blocks::attention::{Attention, Input};
use blocks::family::{Family, LLAMA, MlpKind, NormKind};
use blocks::weights::Weights;
use blocks::{Blocks, Loader, Norm, optional};

/// The names of an architecture's parts; a part without a name is one that it does not have.
struct Architecture {
    prefixes: &'static [&'static str],
    class: &'static str,
    patches: &'static str,
    positions: &'static str,
    /// Whether pictures of other sizes than those of the training have positions between theirs.
    interpolates: bool,
    first_norm: Option<&'static str>,
    blocks: &'static str,
    block: Family,
    last_norm: &'static str,
    projection: Option<&'static str>,
}

const VIT: Architecture = Architecture {
    prefixes: &["vit.", ""],
    class: "embeddings.cls_token",
    patches: "embeddings.patch_embeddings.projection",
    positions: "embeddings.position_embeddings",
    interpolates: false,
    first_norm: None,
    blocks: "encoder.layer",
    block: Family {
        norms: [&["layernorm_before"], &[], &["layernorm_after"], &[]],
        norm: NormKind::Layer(1e-12),
        needs_biases: true,
        mlp: MlpKind::Plain(["intermediate.dense", "output.dense"]),
        activation: "gelu",
        ..LLAMA
    },
    last_norm: "layernorm",
    projection: None,
};

const DINOV2: Architecture = Architecture {
    prefixes: &["dinov2.", ""],
    interpolates: true,
    block: Family {
        norms: [&["norm1"], &["layer_scale1"], &["norm2"], &["layer_scale2"]],
        norm: NormKind::Layer(1e-6),
        mlp: MlpKind::Plain(["mlp.fc1", "mlp.fc2"]),
        ..VIT.block
    },
    ..VIT
};

const CLIP: Architecture = Architecture {
    prefixes: &["vision_model.", ""],
    class: "embeddings.class_embedding",
    patches: "embeddings.patch_embedding",
    positions: "embeddings.position_embedding.weight",
    first_norm: Some("pre_layrnorm"),
    blocks: "encoder.layers",
    block: Family {
        norms: [&["layer_norm1"], &[], &["layer_norm2"], &[]],
        norm: NormKind::Layer(1e-5),
        mlp: MlpKind::Plain(["mlp.fc1", "mlp.fc2"]),
        activation: "quick_gelu",
        ..VIT.block
    },
    last_norm: "post_layernorm",
    projection: Some("visual_projection"),
    ..VIT
};

/// Bicubic without a mean over what a pixel covers, as PyTorch's `interpolate` has it.
const BETWEEN: Filter = Filter { cubic: Some(-0.75), antialias: false };

/// What a picture has become.
pub struct Output {
    /// (E,), or as wide as CLIP's projection.
    pub embedding: Tensor,
    /// What the class token sees of each patch in one layer: (H, rows, columns).
    pub attention: Tensor,
}

/// An encoder of images.
pub struct Encoder {
    /// A patch as a row (C · side · side) to its vector.
    patches: PackedLinear,
    side: usize,
    class: Tensor,
    /// (1 + N, E), that of the class token first.
    positions: Tensor,
    interpolates: bool,
    first_norm: Option<Norm>,
    pub blocks: Blocks,
    last_norm: Norm,
    projection: Option<Linear>,
}

impl Encoder {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block.
    ///
    /// # Errors
    /// For an architecture that is not here, an activation that Candle does not have, and a tensor that is missing.
    pub fn load(json: &Value, vb: VarBuilder, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let config = if json["model_type"] == "clip" { &json["vision_config"] } else { json };
        let own = match json["model_type"].as_str().unwrap_or_default() {
            "vit" => VIT,
            "dinov2" if config["use_swiglu_ffn"] != true => DINOV2,
            "clip" | "clip_vision_model" => CLIP,
            other => bail!("[encoder] model_type is {other:?}, expected one of clip, clip_vision_model, dinov2, vit"),
        };
        let weights = Weights::from(vb.clone());
        let mut places = own.prefixes.iter().map(|prefix| weights.pp(prefix.trim_end_matches('.')));
        let Some(inner) = places.find(|inner| inner.contains_tensor(own.class)) else {
            bail!("[encoder] no {} in the checkpoint, below {:?}", own.class, own.prefixes)
        };
        let number = |name: &str, default: usize| config[name].as_u64().map_or(default, |number| number as usize);
        let (e, side) = (number("hidden_size", 768), number("patch_size", 16));
        let mut loader = Loader::new("encoder", own.block, config, weights, e);
        loader.inner_width =
            Some(if own.interpolates { e * number("mlp_ratio", 4) } else { number("intermediate_size", 3072) });
        let blocks = Blocks::load(&mut loader, number("num_hidden_layers", 12), &inner.pp(own.blocks), loaded)?;
        let norm = |name: &str| loader.norm(VarBuilder::pp(&inner, name));
        let patches = inner.pp(own.patches);
        let weight = patches.get((e, 3, side, side), "weight")?.flatten_from(1)?;
        let bias = if patches.contains_tensor("bias") { Some(patches.get(e, "bias")?) } else { None };
        let rows = (number("image_size", 224) / side).pow(2) + 1;
        let positions = match own.first_norm {
            Some(_) => inner.get((rows, e), own.positions)?,
            None => inner.get((1, rows, e), own.positions)?.squeeze(0)?,
        };
        let projection = own.projection.filter(|name| vb.contains_tensor(&format!("{name}.weight")));
        let width = json["projection_dim"].as_u64().unwrap_or(512) as usize;
        Ok(Self {
            patches: PackedLinear::new(&weight, bias.as_ref())?,
            side,
            class: inner.get_unchecked(own.class)?.reshape((1, e))?,
            positions,
            interpolates: own.interpolates,
            first_norm: own.first_norm.map(norm).transpose()?,
            last_norm: norm(own.last_norm)?,
            blocks,
            projection: projection.map(|name| linear_no_bias(e, width, vb.pp(name))).transpose()?,
        })
    }

    /// The number of blocks, and the width E.
    pub fn size(&self) -> Result<(usize, usize)> {
        Ok((self.blocks.attentions().count(), self.class.dim(1)?))
    }

    /// The patches of a picture, whose class token stands before them.
    ///
    /// # Errors
    /// For pixels (3, rows, columns) that are not a whole number of patches.
    pub fn grid(&self, pixels: &Tensor) -> Result<Size> {
        let (side, (_, height, width)) = (self.side, pixels.dims3()?);
        if !height.is_multiple_of(side) || !width.is_multiple_of(side) {
            bail!("[encoder] a picture of {height} x {width} has no whole patches of {side} x {side}")
        }
        Ok(Size { rows: height / side, columns: width / side })
    }

    /// Pixels (3, rows, columns) to the picture's vector and the attention of one layer.
    ///
    /// # Errors
    /// For a picture whose size the model has no positions for.
    pub fn forward(&self, pixels: &Tensor, layer: usize) -> Result<Output> {
        let (grid, mut weights) = (self.grid(pixels)?, None);
        let of_class = StatisticsOptions::default().with_weights_of(0..1, 1..1 + grid.rows * grid.columns);
        let embedding = self.through_blocks(pixels, |i, attention, input| {
            if i != layer {
                return attention.forward(input);
            }
            let (output, statistics) = attention.forward_with_statistics(input, &of_class)?;
            weights = statistics.weights;
            Ok(output)
        })?;
        let Some(weights) = weights else {
            bail!("[encoder] there is no layer {}, the model has {}", layer + 1, self.size()?.0)
        };
        let attention = weights.reshape(((), grid.rows, grid.columns))?.to_dtype(DType::F32)?;
        Ok(Output { embedding, attention })
    }

    /// Pixels (3, rows, columns) to the picture's vector, where `attend` gives the output of a layer, by its number,
    /// for an input.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn through_blocks(
        &self,
        pixels: &Tensor,
        attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (side, grid) = (self.side, self.grid(pixels)?);
        let pixels = pixels.to_dtype(self.class.dtype())?.to_device(self.class.device())?;
        let cut = pixels.reshape(&[3, grid.rows, side, grid.columns, side][..])?.permute((1, 3, 0, 2, 4))?;
        let patches = self.patches.forward(&cut.reshape((grid.rows * grid.columns, 3 * side * side))?)?;
        let xs = (Tensor::cat(&[&self.class, &patches], 0)? + self.positions(grid)?)?.unsqueeze(0)?;
        let xs = self.blocks.forward(optional(&self.first_norm, &xs)?, attend)?;
        let class = self.last_norm.forward(&xs.narrow(1, 0, 1)?)?.squeeze(0)?;
        let embedding = self.projection.as_ref().map_or(Ok(class.clone()), |projection| projection.forward(&class))?;
        embedding.squeeze(0)?.to_dtype(DType::F32)
    }

    /// Those of the class token and of so many patches.
    fn positions(&self, grid: Size) -> Result<Tensor> {
        let (rows, e) = self.positions.dims2()?;
        if rows == 1 + grid.rows * grid.columns && (grid.rows == grid.columns || !self.interpolates) {
            return Ok(self.positions.clone());
        }
        let side = ((rows - 1) as f64).sqrt() as usize;
        if !self.interpolates {
            bail!("[encoder] the picture has {grid} patches, expected {side} x {side}")
        }
        let planes = self.positions.narrow(0, 1, rows - 1)?.t()?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        let between = resample(&planes.reshape((e, side, side))?, grid, BETWEEN)?.flatten_from(1)?.t()?;
        let between = between.to_dtype(self.positions.dtype())?.to_device(self.positions.device())?;
        Tensor::cat(&[&self.positions.narrow(0, 0, 1)?, &between], 0)
    }
}
