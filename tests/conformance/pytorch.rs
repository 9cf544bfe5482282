//! PyTorch's function and layer by this crate.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, MultiHeadAttention, MultiHeadAttentionConfig, SdpaOptions, TorchSeed,
    WeightLayout, scaled_dot_product_attention,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use crate::{Answer, Case};

pub fn answer(case: &Case, backend: Backend) -> Result<Answer> {
    match case.group.as_str() {
        "scaled_dot_product_attention" => function(case, backend),
        _ => layer(case, backend),
    }
}

fn function(case: &Case, backend: Backend) -> Result<Answer> {
    let [q, k, v] = ["q", "k", "v"].map(|name| case.input(name));
    // PyTorch broadcasts the dimensions before (T, D).
    let q = if q.rank() < k.rank() { q.broadcast_as((k.dim(0)?, q.dim(0)?, q.dim(1)?, q.dim(2)?))? } else { q.clone() };
    let mask = if case.has("is_causal") { AttentionMask::causal_upper_left() } else { AttentionMask::none() };
    let mask = mask.with_bias(case.find("attn_mask"));
    let seed = TorchSeed::new(case.count("seed").unwrap_or(0) as u64);
    let options = SdpaOptions::default().with_backend(backend).with_dropout_seed(&seed);
    let options = options.with_dropout(case.number("dropout_p").unwrap_or(0.0), true);
    Ok(Answer::Outputs(vec![("output", scaled_dot_product_attention(&q, k, v, &mask, &options)?)]))
}

fn layer(case: &Case, backend: Backend) -> Result<Answer> {
    let size = |name| case.count(name).unwrap_or_default();
    let cfg = MultiHeadAttentionConfig::new(size("embed_dim"), size("num_heads"))
        .with_bias(case.has("bias"))
        .with_bias_kv(case.has("add_bias_kv"))
        .with_add_zero_attn(case.has("add_zero_attn"));
    let vb = VarBuilder::from_tensors(case.inputs.by_name.clone(), DType::F32, &Device::Cpu);
    let layer = MultiHeadAttention::load(&cfg, WeightLayout::Torch, vb)?;

    // (B, T, E), of (T, B, E) too.
    let batch_first = |xs: &Tensor| match xs.rank() == 3 && !case.has("batch_first") {
        true => xs.transpose(0, 1),
        false => Ok(xs.clone()),
    };
    let [q, k, v] = ["query", "key", "value"].map(|name| batch_first(case.input(name)));
    let q = q?;
    let k = k?;
    let v = v?;
    let mut mask = AttentionMask::none();
    for name in ["attn_mask", "key_padding_mask"] {
        let Some(given) = case.find(name) else { continue };
        let given = match (name, given.rank()) {
            ("key_padding_mask", 2) => given.unsqueeze(1)?.unsqueeze(1)?,
            _ => given.clone(),
        };
        // True means masked here.
        mask = if given.dtype() == DType::U8 { mask.with_bool_mask(&given.eq(0u8)?) } else { mask.with_bias(&given) };
    }
    let input = |path| AttentionInput::new(&q).with_key_value(&k, &v).with_mask(&mask).with_backend(path);
    let output = batch_first(&layer.forward_with(input(backend))?)?;
    let weights = layer.forward_with_weights(input(Backend::Auto))?.weights;
    Ok(Answer::Outputs(vec![("output", output), ("weights", weights.mean(weights.rank() - 3)?)]))
}
