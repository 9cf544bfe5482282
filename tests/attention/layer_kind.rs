//! The two kinds of layers, behind one trait, and how tests build and call them.

use candle_attention::{
    AttentionInput, AttentionStatistics, ContentPositions, LayerOutput, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, MultiHeadLatentAttention, MultiHeadLatentAttentionConfig as LatentConfig,
    RelativeBias, RelativeEmbeddings, StatisticsOptions,
};
use candle_core::{DType, Device, ModuleT, Result, Tensor};
use candle_nn::VarBuilder;

use crate::array::Random;
use crate::by_hand::{self, Input, Output, Parameters, drawn, tensors};
use crate::oracle::Mask;

/// An output with statistics.
pub type Observed = (Tensor, AttentionStatistics);

/// The functions that both kinds of layers have.
pub trait Layer: ModuleT {
    fn run(&self, input: AttentionInput) -> Result<Tensor>;

    fn run_with_weights(&self, input: AttentionInput) -> Result<LayerOutput>;

    fn run_with_statistics(&self, input: AttentionInput, wanted: &StatisticsOptions) -> Result<Observed>;

    fn frozen(&self) -> Result<Box<dyn Layer>>;

    fn as_multi_head(&self) -> Option<&MultiHeadAttention>;
}

macro_rules! impl_layer {
    ($layer:ty, $as_multi_head:expr) => {
        impl Layer for $layer {
            fn run(&self, input: AttentionInput) -> Result<Tensor> {
                self.forward_with(input)
            }

            fn run_with_weights(&self, input: AttentionInput) -> Result<LayerOutput> {
                self.forward_with_weights(input)
            }

            fn run_with_statistics(&self, input: AttentionInput, wanted: &StatisticsOptions) -> Result<Observed> {
                self.forward_with_statistics(input, wanted)
            }

            fn frozen(&self) -> Result<Box<dyn Layer>> {
                Ok(Box::new(self.freeze()?))
            }

            fn as_multi_head(&self) -> Option<&MultiHeadAttention> {
                $as_multi_head(self)
            }
        }
    };
}

impl_layer!(MultiHeadAttention, Some);
impl_layer!(MultiHeadLatentAttention, |_| None);

#[derive(Debug, Clone)]
#[allow(clippy::large_enum_variant, reason = "there are few of them")]
pub enum LayerKind {
    MultiHead(Config),
    Latent(LatentConfig),
}

impl LayerKind {
    pub fn layer(&self, vb: VarBuilder) -> Result<Box<dyn Layer>> {
        Ok(match self {
            Self::Latent(cfg) => Box::new(MultiHeadLatentAttention::new(cfg, vb)?),
            Self::MultiHead(cfg) => Box::new(multi_head_layer(cfg, vb)?),
        })
    }

    /// Draws random numbers for every parameter of a layer.
    pub fn parameters(&self, seed: u64) -> Parameters {
        by_hand::parameters_of(|vb| self.layer(vb), seed)
    }

    /// Builds the layer over plain tensors.
    pub fn of_parameters(&self, parameters: &Parameters, dtype: DType, device: &Device) -> Result<Box<dyn Layer>> {
        self.of_leaves(parameters, dtype, device, &mut |_, tensor| Ok(tensor))
    }

    /// Builds the layer over the tensors that `leaf` returns for each parameter, variables for example.
    pub fn of_leaves(
        &self,
        parameters: &Parameters,
        dtype: DType,
        device: &Device,
        leaf: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<Box<dyn Layer>> {
        let tensors = tensors(parameters, dtype, device)?.into_iter();
        let leaves = tensors.map(|(name, tensor)| Ok((name.clone(), leaf(&name, tensor)?))).collect::<Result<_>>()?;
        self.layer(VarBuilder::from_tensors(leaves, dtype, device))
    }

    pub fn by_hand(&self, parameters: &Parameters, input: &Input) -> Output {
        match self {
            Self::MultiHead(cfg) => by_hand::forward(cfg, parameters, input),
            Self::Latent(cfg) => by_hand::forward_latent(cfg, parameters, input),
        }
    }

    /// Returns whether plain loops compute this layer.
    pub fn has_loops(&self) -> bool {
        match self {
            Self::MultiHead(cfg) => cfg.relative_bias().is_none() && cfg.content_positions().is_none(),
            Self::Latent(_) => true,
        }
    }

    /// Returns the number of tokens of a grid or a window.
    pub fn tokens(&self) -> Option<usize> {
        let Self::MultiHead(cfg) = self else { return None };
        match cfg.content_positions()? {
            ContentPositions::Grid { height, width }
            | ContentPositions::Window { height, width }
            | ContentPositions::CosineWindow { height, width, .. } => Some(height * width),
            _ => None,
        }
    }

    pub fn num_heads(&self) -> usize {
        match self {
            Self::MultiHead(cfg) => cfg.num_heads(),
            Self::Latent(cfg) => cfg.num_heads(),
        }
    }

    /// Returns the widths of queries, keys, values and outputs.
    pub fn widths(&self) -> [usize; 4] {
        match self {
            Self::MultiHead(cfg) => [cfg.embed_dim(), cfg.kdim(), cfg.vdim(), cfg.out_dim()],
            Self::Latent(cfg) => [cfg.embed_dim(); 4],
        }
    }

    /// Returns the number of keys that the layer appends, to which every query attends.
    pub fn more_keys(&self) -> usize {
        match self {
            Self::MultiHead(cfg) => usize::from(cfg.bias_kv()) + usize::from(cfg.add_zero_attn()) + cfg.num_mem_kv(),
            Self::Latent(_) => 0,
        }
    }

    /// Returns whether a call with these numbers of queries and keys is self-attention.
    pub fn is_self(&self, t_q: usize, t_kv: usize) -> bool {
        let [width, of_keys, of_values, _] = self.widths();
        t_q == t_kv && [of_keys, of_values] == [width; 2]
    }

    /// Draws self-attention where keys and values have the queries' width and length, and cross-attention elsewhere:
    /// with one tensor for keys and values if there are more keys than queries.
    pub fn input(&self, [b, t_q, t_kv]: [usize; 3], mask: Vec<Mask>) -> Input {
        let mut random = Random::new(17);
        let [width, of_keys, of_values, _] = self.widths();
        let queries = drawn(&[b, t_q, width], &mut random);
        if self.is_self(t_q, t_kv) {
            return Input { keys: queries.clone(), values: queries.clone(), queries, mask };
        }
        let keys = drawn(&[b, t_kv, of_keys], &mut random);
        let values =
            if t_kv > t_q && of_keys == of_values { keys.clone() } else { drawn(&[b, t_kv, of_values], &mut random) };
        Input { queries, keys, values, mask }
    }
}

/// Builds a layer with its relative bias or relative embeddings.
pub fn multi_head_layer(cfg: &Config, vb: VarBuilder) -> Result<MultiHeadAttention> {
    let layer = MultiHeadAttention::new(cfg, vb.clone())?;
    match (cfg.relative_bias(), cfg.content_positions()) {
        (Some(buckets), _) => layer.with_relative_bias(RelativeBias::new(buckets, cfg.num_heads(), vb)?),
        (_, Some(ContentPositions::Disentangled(positions))) => {
            layer.with_relative_embeddings(RelativeEmbeddings::new(positions, cfg.embed_dim(), vb)?)
        }
        _ => Ok(layer),
    }
}
