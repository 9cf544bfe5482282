//! T5: an encoder and a decoder, or an encoder alone, with a relative bias in the first layer or in each.

use std::collections::HashMap;
use std::io::{Read, Seek};

use candle_core::{DType, Result};
use candle_nn::VarBuilder;
use serde_json::json;

use super::file::File;
use super::header::has_tensor;
use super::layer::{LayerNames, Place};
use super::metadata::{ConfigFields, Metadata};
use candle_attention_core::{MultiHeadAttentionConfig, RelativeBias};
use candle_attention_modules::base::HeadShard;

/// Sets the sizes under the names that T5's `config.json` has for them.
pub(super) fn t5(metadata: &Metadata, fields: &mut ConfigFields) -> Result<()> {
    let layers = fields["num_hidden_layers"].clone();
    let decoder_layers = metadata.count("decoder_block_count")?;
    // llama.cpp looks for a relative bias in each layer, and then in the first.
    if has_tensor(metadata.content, "enc.blk.1.attn_rel_b.weight") {
        fields.insert("model_type".into(), json!("umt5"));
    }
    for (name, other) in [("d_model", "hidden_size"), ("num_heads", "num_attention_heads"), ("d_kv", "head_dim")] {
        let value = fields[other].clone();
        fields.insert(name.into(), value);
    }
    fields.insert("num_layers".into(), layers.clone());
    fields.insert("num_decoder_layers".into(), decoder_layers.map_or(layers, |count| json!(count)));
    if let Some(size) = metadata.count("feed_forward_length")? {
        fields.insert("d_ff".into(), json!(size));
    }
    if let Some(epsilon) = metadata.number("attention.layer_norm_rms_epsilon")? {
        fields.insert("layer_norm_epsilon".into(), json!(epsilon));
    }
    let buckets = metadata.required("attention.relative_buckets_count")?;
    fields.insert("relative_attention_num_buckets".into(), json!(buckets));
    fields.remove("rope_parameters");
    Ok(())
}

/// Loads the relative bias of a layer, or this rank's heads of it, if the config has one.
pub(super) fn load_relative_bias<R: Read + Seek>(
    file: &mut File<R>,
    cfg: &MultiHeadAttentionConfig,
    place: Place,
    layer: usize,
    shard: HeadShard,
) -> Result<Option<RelativeBias>> {
    let Some(buckets) = cfg.relative_bias() else { return Ok(None) };
    let own = LayerNames::new(place, layer).name("rel_b.weight");
    let name = if file.has(&own) { own } else { LayerNames::new(place, 0).name("rel_b.weight") };
    let weight = file.numbers(&name, &[buckets.num_buckets(), cfg.num_heads()])?;
    let tensors = HashMap::from([("relative_attention_bias.weight".to_string(), weight)]);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, file.device);
    RelativeBias::new(buckets, cfg.num_heads(), vb)?.shard(shard).map(Some)
}
