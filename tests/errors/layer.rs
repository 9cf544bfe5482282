//! Errors of multi-head and latent attention: their configs, their inputs, and the other inputs of a call.

use candle_attention::MultiHeadLatentAttention as Latent;
use candle_core::ModuleT;

use crate::cache::{Edit, check, filled, memory};
use crate::rope::rotary;
use crate::words::{Fields, mask, packed, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("config", |_, call| call.whole::<Config>()?.validate().map(accepted)),
    ("config in JSON", |line, _| serde_json::from_str::<Config>(line).map(accepted).map_err(Error::wrap)),
    ("latent config in JSON", |line, _| {
        serde_json::from_str::<MultiHeadLatentAttentionConfig>(line).map(accepted).map_err(Error::wrap)
    }),
    ("delta config in JSON", |line, _| {
        serde_json::from_str::<GatedDeltaNetConfig>(line).map(accepted).map_err(Error::wrap)
    }),
    ("layer", layer),
    ("layer calls", |line, _| named(CALLS, line)),
];

fn first(q: &Tensor, _: &Tensor, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<Tensor> {
    q.narrow(2, 0, 1)
}

/// Builds a layer from the config and from the other parts of the call.
fn multi_head(call: &Fields) -> Result<MultiHeadAttention> {
    let mut layer = MultiHeadAttention::new(&call.need("config")?, call.builder("seed")?)?;
    let bias = |of: &Fields| RelativeBias::new(&of.need("config")?, of.need("num_heads")?, of.builder("zeros")?);
    if let Some(bias) = call.part("relative_bias", bias)? {
        layer = layer.with_relative_bias(bias)?;
    }
    if let Some(config) = call.get("vectors")? {
        layer = layer.with_relative_embeddings(RelativeEmbeddings::new(&config, 8, any_weights())?)?;
    }
    call.part("rotary", rotary)?.map_or(Ok(layer.clone()), |rotary| layer.with_rotary(rotary))
}

fn latent(call: &Fields) -> Result<Latent> {
    let layer = Latent::new(&call.need("config")?, call.builder("seed")?)?;
    call.part("rotary", rotary)?.map_or(Ok(layer.clone()), |rotary| layer.with_rotary(rotary))
}

/// Returns the text of a plan, or `accepted` and the results of the call.
pub fn run(call: &Fields, xs: &Tensor, cache: Option<&mut AttentionCache>) -> Result<(String, Tensor)> {
    let [positions, key_positions, axis_positions, residual, keys, values] =
        call.tensors(["positions", "key_positions", "axis_positions", "residual", "keys", "values"])?;
    let mask = call.part("mask", mask)?;
    let packed = call.part("packed", packed)?;
    let tree = call.get::<Vec<Option<usize>>>("tree")?.map(|parents| TokenTree::new(&parents)).transpose()?;
    let new_tokens = call.tensors(["new_token_mask"])?;
    let memory = call.part("memory", memory)?;
    let shared = call.part("shared", |held| filled(held, None))?;
    let [valid_lens, starts] = ["valid_lens", "starts"].map(|name| call.get::<Vec<usize>>(name));
    let valid_lens = valid_lens?;
    let starts = starts?;
    let input = AttentionInput::new(xs);
    let input = input.with_positions(&positions).with_key_positions(&key_positions);
    let input = input.with_axis_positions(&axis_positions).with_residual(&residual).with_mask(&mask);
    let input = input.with_valid_lens(valid_lens.as_deref()).with_starts(starts.as_deref());
    let input = input.with_packed(packed.as_ref()).with_memory(memory.as_ref());
    let input = input.with_tree(tree.as_ref()).with_new_token_mask(new_tokens[0].as_ref());
    let input =
        with(input, keys.as_ref().zip(values.as_ref()), |input, (keys, values)| input.with_key_value(keys, values));
    let input = with(input, cache, AttentionInput::with_cache);
    let input = with(input, shared.as_ref(), AttentionInput::with_shared_cache);
    let input = input.with_backend(call.backend()).with_train(call.is("train"));
    // The first query of each head replaces the attention output.
    let input = if call.is("function") { input.with_function(&first) } else { input };
    let ys = match (call.is("latent"), call.get::<String>("entry")?.as_deref()) {
        (true, Some("plan")) => return Ok((latent(call)?.plan(&input)?.to_string(), xs.clone())),
        (false, Some("plan")) => return Ok((multi_head(call)?.plan(&input)?.to_string(), xs.clone())),
        (false, Some("weights")) => multi_head(call)?.forward_with_weights(input)?.weights,
        (false, Some("training")) => multi_head(call)?.forward_t(xs, true)?,
        (false, Some("projections")) => multi_head(call)?.projections()?.0.weight().clone(),
        (false, None) => multi_head(call)?.forward_with(input)?,
        (true, None) => latent(call)?.forward_with(input)?,
        (_, other) => panic!("no entry {other:?}"),
    };
    Ok((ACCEPTED.into(), ys))
}

fn layer(_: &str, call: &Fields) -> Result<String> {
    let xs = call.tensor("xs")?;
    // Edits of the cache instead of a call.
    let edit = call.get::<Edit>("edit")?;
    let attempt = |cache: &mut AttentionCache| match &edit {
        Some(edit) => edit.apply(cache).map(accepted),
        None => run(call, &xs, Some(cache)).map(|(text, _)| text),
    };
    match call.part("cache", |held| check(held, attempt))? {
        Some(text) => Ok(text),
        None => run(call, &xs, None).map(|(text, _)| text),
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
    "distances beyond counting" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 3, any_weights())?.by_distance(1, usize::MAX, 0),
    "keys beyond counting" =>
        RelativeBias::new(&RelativeBiasConfig::new(true), 3, any_weights())?.forward(1, usize::MAX, 0),
};

/// Checks that the constructors return the errors of a config too, in any layout.
#[test]
fn layer_config_is_validated_before_weights_are_read() {
    let cfg = Config::new(8, 4).with_num_kv_heads(3);
    let expected = cfg.validate().expect_err("3 does not divide 4").to_string();
    for layout in WeightLayout::all() {
        let error = MultiHeadAttention::load(&cfg, layout, any_weights()).expect_err("no layer");
        assert_eq!(error.to_string().lines().next(), expected.lines().next(), "{layout}");
    }
}
