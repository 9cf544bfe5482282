//! Tests `causal_lm` on 1, 2 and 4 ranks against the logits and tokens of transformers, as the example's test does.

#[path = "../../../tests/common/mod.rs"]
mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{Device, Result, Tensor};
use common::{Decoded, assert_near, gguf, read_json, recorded, spelled};

const PROGRAM: &str = env!("CARGO_BIN_EXE_causal_lm");

fn of(model: &str) -> PathBuf {
    recorded("causal_lm/models").join(model)
}

fn mpirun(args: &[&str]) -> Output {
    Command::new("mpirun")
        .arg("--oversubscribe")
        .args(args)
        .envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("RAYON_NUM_THREADS", "1")])
        .output()
        .expect("mpirun is installed: libopenmpi-dev and openmpi-bin on Debian")
}

/// Runs a model on `processes` ranks, which all have to succeed, and returns stdout and stderr.
#[track_caller]
fn run(processes: usize, model: &Path, args: &[&str]) -> [String; 2] {
    let n = processes.to_string();
    let model = model.to_str().expect("UTF-8");
    let ran = mpirun(&[&["-n", &n, PROGRAM, "--model", model], args].concat());
    let [out, error] = [ran.stdout, ran.stderr].map(|said| String::from_utf8(said).expect("UTF-8"));
    assert!(ran.status.success(), "{processes} ranks, {model}: {error}");
    [out, error]
}

/// Checks that the ranks write the expected logits, to 1e-5 of the largest.
fn check_logits(processes: usize, model: &Path, ids: &[Vec<u32>], expected: &Tensor) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    let rows: Vec<_> = ids.iter().map(|row| spelled(row)).collect();
    let rows = rows.iter().flat_map(|row| ["--ids", row.as_str()]);
    run(processes, model, &rows.chain(["--logits", file.path().to_str().expect("UTF-8")]).collect::<Vec<_>>());
    let written = candle_core::safetensors::load(file.path(), &Device::Cpu)?;
    assert_near(&written["logits"], expected, 1e-5, &format!("{processes} ranks, {}", model.display()));
    Ok(())
}

/// Returns the number of bytes that rank 0 prints as sent.
fn bytes_sent(stderr: &str) -> usize {
    let line = stderr.lines().find(|line| line.starts_with("rank 0 of ")).expect("it says so");
    line.split(' ').nth(4).and_then(|bytes| bytes.parse().ok()).expect("a number")
}

/// Models with packed projections and gates, biases, learned positions, one key head, parallel blocks, norms after the
/// all-reduce, experts, and linear attention.
const DIVIDED: &str = "bloom deepseek_v2_lite falcon falcon_grouped gemma3_text glm4 gpt2 gpt_oss granite kimi_linear \
    llama mixtral olmo2 olmo_hybrid opt phi3 qwen2 qwen3_5_moe qwen3_next";

#[test]
fn every_world_size_returns_the_logits_of_transformers() -> Result<()> {
    for (n, model) in DIVIDED.split(' ').map(of).enumerate() {
        let golden = Decoded::of(&model)?;
        check_logits([2, 4][n % 2], &model, &golden.ids, &golden.logits)?;
        check_logits([4, 2][n % 2], &model, &golden.ids, &golden.logits)?;
    }
    Ok(())
}

/// Checks GPT-OSS's experts in their published format, with twice the width of the folder's. Each half returns half of
/// the sum.
#[test]
fn blocks_of_four_bits_are_divided() -> Result<()> {
    let model = of("gpt_oss_mxfp4");
    let copy = tempfile::tempdir()?;
    let golden = Decoded::of(&model)?;
    std::fs::copy(model.join("config.json"), copy.path().join("config.json"))?;
    let mut tensors = candle_core::safetensors::load(model.join("model.safetensors"), &Device::Cpu)?;
    for (name, tensor) in &mut tensors {
        let twice = |half: &Tensor, dim| Tensor::cat(&[half, half], dim);
        *tensor = match name.rsplit_once("experts.").map_or("", |(_, name)| name) {
            "gate_up_proj_blocks" | "gate_up_proj_scales" | "gate_up_proj_bias" => twice(tensor, 1)?,
            "down_proj_blocks" => twice(tensor, 2)?,
            // The scales are exponents of 2.
            "down_proj_scales" => twice(&(&*tensor - Tensor::ones_like(tensor)?)?, 2)?,
            _ => continue,
        };
    }
    candle_core::safetensors::save(&tensors, copy.path().join("model.safetensors"))?;
    [1, 2].iter().try_for_each(|&processes| check_logits(processes, copy.path(), &golden.ids, &golden.logits))
}

#[test]
fn gguf_files_are_divided() -> Result<()> {
    for (model, processes) in [("llama_tied", 4), ("qwen2", 2), ("phi3", 2), ("gemma3_text", 4)] {
        let golden = Decoded::of(&of(model))?;
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), gguf::of_checkpoint(model)?.bytes()?)?;
        check_logits(processes, file.path(), &golden.ids[..1], &golden.logits.narrow(0, 0, 1)?)?;
    }
    Ok(())
}

#[test]
fn every_world_size_generates_the_same_tokens() -> Result<()> {
    let heads_and_positions = |model: &str, numbers: &[usize], divisions: &[&str]| -> Result<()> {
        let model = of(model);
        let golden = Decoded::of(&model)?;
        let prompt = spelled(&golden.ids[0][..7]);
        for &processes in numbers {
            for divide in divisions {
                let args = ["--divide", divide, "--ids", &prompt, "--max-tokens", "6"];
                let [out, said] = run(processes, &model, &args);
                assert_eq!(out.trim(), spelled(&golden.greedy[0]), "{processes} ranks, {divide}: {said}");
            }
        }
        Ok(())
    };
    heads_and_positions("llama", &[1, 2, 4], &["heads", "positions"])?;
    heads_and_positions("qwen3", &[2], &["heads", "positions"])?;
    // These have ALiBi, latent attention, learned positions, windows with sinks, and windows alone.
    let others = ["bloom", "deepseek_v3", "gpt2", "gpt_oss", "mistral"];
    others.iter().enumerate().try_for_each(|(n, model)| heads_and_positions(model, &[[2, 4][n % 2]], &["positions"]))
}

/// Checks `bytes_sent` with a vocabulary of 37 words, which neither 2 nor 4 divides.
#[test]
fn bytes_sent_are_as_in_the_formula() -> Result<()> {
    for name in ["llama", "llama_tied"] {
        let model = of(name);
        let golden = Decoded::of(&model)?;
        let json: serde_json::Value = read_json(model.join("config.json"));
        let number = |key: &str| json[key].as_u64().expect(key) as usize;
        let [layers, width, words] = ["num_hidden_layers", "hidden_size", "vocab_size"].map(number);
        let prompt = spelled(&golden.ids[0]);
        let tokens = golden.ids[0].len() + 2;
        for processes in [1, 2, 4] {
            // The last token that is generated is not read again. Four checksums are compared at the start.
            let [_, said] = run(processes, &model, &["--ids", &prompt, "--max-tokens", "3"]);
            let formula = tokens * (2 * layers + 1) * width * 4 + 3 * words.div_ceil(processes) * 4 + 4 * 8;
            assert_eq!(bytes_sent(&said), if processes > 1 { formula } else { 0 });
        }
    }
    Ok(())
}

#[test]
fn a_difference_between_ranks_and_an_indivisible_model_are_errors() {
    let model = |name: &str| of(name).to_str().expect("UTF-8").to_string();
    let llama = model("llama");
    let qwen2 = model("qwen2");
    let mxfp4 = model("gpt_oss_mxfp4");
    let qwen3_next = model("qwen3_next");
    let both = ["-n", "2", PROGRAM, "--ids", "5,7,9", "--model"];
    let two_programs = ["-n", "1", PROGRAM, "--model", &llama, "--ids", "5,7", ":", "-n", "1", PROGRAM];
    let difference =
        "[distributed] expected {} to be the same on all ranks, found a difference between rank 0 and rank 1";
    let config = difference.replace("{}", "config.json");
    let arguments = difference.replace("{}", "the arguments");
    let of = |message: &str| format!("of 2: error: {message}");
    let units = "[causal_lm] model.layers.0.mlp.experts.gate_up_proj_scales has 1 units of 64, expected";
    let states = "[causal_lm] states of linear attention cannot be divided by positions, expected --divide heads";
    for (args, expected) in [
        ([&two_programs[..], &["--model", &qwen2, "--ids", "5,7"]].concat(), config),
        ([&two_programs[..], &["--model", &llama, "--ids", "5,8"]].concat(), arguments),
        ([&both[..], &[&mxfp4, "--divide", "heads"]].concat(), of(units)),
        ([&both[..], &[&qwen3_next, "--divide", "positions"]].concat(), of(states)),
    ] {
        let ran = mpirun(&args);
        let said = String::from_utf8_lossy(&ran.stderr);
        assert!(!ran.status.success() && said.contains(&expected), "{said}");
    }
}
