//! The layers of heads and of latents: their configs, their inputs, and what a call has beside its tokens.

use candle_attention::{MultiHeadLatentAttention as Latent, MultiHeadLatentAttentionConfig as LatentConfig};
use candle_core::ModuleT;
use serde::Deserialize;

use crate::cache::{Edit, Held, Memory};
use crate::rope::Rotary;
use crate::words::{Mask, Of, Packed, Tensors, backend, builder, dtype, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("config", |_, json| read::<Config>(json)?.validate().map(accepted)),
    ("config in JSON", |line, _| serde_json::from_str::<Config>(line).map(accepted).map_err(Error::wrap)),
    ("layer", run::<LayerCall>),
    ("layer calls", |line, _| named(CALLS, line)),
];

pub fn read<T: DeserializeOwned>(json: &Value) -> Result<T> {
    serde_json::from_value(json.clone()).map(|Of(read)| read).map_err(Error::wrap)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerCall {
    #[serde(default)]
    latent: bool,
    config: Value,
    /// Of the weights, which are those of a seed unless said.
    dtype: Option<String>,
    weights: Option<Value>,
    relative_bias: Option<Bias>,
    vectors: Option<Of<DisentangledConfig>>,
    rotary: Option<Rotary>,
    pub xs: Tensors,
    keys: Option<Tensors>,
    values: Option<Tensors>,
    positions: Option<Tensors>,
    key_positions: Option<Tensors>,
    axis_positions: Option<Tensors>,
    residual: Option<Tensors>,
    mask: Option<Mask>,
    valid_lens: Option<Vec<usize>>,
    starts: Option<Vec<usize>>,
    packed: Option<Packed>,
    memory: Option<Memory>,
    shared: Option<Held>,
    cache: Option<Held>,
    /// What is done to the cache in the place of a call.
    edit: Option<Edit>,
    backend: Option<String>,
    #[serde(default)]
    train: bool,
    /// Whether the first query of each head stands in the place of attention.
    #[serde(default)]
    function: bool,
    entry: Option<String>,
}

/// A relative bias of these heads.
#[derive(Deserialize)]
struct Bias {
    config: Of<RelativeBiasConfig>,
    num_heads: usize,
    dtype: Option<String>,
}

fn first(q: &Tensor, _: &Tensor, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<Tensor> {
    q.narrow(2, 0, 1)
}

impl LayerCall {
    pub fn config<T: DeserializeOwned>(&self) -> Result<T> {
        read(&self.config)
    }

    pub fn dtype(&self) -> DType {
        dtype(&self.dtype)
    }

    fn layer(&self, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let mut layer = MultiHeadAttention::new(&self.config()?, vb)?;
        if let Some(Bias { config: Of(config), num_heads, dtype: name }) = &self.relative_bias {
            let bias = RelativeBias::new(config, *num_heads, VarBuilder::zeros(dtype(name), &CPU))?;
            layer = layer.with_relative_bias(bias)?;
        }
        if let Some(Of(config)) = &self.vectors {
            layer = layer.with_relative_embeddings(RelativeEmbeddings::new(config, 8, any_weights())?)?;
        }
        match &self.rotary {
            Some(rotary) => layer.with_rotary(rotary.build()?),
            None => Ok(layer),
        }
    }

    /// The text of a plan, or `accepted` and what the call gives.
    pub fn run(&self, xs: &Tensor, cache: Option<&mut AttentionCache>) -> Result<(String, Tensor)> {
        let mask = self.mask.as_ref().map(Mask::build).transpose()?;
        let packed = self.packed.as_ref().map(Packed::build).transpose()?;
        let memory = self.memory.as_ref().map(Memory::project).transpose()?;
        let shared = self.shared.as_ref().map(|shared| shared.fill(None)).transpose()?;
        let key_value = self.keys.as_deref().zip(self.values.as_deref());
        let input = AttentionInput::new(xs);
        let input = with(input, self.positions.as_deref(), AttentionInput::with_positions);
        let input = with(input, self.key_positions.as_deref(), AttentionInput::with_key_positions);
        let input = with(input, self.axis_positions.as_deref(), AttentionInput::with_axis_positions);
        let input = with(input, self.residual.as_deref(), AttentionInput::with_residual);
        let input = with(input, mask.as_ref(), AttentionInput::with_mask);
        let input = with(input, self.valid_lens.as_deref(), AttentionInput::with_valid_lens);
        let input = with(input, self.starts.as_deref(), AttentionInput::with_starts);
        let input = with(input, packed.as_ref(), AttentionInput::with_packed);
        let input = with(input, memory.as_ref(), AttentionInput::with_memory);
        let input = with(input, key_value, |input, (keys, values)| input.with_key_value(keys, values));
        let input = with(input, cache, AttentionInput::with_cache);
        let input = with(input, shared.as_ref(), AttentionInput::with_shared_cache);
        let input = input.with_backend(backend(&self.backend)).with_train(self.train);
        let input = if self.function { input.with_function(&first) } else { input };
        let vb = builder(self.weights.as_ref().unwrap_or(&"seed".into()), self.dtype())?;
        let entry = self.entry.as_deref();
        let ys = if self.latent {
            let mut layer = Latent::new(&self.config::<LatentConfig>()?, vb)?;
            if let Some(rotary) = &self.rotary {
                layer = layer.with_rotary(rotary.build()?)?;
            }
            match entry {
                Some("plan") => return Ok((layer.plan(&input)?.to_string(), xs.clone())),
                _ => layer.forward_with(input)?,
            }
        } else {
            let layer = self.layer(vb)?;
            match entry {
                Some("plan") => return Ok((layer.plan(&input)?.to_string(), xs.clone())),
                Some("weights") => layer.forward_with_weights(input)?.weights,
                Some("training") => layer.forward_t(xs, true)?,
                Some("projections") => layer.projections()?.0.weight().clone(),
                _ => layer.forward_with(input)?,
            }
        };
        Ok((ACCEPTED.into(), ys))
    }
}

impl Call for LayerCall {
    fn call(self) -> Result<String> {
        let call = |cache: &mut AttentionCache| match &self.edit {
            Some(edit) => edit.apply(cache).map(accepted),
            None => self.run(&self.xs, Some(cache)).map(|(text, _)| text),
        };
        match &self.cache {
            Some(held) => held.check(call),
            None => self.run(&self.xs, None).map(|(text, _)| text),
        }
    }
}

const CALLS: &[Named] = calls! {
    "windows of nothing" => Windows::new([4, 6], 0),
    "windows moved by more than a window" => Windows::new([4, 6], 2)?.with_shift(2),
    "an image of another size" => Windows::new([4, 6], 2)?.partition(&zeros((1, 23, 8))),
    "windows of another size" => Windows::new([4, 6], 2)?.join(&zeros((6, 5, 8))),
    "a window of two causal offsets" => {
        let mask = AttentionMask::causal_with_offsets([1, 2]).and(&AttentionMask::causal_with_offsets([1, 3]));
        mask.with_window(2).resolve(2, 3, 5)
    },
    "slopes of too many heads" => alibi_slopes(usize::MAX),
    "a bias of no heads" => RelativeBias::new(&RelativeBiasConfig::new(true), 0, any_weights()),
    "a bias that is not in the file" =>
        RelativeBias::new(&RelativeBiasConfig::new(true).with_num_buckets(8), 4, weights_of(&[])),
    "biases beyond memory" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 3, any_weights())?.forward(1 << 24, 1 << 24, 0),
    "keys beyond counting" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 3, any_weights())?.forward(1, usize::MAX, 0),
};

/// The errors of a config come from the constructors too, in any layout.
#[test]
fn layers_validate_their_config_first() {
    let cfg = Config::new(8, 4).with_num_kv_heads(3);
    let expected = cfg.validate().expect_err("3 does not divide 4").to_string();
    for layout in WeightLayout::all() {
        let error = MultiHeadAttention::load(&cfg, layout, any_weights()).expect_err("no layer");
        assert_eq!(error.to_string().lines().next(), expected.lines().next(), "{layout}");
    }
}
