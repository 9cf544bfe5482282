//! Transformer-XL's relative positions (conformers): sines and cosines of distances, multiplied with queries.

use candle_core::{Device, Result, Tensor};

use super::super::{CallContext, KeyValueHeads, ScoreArguments, ScoreTerm};
use super::OP;
use super::call::{projected_keys, wide};
use super::distances::{ContentScores, DistanceVectors, LatestVectors, by_head, descending};
use super::specs::{LayerSpecs, zeros};
use candle_attention_modules::base::{LINEAR_WEIGHT, ParameterList, ParameterSpec, accumulation_dtype, check_memory};

/// The names of a layer's parameters.
struct TransformerXlNames {
    projection: &'static str,
    /// The bias of queries in their product with keys.
    of_content: &'static str,
    /// The bias of queries in their product with distances.
    of_distances: &'static str,
}

/// The names of ESPnet and NeMo, which are the crate's own.
const NAMES: TransformerXlNames =
    TransformerXlNames { projection: "linear_pos.weight", of_content: "pos_bias_u", of_distances: "pos_bias_v" };

/// The weights of linear layers.
pub(super) const LINEAR_WEIGHTS: &[&str] = &[NAMES.projection];

/// The names of Parakeet in transformers.
const PARAKEET: TransformerXlNames =
    TransformerXlNames { projection: "relative_k_proj.weight", of_content: "bias_u", of_distances: "bias_v" };

/// The term of [`ContentPositions::TransformerXl`](crate::ContentPositions::TransformerXl).
#[derive(Debug)]
pub(super) struct TransformerXl {
    pub parameters: ParameterList,
    pub vectors: LatestVectors,
}

/// Returns the parameters.
pub(super) fn specs(layer: &LayerSpecs) -> Vec<ParameterSpec> {
    let stored = if layer.source.has(PARAKEET.of_content) { PARAKEET } else { NAMES };
    let h = layer.num_heads;
    let d = layer.head_dim;
    let projection = layer.by_head(NAMES.projection, &[h * d, layer.embed_dim], LINEAR_WEIGHT);
    vec![
        projection.stored(stored.projection),
        layer.by_head(NAMES.of_content, &[h, d], zeros()).stored(stored.of_content),
        layer.by_head(NAMES.of_distances, &[h, d], zeros()).stored(stored.of_distances),
    ]
}

impl ScoreTerm for TransformerXl {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        let dtype = projected_keys(kv, call)?.keys.dtype();
        if arguments.q.elem_count() == 0 {
            return Ok(());
        }
        let t = arguments.q.dim(2)?;
        let d = arguments.q.dim(3)?;
        let q = arguments.q.to_dtype(accumulation_dtype(dtype))?;
        let with_bias = |name: &str| q.broadcast_add(&wide(&self.parameters, name)?.unsqueeze(1)?);
        arguments.q = with_bias(NAMES.of_content)?.to_dtype(dtype)?;
        let queries = with_bias(NAMES.of_distances)?;
        let is_random = call.train && self.parameters.has_dropout();
        let vectors = self.vectors.get(t, is_random, || self.compute(t, d, call.train))?;
        arguments.content_scores = Some(ContentScores::new(queries, vectors, &arguments.options));
        Ok(())
    }
}

impl TransformerXl {
    /// Returns the vectors of the distances of `t` tokens, for heads of width `d`.
    fn compute(&self, t: usize, d: usize, train: bool) -> Result<DistanceVectors> {
        let projection = wide(&self.parameters, NAMES.projection)?;
        let waves = sinusoids(t, projection.dim(1)?, projection.device())?.to_dtype(projection.dtype())?;
        let product = waves.matmul(&projection.t()?)?;
        let vectors = self.parameters.add_updates(NAMES.projection, product, &waves, train)?;
        Ok(DistanceVectors { of_queries: Some(by_head(&vectors, d)?), of_keys: None })
    }
}

/// Returns sines and cosines in turns of the distances T - 1 down to -T, (2T, E) for an even E, as in a table of
/// absolute positions (Vaswani et al., <https://arxiv.org/abs/1706.03762>).
fn sinusoids(t: usize, e: usize, device: &Device) -> Result<Tensor> {
    check_memory(OP, format_args!("a wave for each distance of {t} tokens"), &[2 * t, e, size_of::<f32>()])?;
    let frequency = |pair: usize| (-(10_000f64.ln()) * (2 * pair) as f64 / e as f64).exp() as f32;
    let frequencies: Vec<_> = (0..e / 2).map(frequency).collect();
    let angles = descending(t).flat_map(|distance| frequencies.iter().map(move |turn| distance as f32 * turn));
    Tensor::from_vec(angles.flat_map(|angle| [angle.sin(), angle.cos()]).collect(), (2 * t, e), device)
}
