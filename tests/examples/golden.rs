//! The checkpoints of `tests/{example}/models` against transformers, whose numbers each folder's `make.py` writes.

use candle_attention::text::{SimpleTokenizer, SpecialTokens};
use candle_attention::weights;
use candle_core::{DType, Device, IndexOp, Result, Tensor, safetensors};
use serde_json::{Value, json};

use crate::common::{Decoded, relative_error, run, spelled};
use crate::encoder::Encoder;
use crate::process::{Checkpoint, command, copy};

const EXAMPLES: &[(&str, usize)] = &[
    ("causal_lm", 53),
    #[cfg(feature = "plot")]
    ("image_embedding", 3),
    ("rerank", 4),
    ("sentence_embedding", 7),
];
const SENTENCES: &str = "tests/sentence_embedding/sentences.txt";
const PICTURE: &str = "tests/image_embedding/picture.png";

/// Returns pairs of the results of an example and of transformers.
fn pairs(model: &Checkpoint, options: &[&str]) -> Result<Vec<[Tensor; 2]>> {
    let golden = model.tensors("golden.safetensors");
    let written = |option: &str, args: &[&str]| {
        safetensors::load_buffer(&model.written(option, &[args, options].concat()), &Device::Cpu)
    };
    Ok(match model.example {
        "causal_lm" => {
            let [one, other] = [0, 1].map(|row| golden["ids"].i(row).and_then(|ids| ids.to_vec1()));
            let written = written("--logits", &["--ids", &spelled(&one?), "--ids", &spelled(&other?)])?;
            vec![[written["logits"].clone(), golden["logits"].clone()]]
        }
        "sentence_embedding" => {
            let mean = golden["mean"].to_dtype(DType::F64)?;
            let unit = mean.broadcast_div(&mean.sqr()?.sum_keepdim(1)?.sqrt()?)?;
            vec![[written("--out", &["--file", SENTENCES])?["embeddings"].clone(), unit]]
        }
        "rerank" => {
            let question = ["someone plays guitar in the rain", "--file", SENTENCES];
            let printed = model.printed(&[&question, options].concat());
            let scores = printed
                .lines()
                .skip_while(|row| !row.ends_with("probability"))
                .skip(1)
                .map(|row| row[..8].trim().parse::<f32>().expect("a score"));
            vec![[Tensor::from_iter(scores, &Device::Cpu)?, golden["scores"].sort_last_dim(false)?.0]]
        }
        _ => {
            let [first, last] = ["0", "1"].map(|layer| written("--out", &[PICTURE, "--layer", layer]));
            let pair = |of: &Result<_>, own: &str, name: &str| {
                let of: &std::collections::HashMap<_, Tensor> = of.as_ref().expect("tensors");
                [of[own].clone(), golden[name].clone()]
            };
            vec![
                pair(&first, "attention", "attention.0"),
                pair(&last, "attention", "attention.1"),
                pair(&last, "embedding", "embedding"),
            ]
        }
    })
}

#[test]
fn examples_match_transformers() -> Result<()> {
    let device = std::env::var("TEST_DEVICE").unwrap_or("cpu".into());
    for &(example, count) in EXAMPLES {
        let models = Checkpoint::all(example);
        assert_eq!(models.len(), count, "{example}");
        for model in &models {
            // Of halves, a token between two experts may go to the other one.
            let has_experts = model.config().to_string().contains("experts");
            let dtypes = [("f32", 1e-5), ("f64", 1e-5), ("f16", 2e-2), ("bf16", 0.2)];
            for &(dtype, most) in &dtypes[..if has_experts { 2 } else { 4 }] {
                // Metal has no f64.
                if dtype == "f64" && device == "metal" {
                    continue;
                }
                for [got, expected] in pairs(model, &["--dtype", dtype, "--device", &device])? {
                    let error = relative_error(&got.to_dtype(DType::F64)?, &expected);
                    // Scores are printed with four digits.
                    let most = if example == "rerank" { f64::max(most, 1e-4) } else { most };
                    assert!(error <= most, "{model} in {dtype}: off by {error:e} of the largest");
                    assert!(error > 1e-6 || most < 1e-3, "{model} in {dtype}: {error:e}, as good as f32");
                }
            }
        }
    }
    Ok(())
}

/// Runs one text alone, two texts of one length, and two texts of different lengths; in one piece and in chunks that do
/// not divide the lengths.
#[test]
fn generation_matches_tokens_of_transformers() -> Result<()> {
    for model in Checkpoint::all("causal_lm") {
        let golden = Decoded::of(&model.path)?;
        let [one, other] = [0, 1].map(|row| spelled(&golden.ids[row][..7]));
        let [made, others] = [0, 1].map(|row| spelled(&golden.greedy[row]));
        let shorter = spelled(&golden.ids[1][..3]);
        for (prompts, chunk, expected) in [
            (&[&one][..], "2048", &[Some(&made)][..]),
            (&[&one, &other], "2048", &[Some(&made), Some(&others)]),
            (&[&one, &other], "3", &[Some(&made), Some(&others)]),
            (&[&shorter, &one], "4", &[None, Some(&made)]),
        ] {
            let prompts = prompts.iter().flat_map(|ids| ["--ids", ids]);
            let printed = model.printed(&prompts.chain(["--max-tokens", "6", "--chunk", chunk]).collect::<Vec<_>>());
            let lines: Vec<_> = printed.lines().collect();
            assert_eq!(lines.len(), expected.len(), "{model}");
            for (line, wanted) in lines.iter().zip(expected) {
                assert!(wanted.is_none_or(|tokens| line == tokens), "{model}: {printed}, expected {wanted:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn generation_with_every_dtype_and_cache_returns_tokens() {
    for model in ["llama", "deepseek_v3", "gpt_oss_mxfp4", "qwen3_next"] {
        for dtype in ["f32", "bf16", "f16"] {
            for cache in ["f32", "bf16", "f16", "q8"] {
                let args = ["--ids", "5,7,9,11,2,3,8", "--max-tokens", "4", "--dtype", dtype, "--kv-cache", cache];
                let made = Checkpoint::of("causal_lm", model).printed(&args);
                assert_eq!(made.trim().split(',').count(), 4, "{model}, {dtype}, {cache}: {made}");
            }
        }
    }
}

#[test]
fn causal_lm_error_for_encoder_lists_known_decoders() {
    let mut command = command("causal_lm");
    command.args(["--model", "tests/sentence_embedding/models/bert", "--ids", "1"]);
    let said = run(command).stderr;
    let (_, known) = said.split_once("model_type is \"bert\", expected one of ").expect("it names them");
    let known: Vec<_> = known.trim().split(", ").collect();
    assert_eq!(known.len(), 44, "{known:?}");
    for name in known {
        assert!(candle_attention::hf::architectures().any(|other| other == name), "{name}");
    }
}

#[test]
fn sentence_embedding_file_contains_its_sentences() {
    let args = ["man", "a \"man\"\teats", "the sky"];
    let bytes = Checkpoint::of("sentence_embedding", "bert").written("--out", &args);
    let (_, metadata) = ::safetensors::SafeTensors::read_metadata(&bytes).expect("a file of safetensors");
    let list = &metadata.metadata().as_ref().expect("metadata")["sentences"];
    assert_eq!(serde_json::from_str::<Vec<String>>(list).expect("a list"), args);
}

/// Checks the mean over the tokens after the prompt, with the special token at the end and without the one at the
/// beginning, as sentence-transformers computes it. The prompt "" is none.
#[test]
fn sentence_embedding_without_prompt_is_mean_over_tokens_after_it() -> Result<()> {
    for model in ["bert", "xlm-roberta", "modernbert"] {
        let checkpoint = Checkpoint::of("sentence_embedding", model);
        let vb = weights::open(checkpoint.path.join("model.safetensors"), DType::F32, &Device::Cpu)?;
        let encoder = Encoder::load(&checkpoint.config(), vb, |_, _| {})?;
        let tokenizer = SimpleTokenizer::from_file(checkpoint.path.join("tokenizer.json"))?;
        for prompt in ["", "the sky ", "a man on"] {
            let folder = tempfile::tempdir()?;
            copy(&checkpoint.path, folder.path())?;
            let write = |file: &str, json: Value| std::fs::write(folder.path().join(file), json.to_string());
            write("1_Pooling/config.json", json!({"pooling_mode": ["mean"], "include_prompt": false}))?;
            let prompts = json!({"prompts": {"query": prompt}, "default_prompt_name": "query"});
            write("config_sentence_transformers.json", prompts)?;
            let copied = Checkpoint { example: "sentence_embedding", path: folder.path().into() };
            let sentences = ["man eats", " the sky is blue"];
            let found = safetensors::load_buffer(&copied.written("--out", &sentences), &Device::Cpu)?;

            let prompt_tokens = tokenizer.encode_with(prompt, SpecialTokens::Without)?.ids.len();
            let unpooled = if prompt.is_empty() { 0 } else { 1 + prompt_tokens };
            let mut means = Vec::new();
            for sentence in sentences {
                let ids = tokenizer.encode(&format!("{prompt}{sentence}"))?.ids;
                means.push(encoder.forward(&[&ids])?.narrow(0, unpooled, ids.len() - unpooled)?.mean(0)?);
            }
            let means = Tensor::stack(&means, 0)?;
            let expected = means.broadcast_div(&means.sqr()?.sum_keepdim(1)?.sqrt()?)?;
            let error = relative_error(&found["embeddings"].to_dtype(DType::F64)?, &expected.to_dtype(DType::F64)?);
            assert!(error < 1e-5, "{model}, {prompt:?}: {error:e}");
        }
    }
    Ok(())
}

/// Checks that the picture is lightest where the class token attends to.
#[test]
#[cfg(feature = "plot")]
fn attention_map_is_drawn_over_input_picture() -> Result<()> {
    let device = std::env::var("TEST_DEVICE").unwrap_or("cpu".into());
    for model in Checkpoint::all("image_embedding") {
        let png = model.written("--attention", &[PICTURE, "--head", "1", "--device", &device]);
        let mut reader = png::Decoder::new(std::io::Cursor::new(png)).read_info().expect("a PNG");
        let mut pixels = vec![0; reader.output_buffer_size().expect("a small picture")];
        let info = reader.next_frame(&mut pixels).expect("pixels");
        let golden = model.tensors("golden.safetensors");
        let (_, rows, columns) = golden["pixels"].dims3()?;
        assert_eq!((info.height as usize, info.width as usize), (rows, columns), "{model}");
        let pixels = Tensor::from_vec(pixels, (rows / 8, 8, columns / 8, 8, 3), &Device::Cpu)?.to_dtype(DType::F32)?;
        // The light of each patch's middle.
        let light = pixels.narrow(1, 3, 2)?.narrow(3, 3, 2)?.sum((1, 3, 4))?.flatten_all()?.to_vec1::<f32>()?;
        let weights = golden["attention.1"].i(1)?.flatten_all()?;
        let [most, least] = [weights.argmax(0)?, weights.argmin(0)?].map(|patch| patch.to_scalar::<u32>());
        assert!(light[most? as usize] > light[least? as usize] + 500.0, "{model}: {light:?}");
    }
    Ok(())
}
