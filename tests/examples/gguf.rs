//! The models as GGUF files, written as llama.cpp's converter writes them.

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Device, Result, Tensor, safetensors};
use tempfile::NamedTempFile;

use crate::common::gguf::{File, of_checkpoint};
use crate::common::{Decoded, Run, assert_near, recorded, run, spelled};
use crate::process::{self, Checkpoint};

fn on_disk(file: &File) -> Result<(NamedTempFile, Checkpoint)> {
    let path = tempfile::Builder::new().suffix(".gguf").tempfile()?;
    std::fs::write(&path, file.bytes()?)?;
    let checkpoint = Checkpoint { example: "causal_lm", path: path.path().into() };
    Ok((path, checkpoint))
}

fn logits(file: &File, ids: &str) -> Result<Tensor> {
    let (_kept, model) = on_disk(file)?;
    Ok(safetensors::load_buffer(&model.written("--logits", &["--ids", ids]), &Device::Cpu)?["logits"].clone())
}

#[test]
fn gguf_files_match_logits_and_tokens_of_checkpoints() -> Result<()> {
    for model in ["llama_tied", "qwen2", "phi3", "gemma3_text"] {
        let golden = Decoded::of(&Checkpoint::of("causal_lm", model).path)?;
        let file = of_checkpoint(model)?;
        let logits = logits(&file, &spelled(&golden.ids[0]))?;
        assert_near(&logits, &golden.logits.narrow(0, 0, 1)?, 1e-5, model);
        let made = on_disk(&file)?.1.printed(&["--ids", &spelled(&golden.ids[0][..7]), "--max-tokens", "6"]);
        assert_eq!(made.trim(), spelled(&golden.greedy[0]), "{model}");
    }
    Ok(())
}

/// Reads files that llama.cpp's converter wrote (`crates/compare/conformance/gguf_experts.py`), with a tensor
/// (experts, out, in) for each projection of the experts, in MXFP4 for GPT-OSS.
#[test]
fn gguf_files_with_experts_match_logits_of_checkpoints() -> Result<()> {
    for model in ["mixtral", "gpt_oss_mxfp4", "deepseek_v2", "deepseek_v3", "qwen3_5_moe"] {
        let golden = Decoded::of(&Checkpoint::of("causal_lm", model).path)?;
        let path = recorded(&format!("causal_lm/gguf/{model}.gguf"));
        let bytes = Checkpoint { example: "causal_lm", path }.written("--logits", &["--ids", &spelled(&golden.ids[0])]);
        let logits = safetensors::load_buffer(&bytes, &Device::Cpu)?["logits"].clone();
        // llama.cpp has no windows for Mixtral, and the checkpoint has one of 4 tokens.
        let tokens = if model == "mixtral" { 4 } else { logits.dim(1)? };
        let expected = golden.logits.narrow(0, 0, 1)?.narrow(1, 0, tokens)?;
        assert_near(&logits.narrow(1, 0, tokens)?, &expected, 1e-5, model);
    }
    Ok(())
}

/// Uses a vocabulary of 37 letters and digits, so that each id is a letter.
#[test]
fn gguf_tokenizer_matches_ids() -> Result<()> {
    let mut file = of_checkpoint("qwen2")?;
    let tokens: Vec<_> = ('a'..='z').chain('0'..='9').chain(['_']).collect();
    let list = tokens.iter().map(|token| Value::String(token.to_string())).collect();
    file.set("tokenizer.ggml.tokens", Value::Array(list));
    file.set("tokenizer.ggml.merges", Value::Array(Vec::new()));
    for (key, text) in [("model", "gpt2"), ("pre", "qwen2")] {
        file.set(&format!("tokenizer.ggml.{key}"), Value::String(text.into()));
    }
    let (_kept, model) = on_disk(&file)?;
    let ids = model.printed(&["--ids", "5,7,9", "--max-tokens", "5"]);
    let made: String = ids.trim().split(',').map(|id| tokens[id.parse::<usize>().expect("an id")]).collect();
    assert_eq!(model.printed(&["--prompt", "fhj", "--max-tokens", "5"]), format!("fhj{made}\n"));

    let mut other = process::command("causal_lm");
    other.arg("--model").arg(&model.path).args(["--ids", "5", "--dtype", "bf16"]);
    let Run { code, stderr, .. } = run(other);
    let said = "a GGUF file has its own types of weights";
    assert!(code == Some(1) && stderr.starts_with(&format!("error: [causal_lm] {said}")), "{stderr}");
    Ok(())
}

/// Returns a llama that is eight times as wide as the checkpoint, in a type whose blocks are too wide for the
/// checkpoint.
fn wide(dtype: GgmlDType, tied: bool) -> Result<File> {
    let mut file = of_checkpoint(if tied { "llama_tied" } else { "llama" })?;
    for (key, size) in [("embedding_length", 128), ("feed_forward_length", 160), ("attention.key_length", 32)] {
        file.set(&format!("llama.{key}"), Value::U32(size));
    }
    for (name, tensor) in std::mem::take(&mut file.tensors) {
        let tensor = tensor.dequantize(&Device::Cpu)?;
        let (wide, dtype) = match tensor.rank() {
            1 => (tensor.repeat(8)?, GgmlDType::F32),
            _ if name.starts_with("token_embd") || name.starts_with("output") => (tensor.repeat((1, 8))?, dtype),
            _ => ((tensor / 8.0)?.repeat((8, 8))?, dtype),
        };
        file.add(&name, &wide, dtype)?;
    }
    Ok(file)
}

#[test]
fn gguf_quantised_weights_match_dequantised_logits() -> Result<()> {
    use GgmlDType::*;
    for (dtype, tied) in
        [(F16, true), (BF16, false), (Q4_0, true), (Q4_1, false), (Q5_0, true), (Q5_1, true), (Q8_0, true)]
    {
        let file = wide(dtype, tied)?;
        let mut plain = wide(F32, tied)?;
        for (name, weight) in &file.tensors {
            plain.add(name, &weight.dequantize(&Device::Cpu)?, F32)?;
        }
        let ids = "5,7,9,11,2,3";
        assert_near(&logits(&file, ids)?, &logits(&plain, ids)?, 1e-4, &format!("{dtype:?}"));
    }
    Ok(())
}
