//! The same models as GGUF files, which are written as llama.cpp's converter writes them.

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::Value;
use candle_core::{Device, Result, Tensor};
use tempfile::NamedTempFile;

use crate::common::assert_near;
use crate::common::gguf::{File, of_checkpoint};
use crate::process::{Checkpoint, Run};
use crate::{Golden, checkpoint, spelled};

fn on_disk(file: &File) -> Result<(NamedTempFile, Checkpoint)> {
    let path = tempfile::Builder::new().suffix(".gguf").tempfile()?;
    std::fs::write(&path, file.bytes()?)?;
    let checkpoint = Checkpoint::at("causal_lm", path.path());
    Ok((path, checkpoint))
}

fn run(file: &File, args: &[&str]) -> Result<Run> {
    on_disk(file).map(|(_kept, model)| model.run(args))
}

fn logits(file: &File, ids: &str) -> Result<Tensor> {
    on_disk(file).map(|(_kept, model)| model.written("--logits", &["--ids", ids])["logits"].clone())
}

/// The GGUF file of one of the models.
fn converted(model: &str, architecture: &str) -> Result<File> {
    of_checkpoint(&checkpoint(model).path, architecture)
}

#[test]
fn files_give_the_logits_and_tokens_of_their_checkpoints() -> Result<()> {
    for (model, architecture) in
        [("llama_tied", "llama"), ("qwen2", "qwen2"), ("phi3", "phi3"), ("gemma3_text", "gemma3")]
    {
        let (golden, file) = (Golden::of(model)?, converted(model, architecture)?);
        let logits = logits(&file, &spelled(&golden.ids[0]))?;
        assert_near(&logits, &golden.logits.narrow(0, 0, 1)?, 1e-5, model);
        let made = run(&file, &["--ids", &spelled(&golden.ids[0][..7]), "--max-tokens", "6"])?;
        assert_eq!(made.stdout.trim(), spelled(&golden.greedy[0]), "{model}: {}", made.stderr);
    }
    Ok(())
}
/// With a vocabulary of 37 letters and digits, text says what its ids say.
#[test]
fn text_goes_through_the_tokenizer_of_a_file() -> Result<()> {
    let mut file = converted("qwen2", "qwen2")?;
    let tokens: Vec<_> = ('a'..='z').chain('0'..='9').chain(['_']).collect();
    let list = tokens.iter().map(|token| Value::String(token.to_string())).collect();
    file.set("tokenizer.ggml.tokens", Value::Array(list));
    file.set("tokenizer.ggml.merges", Value::Array(Vec::new()));
    for (key, text) in [("model", "gpt2"), ("pre", "qwen2")] {
        file.set(&format!("tokenizer.ggml.{key}"), Value::String(text.into()));
    }
    let ids = run(&file, &["--ids", "5,7,9", "--max-tokens", "5"])?.stdout;
    let made: String = ids.trim().split(',').map(|id| tokens[id.parse::<usize>().expect("an id")]).collect();
    let ran = run(&file, &["--prompt", "fhj", "--max-tokens", "5"])?;
    assert_eq!(ran.stdout, format!("fhj{made}\n"), "{}", ran.stderr);
    Ok(())
}

#[test]
fn mistakes_are_said_in_a_line() -> Result<()> {
    let file = converted("qwen2", "qwen2")?;
    let mut experts = converted("qwen2", "qwen2")?;
    experts.set("general.architecture", Value::String("mamba".into()));
    for (file, args, expected) in [
        (&file, ["--prompt", "hello"], "error: [gguf] the metadata has no tokenizer.ggml.tokens\n"),
        (
            &file,
            ["--ids=5", "--dtype=bf16"],
            "error: [causal_lm] a GGUF file has its own types of weights and computes in f32",
        ),
        (&experts, ["--ids", "5"], "error: [gguf] unknown architecture \"mamba\", expected one of: bert"),
    ] {
        let ran = run(file, &args)?;
        assert_eq!((ran.code, ran.stderr.starts_with(expected)), (Some(1), true), "{}", ran.stderr);
    }
    let text = Checkpoint::at("causal_lm", file!()).run(&["--ids", "5"]);
    assert!(text.error().starts_with("[causal_lm] cannot read"), "{}", text.stderr);
    Ok(())
}

/// A llama of 2 layers that are 64 wide, with random weights of a type.
fn random(dtype: GgmlDType, tied: bool) -> Result<File> {
    let mut file = File::default();
    file.set("general.architecture", Value::String("llama".into()));
    for (key, size) in [
        ("block_count", 2),
        ("embedding_length", 64),
        ("feed_forward_length", 96),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("context_length", 64),
    ] {
        file.set(&format!("llama.{key}"), Value::U32(size));
    }
    file.set("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5));
    let mut seed = 0.0;
    let mut add = |name: &str, shape: &[usize]| {
        seed += 0.7;
        let count = shape.iter().product::<usize>();
        let numbers = (Tensor::arange(0f32, count as f32, &Device::Cpu)?.affine(0.731, seed)?.sin()? * 0.2)?;
        file.add(name, &numbers.reshape(shape)?, if shape.len() == 1 { GgmlDType::F32 } else { dtype })
    };
    add("token_embd.weight", &[50, 64])?;
    add("output_norm.weight", &[64])?;
    if !tied {
        add("output.weight", &[50, 64])?;
    }
    for layer in 0..2 {
        for (name, shape) in [
            ("attn_norm", &[64][..]),
            ("attn_q", &[64, 64]),
            ("attn_k", &[32, 64]),
            ("attn_v", &[32, 64]),
            ("attn_output", &[64, 64]),
            ("ffn_norm", &[64]),
            ("ffn_gate", &[96, 64]),
            ("ffn_up", &[96, 64]),
            ("ffn_down", &[64, 96]),
        ] {
            add(&format!("blk.{layer}.{name}.weight"), shape)?;
        }
    }
    Ok(file)
}

#[test]
fn quantized_weights_give_the_logits_of_their_numbers() -> Result<()> {
    use GgmlDType::*;
    let ids = "5,7,9,11,2,3";
    for (dtype, tied) in
        [(F16, true), (BF16, false), (Q4_0, true), (Q4_1, false), (Q5_0, true), (Q5_1, true), (Q8_0, true)]
    {
        let file = random(dtype, tied)?;
        let mut plain = random(F32, tied)?;
        for (name, weight) in &file.tensors {
            plain.add(name, &weight.dequantize(&Device::Cpu)?, F32)?;
        }
        assert_near(&logits(&file, ids)?, &logits(&plain, ids)?, 1e-4, &format!("{dtype:?}"));
    }
    Ok(())
}
