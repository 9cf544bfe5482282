//! Encoders of images on this crate's attention layer: patches, blocks of attention and MLP, norms.
//!
//! The blocks are in `common/blocks/`; this file adds the patches.

#[path = "../common/blocks/mod.rs"]
mod blocks;

use candle_attention::{PackedLinear, StatisticsOptions};
use candle_core::{Context, DType, Device, Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use crate::resample::{Filter, Size, resample};
use blocks::attention::{Attention, Input};
use blocks::family::{Family, LAYERS, LLAMA, MlpKind, NormKind, Norms, required};
use blocks::weights::Weights;
use blocks::{Blocks, Loader, Norm, optional};

/// The names that architectures have for the model below a head and for its parts. A checkpoint has one of each.
const BASES: &[&str] = &["vit", "dinov2", "vision_model"];
const CLASSES: [&str; 2] = ["embeddings.cls_token", "embeddings.class_embedding"];
const PATCHES: &[&str] = &["embeddings.patch_embeddings.projection", "embeddings.patch_embedding"];
const POSITIONS: [&str; 2] = ["embeddings.position_embeddings", "embeddings.position_embedding.weight"];
const BLOCKS: &[&str] = &["encoder.layer", "encoder.layers"];
const LAST_NORMS: &[&str] = &["layernorm", "post_layernorm"];

const VIT: Family = Family {
    norms: Norms::before(&["layernorm_before"], &["layernorm_after"]),
    norm: NormKind::Layer(1e-12),
    needs_biases: true,
    mlp: MlpKind::Plain,
    activation: "gelu",
    ..LLAMA
};
const DINOV2: Family = Family {
    norms: Norms {
        before_attention: &["norm1"],
        after_attention: &["layer_scale1"],
        before_mlp: &["norm2"],
        after_mlp: &["layer_scale2"],
    },
    norm: NormKind::Layer(1e-6),
    ..VIT
};
const CLIP: Family = Family {
    norms: Norms::before(&["layer_norm1"], &["layer_norm2"]),
    norm: NormKind::Layer(1e-5),
    activation: "quick_gelu",
    ..DINOV2
};

/// Bicubic without antialiasing, as in PyTorch's `interpolate`.
const BETWEEN: Filter = Filter { cubic: Some(-0.75), antialias: false };

/// The output of the encoder.
pub struct Output {
    /// The embedding (E,), or as wide as CLIP's projection.
    pub embedding: Tensor,
    /// The attention weights of the class token to each patch in one layer, on the CPU: (H, rows, columns).
    pub attention: Tensor,
}

/// An image encoder.
pub struct Encoder {
    /// The projection of a patch, a row (C · side · side), to its vector.
    patches: PackedLinear,
    side: usize,
    class: Tensor,
    /// The positions (1 + N, E), the class token's first.
    positions: Tensor,
    /// Whether positions are interpolated for pictures of other sizes than those of the training.
    interpolates: bool,
    first_norm: Option<Norm>,
    pub blocks: Blocks,
    last_norm: Norm,
    projection: Option<PackedLinear>,
}

impl Encoder {
    /// Loads a model from a `config.json` and a builder at the checkpoint's root; `loaded` is called after every block.
    ///
    /// # Errors
    /// If the architecture is not supported, Candle lacks the activation, or a tensor is missing.
    pub fn load(json: &Value, vb: VarBuilder, loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let config = if json["model_type"] == "clip" { &json["vision_config"] } else { json };
        let family = match json["model_type"].as_str().unwrap_or_default() {
            "vit" => VIT,
            "dinov2" if config["use_swiglu_ffn"] != true => DINOV2,
            "clip" | "clip_vision_model" => CLIP,
            other => bail!("[encoder] model_type is {other:?}, expected one of clip, clip_vision_model, dinov2, vit"),
        };
        let weights = Weights::from(vb);
        let inner = weights.below(BASES, PATCHES);
        let tensor =
            |names: [&str; 2]| inner.get_unchecked(if inner.contains_tensor(names[0]) { names[0] } else { names[1] });
        let patches = inner.pp(inner.named(PATCHES)?);
        let weight = patches.get_unchecked("weight")?;
        let width = weight.dim(0)?;
        let side = weight.dim(3)?;
        let mut bias = None;
        if patches.contains_tensor("bias") {
            bias = Some(patches.get(width, "bias")?);
        }
        let mut projection = None;
        if let Some(name) = weights.first(&["visual_projection"]) {
            projection = Some(weights.pp(name).linear(None)?);
        }
        let mut loader = Loader::new("encoder", family, config, weights, width);
        let layers = required(config, LAYERS).unwrap_or(12);
        let blocks = Blocks::load(&mut loader, layers, &inner, BLOCKS, loaded)?;
        Ok(Self {
            patches: PackedLinear::new(&weight.flatten_from(1)?, bias.as_ref())?,
            side,
            class: tensor(CLASSES)?.reshape((1, width))?,
            positions: tensor(POSITIONS)?.reshape(((), width))?,
            interpolates: json["model_type"] == "dinov2",
            first_norm: loader.norm(&inner, &["pre_layrnorm"])?,
            last_norm: loader.norm_at(&inner, inner.named(LAST_NORMS)?)?,
            blocks,
            projection,
        })
    }

    /// Returns the grid of patches of a picture.
    ///
    /// # Errors
    /// If pixels (3, rows, columns) are not a whole number of patches.
    pub fn grid(&self, pixels: &Tensor) -> Result<Size> {
        let side = self.side;
        let (_, height, width) = pixels.dims3()?;
        if !height.is_multiple_of(side) || !width.is_multiple_of(side) {
            bail!("[encoder] a picture of {height} x {width} has no whole patches of {side} x {side}")
        }
        Ok(Size { rows: height / side, columns: width / side })
    }

    /// Computes the picture's embedding and the attention of one layer from pixels (3, rows, columns).
    ///
    /// # Errors
    /// If the model has no positions for the size of the picture.
    pub fn forward(&self, pixels: &Tensor, layer: usize) -> Result<Output> {
        let grid = self.grid(pixels)?;
        let mut weights = None;
        let of_class = StatisticsOptions::default().with_weights_of(0..1, 1..1 + grid.rows * grid.columns);
        let embedding = self.through_blocks(pixels, |i, attention, input| {
            if i != layer {
                return attention.forward(input);
            }
            let (output, statistics) = attention.forward_with_statistics(input, &of_class)?;
            weights = statistics.weights;
            Ok(output)
        })?;
        let weights = weights.with_context(|| format!("[encoder] there is no layer {layer}"))?;
        let attention =
            weights.reshape(((), grid.rows, grid.columns))?.to_dtype(DType::F32)?.to_device(&Device::Cpu)?;
        Ok(Output { embedding, attention })
    }

    /// Computes the picture's embedding from pixels (3, rows, columns). `attend` computes the output of a layer, given
    /// its number and its input.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn through_blocks(
        &self,
        pixels: &Tensor,
        attend: impl FnMut(usize, &Attention, Input) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let side = self.side;
        let grid = self.grid(pixels)?;
        let pixels = pixels.to_dtype(self.class.dtype())?.to_device(self.class.device())?;
        let cut = pixels.reshape(&[3, grid.rows, side, grid.columns, side][..])?.permute((1, 3, 0, 2, 4))?;
        let patches = self.patches.forward(&cut.reshape((grid.rows * grid.columns, 3 * side * side))?)?;
        let xs = (Tensor::cat(&[&self.class, &patches], 0)? + self.positions(grid)?)?.unsqueeze(0)?;
        let xs = self.blocks.forward(optional(&self.first_norm, &xs)?, attend)?;
        let class = self.last_norm.forward(&xs.narrow(1, 0, 1)?)?.squeeze(0)?;
        let embedding = self.projection.as_ref().map_or(Ok(class.clone()), |projection| projection.forward(&class))?;
        embedding.squeeze(0)?.to_dtype(DType::F32)
    }

    /// Returns the positions of the class token and of a grid of patches.
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
