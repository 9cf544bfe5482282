//! The weights of Jina v3 by the names of transformers' modules, which adapters of that model have. Its files have the
//! published names, where queries, keys and values are one weight.

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use crate::common::EXAMPLE;

/// A module by its name in transformers, and by its published name.
struct ModuleNames {
    transformers: &'static str,
    published: &'static str,
    /// The part of the rows of the published weight, of three; `None` for all rows.
    third: Option<usize>,
}

const MODULES: [ModuleNames; 7] = [
    ModuleNames { transformers: "embeddings.LayerNorm", published: "emb_ln", third: None },
    ModuleNames { transformers: "self_attn.q_proj", published: "mixer.Wqkv", third: Some(0) },
    ModuleNames { transformers: "self_attn.k_proj", published: "mixer.Wqkv", third: Some(1) },
    ModuleNames { transformers: "self_attn.v_proj", published: "mixer.Wqkv", third: Some(2) },
    ModuleNames { transformers: "self_attn.o_proj", published: "mixer.out_proj", third: None },
    ModuleNames { transformers: "post_attention_layernorm", published: "norm1", third: None },
    ModuleNames { transformers: "post_mlp_layernorm", published: "norm2", third: None },
];

/// The prefix of blocks, which transformers does not have.
const BLOCKS: &str = "encoder.";

/// A tensor of the file that has a parameter.
struct Stored {
    name: String,
    third: Option<usize>,
}

/// A builder by the names of transformers' modules.
pub struct ByTransformersNames {
    /// A builder at the root of a file with the published names.
    pub vb: VarBuilder<'static>,
}

impl ByTransformersNames {
    /// Returns whether a file has the published names.
    pub fn fits(vb: &VarBuilder) -> bool {
        vb.contains_tensor("encoder.layers.0.mixer.Wqkv.weight")
    }

    /// Returns the tensor of the file that has a parameter; `None` for a published name.
    fn stored(&self, name: &str) -> Option<Stored> {
        if name.starts_with(BLOCKS) || name.starts_with("emb_ln.") {
            return None;
        }
        let mut stored = Stored { name: name.to_string(), third: None };
        for names in &MODULES {
            if name.contains(&format!("{}.", names.transformers)) {
                stored = Stored { name: name.replace(names.transformers, names.published), third: names.third };
            }
        }
        if name.starts_with("layers.") {
            stored.name = format!("{BLOCKS}{}", stored.name);
        }
        Some(stored).filter(|found| self.vb.contains_tensor(&found.name))
    }
}

/// Returns the error about a tensor that is missing.
pub fn missing(name: &str) -> Error {
    Error::CannotFindTensor { path: name.to_string() }.bt()
}

/// Returns a tensor, which errors describe as `what`.
///
/// # Errors
/// If it has another shape.
pub fn of_shape(own: Tensor, shape: Shape, what: &str) -> Result<Tensor> {
    if own.shape() != &shape {
        let msg = format!("[{EXAMPLE}] {what}");
        return Err(Error::UnexpectedShape { msg, expected: shape, got: own.shape().clone() }.bt());
    }
    Ok(own)
}

impl SimpleBackend for ByTransformersNames {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        of_shape(self.get_unchecked(name, dtype, device)?, shape, name)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.stored(name).ok_or_else(|| missing(name))?;
        let whole = self.vb.get_unchecked_dtype(&stored.name, dtype)?.to_device(device)?;
        let Some(third) = stored.third else { return Ok(whole) };
        let rows = whole.dim(0)?;
        if !rows.is_multiple_of(3) {
            bail!("[{EXAMPLE}] {} has {rows} rows, expected a multiple of 3", stored.name)
        }
        whole.narrow(0, third * rows / 3, rows / 3)?.contiguous()
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.stored(name).is_some()
    }
}
