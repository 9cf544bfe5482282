//! Relative positions in a window of an image by a small network, with cosine scores (Swin v2).

use candle_core::{Device, Result, Tensor};
use candle_nn::{Init, ops};

use super::super::{CallContext, KeyValueHeads, ScoreArguments, ScoreTerm};
use super::OP;
use super::call::{Image, projected_keys, wide};
use super::specs::LayerSpecs;
use super::window::WindowBias;
use candle_attention_modules::base::{LINEAR_WEIGHT, ParameterList, ParameterSpec, check_memory, linear_bias};
use candle_attention_modules::norm::Norm;

/// The parameter (H, 1, 1).
const LOGIT_SCALE: &str = "logit_scale";
/// The network's parameters.
const FIRST_WEIGHT: &str = "continuous_position_bias_mlp.0.weight";
const FIRST_BIAS: &str = "continuous_position_bias_mlp.0.bias";
const SECOND_WEIGHT: &str = "continuous_position_bias_mlp.2.weight";

/// The weights of linear layers.
pub(super) const LINEAR_WEIGHTS: &[&str] = &[FIRST_WEIGHT, SECOND_WEIGHT];

/// The number of entries between the two layers of the network.
const HIDDEN: usize = 512;

/// The term of [`ContentPositions::CosineWindow`](crate::ContentPositions::CosineWindow).
#[derive(Debug)]
pub(super) struct CosineWindow {
    pub image: Image,
    /// The windows of the training, if they had another size.
    pub trained: Option<Image>,
    pub parameters: ParameterList,
    pub bias: WindowBias,
}

/// Returns the parameters.
pub(super) fn specs(layer: &LayerSpecs) -> Vec<ParameterSpec> {
    let h = layer.num_heads;
    vec![
        layer.by_head(LOGIT_SCALE, &[h, 1, 1], Init::Const(10f64.ln())),
        layer.shared(FIRST_WEIGHT, &[HIDDEN, 2], LINEAR_WEIGHT),
        layer.shared(FIRST_BIAS, &[HIDDEN], linear_bias(2)),
        layer.by_head(SECOND_WEIGHT, &[h, HIDDEN], LINEAR_WEIGHT),
    ]
}

impl ScoreTerm for CosineWindow {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        let kv = projected_keys(kv, call)?;
        self.image.check("window", &arguments.q)?;
        if arguments.q.elem_count() > 0 {
            let is_random = call.train && self.parameters.has_dropout();
            arguments.mask = self.bias.add_to(&arguments.mask, self.image, is_random, || self.entries(call.train))?;
            let cosines = self.cosines(&arguments.q, &kv.keys)?;
            arguments.q = cosines.q;
            kv.keys = cosines.k;
            // Queries are scaled already.
            arguments.options.scale = Some(1.0);
        }
        Ok(())
    }
}

/// Queries and keys whose products are the scores.
struct Cosines {
    q: Tensor,
    k: Tensor,
}

impl CosineWindow {
    /// Returns queries (B, H, T, D) and keys (B, H_kv, T, D), views of (B, T, ..), whose products are the scores.
    fn cosines(&self, q: &Tensor, k: &Tensor) -> Result<Cosines> {
        let (_, h, _, d) = q.dims4()?;
        // Nothing is divided by less than a length of 1e-12.
        let norm = Norm::without_weight(1e-24 / d as f64, d, q.dtype(), q.device())?;
        let factors = wide(&self.parameters, LOGIT_SCALE)?.minimum(100f64.ln())?.exp()?;
        // The length of normalised rows is the root of D.
        let factors = (factors / d as f64)?.reshape((h, 1))?;
        let normalised = norm.forward(&q.transpose(1, 2)?)?.to_dtype(factors.dtype())?;
        let q = normalised.broadcast_mul(&factors)?.to_dtype(q.dtype())?;
        let k = norm.forward(&k.transpose(1, 2)?)?;
        Ok(Cosines { q: q.transpose(1, 2)?, k: k.transpose(1, 2)? })
    }

    /// Returns the network's output for each place of a key from its query, (places, H).
    fn entries(&self, train: bool) -> Result<Tensor> {
        let parameter = |name: &str| wide(&self.parameters, name);
        let weight = parameter(FIRST_WEIGHT)?;
        let bias = parameter(FIRST_BIAS)?;
        let last = parameter(SECOND_WEIGHT)?;
        let Image { rows, columns } = self.image;
        let trained = self.trained.unwrap_or(self.image);
        let places = [2 * rows - 1, 2 * columns - 1];
        let bytes = [places[0], places[1], HIDDEN, weight.dtype().size_in_bytes()];
        check_memory(OP, format_args!("a bias for {places:?} places"), &bytes)?;
        let mut coordinates = Vec::with_capacity(2 * places[0] * places[1]);
        for down in 0..places[0] {
            for across in 0..places[1] {
                coordinates.push(coordinate(down, rows, trained.rows));
                coordinates.push(coordinate(across, columns, trained.columns));
            }
        }
        let coordinates = Tensor::from_vec(coordinates, (places[0] * places[1], 2), &Device::Cpu)?;
        let coordinates = coordinates.to_device(weight.device())?.to_dtype(weight.dtype())?;
        let product = coordinates.matmul(&weight.t()?)?;
        let product = self.parameters.add_updates(FIRST_WEIGHT, product, &coordinates, train)?;
        let hidden = product.broadcast_add(&bias)?.relu()?;
        let entries = self.parameters.add_updates(SECOND_WEIGHT, hidden.matmul(&last.t()?)?, &hidden, train)?;
        ops::sigmoid(&entries)? * 16.0
    }
}

/// Returns the signed logarithm of the distance at place n of an axis, `size` lines of which are a window, `trained` in
/// training.
fn coordinate(n: usize, size: usize, trained: usize) -> f32 {
    let distance = (n + 1) as f64 - size as f64;
    let scaled = 8.0 * distance / (trained.max(2) - 1) as f64;
    (scaled.signum() * (scaled.abs() + 1.0).log2() / 3.0) as f32
}
