//! Encoders of images on this crate's attention layer, in one file to copy.
//!
//! Attention is `hf::load_attention`, whatever the architecture. What remains of a model is its patches, its norms and
//! its MLP, and that is what stands here.

use candle_attention::{LayerNorm, MultiHeadAttention, PackedLinear, hf, layer_norm, packed_linear};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder, linear_no_bias, ops};
use serde_json::Value;

use crate::resample::{Filter, Size, resample};

/// The names of a family's parts; a part without a name is one that it does not have.
struct Family {
    prefixes: &'static [&'static str],
    class: &'static str,
    patches: &'static str,
    positions: &'static str,
    /// Whether pictures of other sizes than those of the training have positions between theirs.
    interpolates: bool,
    first_norm: Option<&'static str>,
    blocks: &'static str,
    norms: [&'static str; 2],
    mlp: [&'static str; 2],
    /// Factors on what attention and MLP add.
    scales: Option<[&'static str; 2]>,
    last_norm: &'static str,
    projection: Option<&'static str>,
}

const VIT: Family = Family {
    prefixes: &["vit.", ""],
    class: "embeddings.cls_token",
    patches: "embeddings.patch_embeddings.projection",
    positions: "embeddings.position_embeddings",
    interpolates: false,
    first_norm: None,
    blocks: "encoder.layer",
    norms: ["layernorm_before", "layernorm_after"],
    mlp: ["intermediate.dense", "output.dense"],
    scales: None,
    last_norm: "layernorm",
    projection: None,
};

const DINOV2: Family = Family {
    prefixes: &["dinov2.", ""],
    interpolates: true,
    norms: ["norm1", "norm2"],
    mlp: ["mlp.fc1", "mlp.fc2"],
    scales: Some(["layer_scale1.lambda1", "layer_scale2.lambda1"]),
    ..VIT
};

const CLIP: Family = Family {
    prefixes: &["vision_model.", ""],
    class: "embeddings.class_embedding",
    patches: "embeddings.patch_embedding",
    positions: "embeddings.position_embedding.weight",
    first_norm: Some("pre_layrnorm"),
    blocks: "encoder.layers",
    norms: ["layer_norm1", "layer_norm2"],
    mlp: ["mlp.fc1", "mlp.fc2"],
    last_norm: "post_layernorm",
    projection: Some("visual_projection"),
    ..VIT
};

/// Bicubic without a mean over what a pixel covers, as PyTorch's `interpolate` has it.
const BETWEEN: Filter = Filter { cubic: Some(-0.75), antialias: false };

struct Block {
    norms: [LayerNorm; 2],
    attention: MultiHeadAttention,
    mlp: [PackedLinear; 2],
    scales: Option<[Tensor; 2]>,
}

/// What a picture has become.
pub struct Output {
    /// (E,), or as wide as CLIP's projection.
    pub embedding: Tensor,
    /// What the class token sees of each patch in one layer: (H, rows, columns).
    pub attention: Tensor,
}

/// Gives the output of a layer for an input (1, T, E).
pub type Attend<'a> = dyn FnMut(&MultiHeadAttention, &Tensor) -> Result<Tensor> + 'a;

/// An encoder of images.
pub struct Encoder {
    /// A patch as a row (C · side · side) to its vector.
    patches: PackedLinear,
    side: usize,
    class: Tensor,
    /// (1 + N, E), that of the class token first.
    positions: Tensor,
    interpolates: bool,
    first_norm: Option<LayerNorm>,
    blocks: Vec<Block>,
    activation: Box<dyn Module>,
    last_norm: LayerNorm,
    projection: Option<candle_nn::Linear>,
}

impl Encoder {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block.
    ///
    /// # Errors
    /// For an architecture that is not here, an activation that Candle does not have, and a tensor that is missing.
    pub fn load(json: &Value, vb: VarBuilder, mut loaded: impl FnMut(usize, usize)) -> Result<Self> {
        let config = if json["model_type"] == "clip" { &json["vision_config"] } else { json };
        let family = match json["model_type"].as_str().unwrap_or_default() {
            "vit" => VIT,
            "dinov2" if config["use_swiglu_ffn"] != true => DINOV2,
            "clip" | "clip_vision_model" => CLIP,
            other => bail!("[encoder] model_type is {other:?}, expected one of clip, clip_vision_model, dinov2, vit"),
        };
        let of = |prefix: &str| if prefix.is_empty() { vb.clone() } else { vb.pp(prefix.trim_end_matches('.')) };
        let found = family.prefixes.iter().find(|prefix| of(prefix).contains_tensor(family.class));
        let Some(prefix) = found else {
            bail!("[encoder] no {} in the checkpoint, below {:?}", family.class, family.prefixes)
        };
        let inner = of(prefix);
        let number = |name: &str, default: usize| config[name].as_u64().map_or(default, |number| number as usize);
        let (e, side, layers) = (number("hidden_size", 768), number("patch_size", 16), number("num_hidden_layers", 12));
        let mlp = match family.scales {
            Some(_) => e * number("mlp_ratio", 4),
            None => number("intermediate_size", 3072),
        };
        let default = if family.interpolates { 1e-6 } else { family.first_norm.map_or(1e-12, |_| 1e-5) };
        let eps = config["layer_norm_eps"].as_f64().unwrap_or(default);
        let norm = |name: &str, vb: &VarBuilder| layer_norm(e, eps, vb.pp(name));
        let patches = inner.pp(family.patches);
        let weight = patches.get((e, 3, side, side), "weight")?.flatten_from(1)?;
        let bias = if patches.contains_tensor("bias") { Some(patches.get(e, "bias")?) } else { None };
        let rows = (number("image_size", 224) / side).pow(2) + 1;
        let positions = match family.first_norm {
            Some(_) => inner.get((rows, e), family.positions)?,
            None => inner.get((1, rows, e), family.positions)?.squeeze(0)?,
        };
        let block = |layer: usize| {
            loaded(layer, layers);
            let at = inner.pp(family.blocks).pp(layer);
            let scales = family
                .scales
                .map(|[first, second]| Ok::<_, candle_core::Error>([at.get(e, first)?, at.get(e, second)?]));
            Ok(Block {
                norms: [norm(family.norms[0], &at)?, norm(family.norms[1], &at)?],
                attention: hf::load_attention(config, layer, vb.clone())?,
                mlp: [packed_linear(e, mlp, at.pp(family.mlp[0]))?, packed_linear(mlp, e, at.pp(family.mlp[1]))?],
                scales: scales.transpose()?,
            })
        };
        let projection = family.projection.filter(|name| vb.contains_tensor(&format!("{name}.weight")));
        let width = json["projection_dim"].as_u64().unwrap_or(512) as usize;
        Ok(Self {
            patches: PackedLinear::new(&weight, bias.as_ref())?,
            side,
            class: inner.get_unchecked(family.class)?.reshape((1, e))?,
            positions,
            interpolates: family.interpolates,
            first_norm: family.first_norm.map(|name| norm(name, &inner)).transpose()?,
            blocks: (0..layers).map(block).collect::<Result<_>>()?,
            activation: activation(config["hidden_act"].as_str().unwrap_or(match family.first_norm {
                Some(_) => "quick_gelu",
                None => "gelu",
            }))?,
            last_norm: norm(family.last_norm, &inner)?,
            projection: projection.map(|name| linear_no_bias(e, width, vb.pp(name))).transpose()?,
        })
    }

    /// The number of blocks, and the width E.
    pub fn size(&self) -> Result<(usize, usize)> {
        Ok((self.blocks.len(), self.class.dim(1)?))
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

    /// The number of heads of a layer.
    pub fn heads(&self) -> usize {
        self.blocks.first().map_or(0, |block| block.attention.config().num_heads())
    }

    /// Pixels (3, rows, columns) to the picture's vector and the attention of one layer. `attend`, if there is one,
    /// gives the output of each layer for an input.
    ///
    /// # Errors
    /// For a picture whose size the model has no positions for.
    pub fn forward(&self, pixels: &Tensor, layer: usize, mut attend: Option<&mut Attend>) -> Result<Output> {
        let (side, grid) = (self.side, self.grid(pixels)?);
        let pixels = pixels.to_dtype(self.class.dtype())?.to_device(self.class.device())?;
        let cut = pixels.reshape(&[3, grid.rows, side, grid.columns, side][..])?.permute((1, 3, 0, 2, 4))?;
        let patches = self.patches.forward(&cut.reshape((grid.rows * grid.columns, 3 * side * side))?)?;
        let mut xs = (Tensor::cat(&[&self.class, &patches], 0)? + self.positions(grid)?)?.unsqueeze(0)?;
        if let Some(norm) = &self.first_norm {
            xs = norm.forward(&xs)?;
        }
        let mut attention = None;
        for (i, block) in self.blocks.iter().enumerate() {
            let input = block.norms[0].forward(&xs)?;
            let mut own = None;
            if i == layer {
                let attended = block.attention.forward_with_weights(&input)?;
                let weights = attended.weights.narrow(2, 0, 1)?.narrow(3, 1, grid.rows * grid.columns)?;
                let planes = (weights.dim(1)?, grid.rows, grid.columns);
                attention = Some(weights.reshape(planes)?.to_dtype(DType::F32)?);
                own = Some(attended.output);
            }
            let ys = match (&mut attend, own) {
                (Some(attend), _) => attend(&block.attention, &input)?,
                (None, Some(output)) => output,
                (None, None) => block.attention.forward(&input)?,
            };
            xs = block.add(&xs, ys, 0)?;
            let hidden = self.activation.forward(&block.mlp[0].forward(&block.norms[1].forward(&xs)?)?)?;
            xs = block.add(&xs, block.mlp[1].forward(&hidden)?, 1)?;
        }
        let Some(attention) = attention else {
            bail!("[encoder] there is no layer {}, the model has {}", layer + 1, self.blocks.len())
        };
        let class = self.last_norm.forward(&xs.narrow(1, 0, 1)?)?.squeeze(0)?;
        let embedding = self.projection.as_ref().map_or(Ok(class.clone()), |projection| projection.forward(&class))?;
        Ok(Output { embedding: embedding.squeeze(0)?.to_dtype(DType::F32)?, attention })
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
        let from = Size { rows: side, columns: side };
        let planes: Vec<Vec<f32>> = planes.to_vec2()?;
        let between: Vec<f32> = planes.iter().flat_map(|plane| resample(plane, from, grid, BETWEEN)).collect();
        let between = Tensor::from_vec(between, (e, grid.rows * grid.columns), &Device::Cpu)?.t()?;
        let between = between.to_dtype(self.positions.dtype())?.to_device(self.positions.device())?;
        Tensor::cat(&[&self.positions.narrow(0, 0, 1)?, &between], 0)
    }
}

impl Block {
    /// A residual, and what was added times its factors.
    fn add(&self, xs: &Tensor, added: Tensor, which: usize) -> Result<Tensor> {
        match &self.scales {
            Some(scales) => xs + added.broadcast_mul(&scales[which])?,
            None => xs + added,
        }
    }
}

fn activation(name: &str) -> Result<Box<dyn Module>> {
    if name == "quick_gelu" {
        return Ok(Box::new(|xs: &Tensor| xs * ops::sigmoid(&(xs * 1.702)?)?));
    }
    match serde_json::from_value::<Activation>(name.into()) {
        Ok(activation) => Ok(Box::new(activation)),
        Err(_) => bail!("[encoder] the activation {name:?} is not one of Candle's"),
    }
}
