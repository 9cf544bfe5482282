//! Any GGUF file: its config, its tokenizer, its first layers, and every tensor.

use std::io::Cursor;
use std::sync::Arc;

use candle_attention::gguf::{self, LinearShard};
use candle_core::{DType, Device, Tensor};

pub fn run(bytes: &[u8]) {
    let mut reader = Cursor::new(bytes.to_vec());
    let Ok(content) = gguf::read(&mut reader) else { return };
    let _ = gguf::hf_config(&content);
    let _ = gguf::attention_config(&content);
    if let Ok(tokenizer) = gguf::tokenizer(&content)
        && let Ok(encoding) = tokenizer.encode("hello 3.14 naïve 漢字")
    {
        let _ = tokenizer.decode(&encoding.ids);
    }
    let device = &Device::Cpu;
    for layer in [0, 1] {
        if let Ok(attention) = gguf::load_attention(&content, &mut reader, layer, device)
            && let Ok(xs) = Tensor::zeros((1, 3, attention.config().embed_dim()), DType::F32, device)
        {
            let _ = attention.forward(&xs);
        }
    }
    let _ = gguf::latent_attention_config(&content);
    let _ = gguf::linear_attention_config(&content);
    for layer in [0, 1] {
        if let Ok(attention) = gguf::load_latent_attention(&content, &mut reader, layer, device)
            && let Ok(xs) = Tensor::zeros((1, 3, attention.config().embed_dim()), DType::F32, device)
        {
            let _ = attention.forward(&xs);
        }
        if let Ok(net) = gguf::load_linear_attention(&content, &mut reader, layer, device)
            && let Ok(xs) = Tensor::zeros((1, 3, net.config().embed_dim()), DType::F32, device)
        {
            let _ = net.forward(&xs);
        }
        let _ = gguf::load_decoder_attention(&content, &mut reader, layer, device);
        let _ = gguf::load_cross_attention(&content, &mut reader, layer, device);
    }
    for name in gguf::tensor_names(&content).filter_map(|name| name.strip_suffix(".weight")) {
        let _ = gguf::load_expert(&content, &mut reader, name, 1, device);
        let _ = gguf::load_linear(&content, &mut reader, name, device);
        for part in [LinearShard::Outputs(vec![1..2, 0..1]), LinearShard::Inputs { range: 0..32, has_bias: true }] {
            let _ = gguf::load_linear_part(&content, &mut reader, name, &part, device);
        }
    }
    let content = Arc::new(content);
    let vb = gguf::var_builder(content.clone(), reader, DType::F32, device);
    for name in gguf::tensor_names(&content) {
        if let Some(info) = gguf::tensor_info(&content, name) {
            let _ = vb.get(info.dims, name);
        }
    }
}
