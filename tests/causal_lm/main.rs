//! The example `causal_lm`, run as a user would, against the logits and tokens of transformers: `models/`, by
//! `make.py`.

#[path = "../common/mod.rs"]
mod common;
mod gguf;
mod linear;
#[path = "../../examples/causal_lm/model.rs"]
mod model;
#[path = "../examples/process.rs"]
mod process;
mod training;

use candle_attention::SimpleTokenizer;
use candle_core::{DType, Result, Tensor};
use serde_json::json;

use common::assert_near;
use process::{Checkpoint, Run};

/// Every folder of `models/`.
fn models() -> Vec<String> {
    let names = process::names("causal_lm");
    assert_eq!(names.len(), 45, "{names:?}");
    names
}

fn checkpoint(model: &str) -> Checkpoint {
    Checkpoint::of("causal_lm", model)
}

fn run(model: &str, args: &[&str]) -> Run {
    checkpoint(model).run(args)
}

struct Golden {
    ids: Vec<Vec<u32>>,
    logits: Tensor,
    greedy: Vec<Vec<u32>>,
}

impl Golden {
    fn of(model: &str) -> Result<Self> {
        let mut tensors = checkpoint(model).tensors("golden.safetensors");
        let mut take = |name: &str| tensors.remove(name).expect(name);
        Ok(Self { ids: take("ids").to_vec2()?, logits: take("logits"), greedy: take("greedy").to_vec2()? })
    }
}

fn spelled(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn logits_are_those_of_transformers() -> Result<()> {
    for model in &models() {
        let golden = Golden::of(model)?;
        let [one, other] = [0, 1].map(|row| spelled(&golden.ids[row]));
        let written = checkpoint(model).written("--logits", &["--ids", &one, "--ids", &other]);
        assert_near(&written["logits"], &golden.logits, 1e-5, model);
    }
    Ok(())
}

/// Alone, as a batch of one length, and as a batch of two; in one piece and in chunks that no length is a multiple of.
#[test]
fn generation_gives_the_tokens_of_transformers() -> Result<()> {
    for model in &models() {
        let golden = Golden::of(model)?;
        let prompts: Vec<String> = golden.ids.iter().map(|row| spelled(&row[..7])).collect();
        let expected: Vec<String> = golden.greedy.iter().map(|row| spelled(row)).collect();
        let alone = run(model, &["--ids", &prompts[0], "--max-tokens", "6"]);
        assert_eq!(alone.stdout.trim(), expected[0], "{model}: {}", alone.stderr);
        for chunk in ["2048", "3"] {
            let both = ["--ids", &prompts[0], "--ids", &prompts[1], "--max-tokens", "6", "--chunk", chunk];
            let ran = run(model, &both);
            assert_eq!(ran.stdout.lines().collect::<Vec<_>>(), expected, "{model}: {}", ran.stderr);
        }
        let shorter = spelled(&golden.ids[1][..3]);
        let beside = run(model, &["--ids", &shorter, "--ids", &prompts[0], "--max-tokens", "6", "--chunk", "4"]);
        assert_eq!(beside.stdout.lines().nth(1), Some(expected[0].as_str()), "{model}: beside a shorter prompt");
    }
    Ok(())
}

#[test]
fn every_dtype_and_cache_runs() -> Result<()> {
    for model in ["llama", "deepseek_v3", "gpt_oss_mxfp4", "qwen3_next"] {
        let golden = Golden::of(model)?;
        let prompt = spelled(&golden.ids[0][..7]);
        for dtype in ["f32", "bf16", "f16"] {
            for cache in ["f32", "bf16", "f16", "q8"] {
                let args = ["--ids", &prompt, "--max-tokens", "4", "--dtype", dtype, "--kv-cache", cache];
                let ran = run(model, &args);
                assert_eq!(ran.code, Some(0), "{model}, {dtype}, {cache}: {}", ran.stderr);
                assert_eq!(ran.stdout.trim().split(',').count(), 4, "{model}, {dtype}, {cache}");
                assert!(ran.stderr.contains("tokens/s"), "{model}, {dtype}, {cache}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_seed_draws_the_same_tokens_again() {
    let draw = |seed: &str| {
        let args = ["--ids", "5,7,9", "--max-tokens", "12", "--temperature", "2.0", "--top-p", "0.9", "--seed", seed];
        run("qwen2", &args).stdout
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

/// With a vocabulary of `w0`, `w1` and so on, text says what its ids say, streamed or in a batch.
#[test]
fn text_goes_on_as_its_ids_do() -> Result<()> {
    let (copy, words) = (checkpoint("llama").copied(), Golden::of("llama")?.logits.dim(2)?);
    let tokenizer = SimpleTokenizer::from_words((0..words).map(|id| format!("w{id}")))?;
    tokenizer.save(copy.file("tokenizer.json"))?;
    for prompts in [&["5,7,9"][..], &["5,7,9", "3,4"]] {
        let spelled = |text: &str| text.split(',').map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ");
        let texts: Vec<_> = prompts.iter().map(|ids| spelled(ids)).collect();
        let ids = prompts.iter().flat_map(|ids| ["--ids", ids]);
        let ids = run("llama", &ids.chain(["--max-tokens", "5"]).collect::<Vec<_>>()).stdout;
        let expected = texts.iter().zip(ids.lines()).map(|(text, made)| format!("{text} {}\n", spelled(made)));
        let args = texts.iter().flat_map(|text| ["--prompt", text]).chain(["--max-tokens", "5"]);
        let ran = copy.run(&args.collect::<Vec<_>>());
        assert_eq!(ran.stdout, expected.collect::<String>(), "{}", ran.stderr);
    }
    Ok(())
}

#[test]
fn mistakes_are_said_in_a_line() {
    let cases: [(&[&str], &str); 4] = [
        (
            &["--prompt", "hello"],
            "error: [causal_lm] the checkpoint has no tokenizer.json; give --ids instead of --prompt",
        ),
        (&["--ids", "5,x"], "\"x\" is no token id"),
        (&["--ids", "5", "--temperature=-1"], "expected a number of 0 or more"),
        (&["--ids", "99"], "error: "),
    ];
    for (args, message) in cases {
        let ran = run("gpt2", args);
        assert_ne!(ran.code, Some(0), "{args:?}");
        assert!(ran.stderr.contains(message), "{args:?}: {}", ran.stderr);
    }
    let nowhere = Checkpoint::at("causal_lm", "/nowhere").run(&["--ids", "1"]);
    assert_eq!(nowhere.error(), "[causal_lm] /nowhere has no config.json");
}

/// Greedy tokens in half precision are luck, logits are not: the first is within what bf16 keeps.
#[test]
fn half_precision_is_near() -> Result<()> {
    let golden = Golden::of("qwen3")?;
    let expected = golden.logits.narrow(0, 0, 1)?.to_dtype(DType::F32)?;
    for (dtype, most) in [("f16", 2e-2), ("bf16", 0.15)] {
        let args = ["--ids", &spelled(&golden.ids[0]), "--dtype", dtype];
        let written = checkpoint("qwen3").written("--logits", &args);
        assert_near(&written["logits"], &expected, most, dtype);
    }
    Ok(())
}

/// Phi 3 with an original context of 16: what changes there is said once, when it is exceeded.
#[test]
fn crossing_the_original_context_is_said_when_it_happens() {
    let generate = |max_tokens: &str| run("phi3_scaled", &["--ids", "5,7,9,11,13,15,17", "--max-tokens", max_tokens]);
    let note = "note: 17 positions exceed the original context of 16: longrope scaling changes the rotary frequencies from \
                this call on; 16 cached positions keep those of their own calls, as in transformers";
    let (within, beyond) = (generate("10"), generate("14"));
    assert!(!within.stderr.contains("note:"), "{}", within.stderr);
    assert_eq!(beyond.stderr.matches("note:").count(), 1, "{}", beyond.stderr);
    assert!(beyond.stderr.contains(note), "{}", beyond.stderr);
}

#[test]
fn what_it_knows_is_known_to_the_library() {
    let unknown = checkpoint("llama").copied();
    unknown.write("config.json", &json!({"model_type": "rwkv"}));
    let ran = unknown.run(&["--ids", "1"]);
    let (_, known) = ran.stderr.split_once("model_type is \"rwkv\", expected one of ").expect("it names them");
    let known: Vec<_> = known.trim().split(", ").collect();
    assert_eq!(known.len(), 36, "{known:?}");
    for name in known {
        assert!(candle_attention::hf::architectures().any(|other| other == name), "{name}");
    }
}
