//! `tokenize_attend` over files: exports, folders of `models/`, and Hugging Face checkpoints.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{VarBuilder, VarMap, layer_norm};

use crate::common::{Golden, assert_close, models};
use crate::process::{SENTENCE, json, run, tensor};

#[test]
fn a_folder_with_an_embedding_gives_pytorch_numbers() {
    for name in ["frontend_48", "gqa_48", "mqa_48", "frontend_1536"] {
        let value = json(&[SENTENCE, "--model", name]);
        assert_close(&tensor(&value["output"]), Golden::open(name).get("main", "expected_f64"), 2e-6, name);
    }
}

#[test]
fn every_folder_of_models_runs_or_says_why_not() {
    for entry in std::fs::read_dir(models()).expect("models/ is there") {
        let entry = entry.expect("models/ can be listed");
        let name = entry.file_name().into_string().expect("folders have plain names");
        if !entry.path().join("config.json").is_file() {
            continue;
        }
        let run = run(&["hello world how", "--model", &name]);
        match run.code {
            Some(0) => assert!(run.stdout.contains("output    (1, 3, "), "{name}: {}", run.stdout),
            Some(1) => {
                assert!(run.stderr.starts_with("error: ") && run.stderr.lines().count() == 1, "{name}: {}", run.stderr);
                assert!(run.stderr.contains("choose another folder"), "{name}: {}", run.stderr);
                let layer = &Golden::open_config(&name)["layer"];
                assert!(layer.get("num_heads").is_none() || layer.get("key_size").is_some(), "{name}: {}", run.stderr);
            }
            code => panic!("{name} ended with {code:?}: {}", run.stderr),
        }
    }
}

#[test]
fn an_export_is_recognised_in_both_formats() {
    let [from_safetensors, from_pth] = ["model.safetensors", "model.pth"]
        .map(|file| json(&[SENTENCE, "--weights", &format!("models/book_mha/{file}"), "--heads", "2"]));
    assert_close(&tensor(&from_safetensors["output"]), &tensor(&from_pth["output"]), 0.0, "formats");
    let described = from_pth["weights"].as_str().expect("a description");
    assert_eq!(described, "models/book_mha/model.pth (layout book, causal by its mask buffer)");
    assert!(from_pth["embedding"].as_str().expect("a description").contains("drawn after torch.manual_seed(0)"));
}

#[test]
fn a_stack_of_heads_counts_itself() {
    let value = json(&[SENTENCE, "--weights", "models/book_stack/model.safetensors"]);
    assert_eq!((&value["num_heads"], &value["output_shape"]), (&2.into(), &serde_json::json!([1, 6, 4])));
}

#[test]
fn an_ambiguous_export_runs_once_its_layout_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, heads, readings) in [
        ("packed_by_head", "3", "`packed:query_key_value` (ChatGLM) or as `packed:query_key_value:by-head` ("),
        ("raw_square", "1", "`raw:book` or as `raw-transposed:book`"),
    ] {
        // Next to the config.json of models/, which says what it is, and away from it.
        let beside = format!("models/{name}/model.safetensors");
        let alone = folder.path().join(format!("{name}.safetensors"));
        std::fs::copy(models().join(name).join("model.safetensors"), &alone).expect("a copy");
        let file = ["hello", "--weights", alone.to_str().expect("a path"), "--heads", heads];
        let refused = run(&file);
        assert_eq!((refused.code, refused.stderr.lines().count()), (Some(1), 1), "{}", refused.stderr);
        assert!(refused.stderr.contains(readings), "{}", refused.stderr);
        let layout = Golden::open_config(name)["layout"].as_str().expect("a layout").to_string();
        let named = json(&[&file[..], &["--layout", &layout]].concat());
        let known = json(&["hello", "--weights", &beside, "--heads", heads]);
        assert_close(&tensor(&named["output"]), &tensor(&known["output"]), 0.0, name);
    }
}

#[test]
fn an_embedding_within_the_file_is_used() {
    let value = json(&[SENTENCE, "--weights", "models/frontend_48/prefixed.safetensors", "--heads", "4"]);
    assert_close(&tensor(&value["output"]), Golden::open("frontend_48").get("main", "expected_f64"), 2e-6, "output");
    assert_eq!(value["embedding"], "model.layers.0.self_attn.embedding.weight");
}

#[test]
fn a_tokenizer_file_takes_the_place_of_the_seven_words() {
    let value = json(&[SENTENCE, "--tokenizer", "models/frontend_48/tokenizer.json", "--model", "frontend_48"]);
    assert_eq!(value["ids"], serde_json::json!([[1, 2, 3, 4, 5, 6]]));
}

/// A Hugging Face checkpoint as `save_pretrained` writes it, tiny and random: (B, T, E) of the layer's input and the
/// output that its attention has to give.
struct HuggingFace {
    folder: tempfile::TempDir,
    hidden: Tensor,
    layer: MultiHeadAttention,
    mask: AttentionMask,
}

const WIDTH: usize = 12;
const HEADS: usize = 3;

/// Builds the model's first steps from a VarMap under the model's own names, and saves exactly those variables.
fn checkpoint(model_type: &str, config: serde_json::Value) -> Result<HuggingFace> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let ids = Tensor::new(&[[1u32, 2, 3, 4, 5, 6]], &Device::Cpu)?;
    let random =
        |name: &str, rows| vb.get_with_hints((rows, WIDTH), name, candle_nn::Init::Randn { mean: 0., stdev: 1. });
    let cfg = MultiHeadAttentionConfig::new(WIDTH, HEADS).with_bias(true);
    let table = |tokens: Tensor, positions: Tensor| -> Result<Tensor> {
        let tensors =
            HashMap::from([("embedding.weight".into(), tokens), ("position_embedding.weight".into(), positions)]);
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
        EmbeddingLayer::new(&EmbeddingConfig::new(7, WIDTH).with_max_positions(9), vb)?.forward(&ids)
    };
    let (hidden, layer, mask) = match model_type {
        "bert" => {
            let vb = vb.pp("bert");
            let embeddings = |name: &str, rows| random(&format!("bert.embeddings.{name}.weight"), rows);
            let segment = embeddings("token_type_embeddings", 2)?.narrow(0, 0, 1)?;
            let hidden = table(embeddings("word_embeddings", 7)?, embeddings("position_embeddings", 9)?)?
                .broadcast_add(&segment)?;
            let norm = layer_norm(WIDTH, 1e-12, vb.pp("embeddings.LayerNorm"))?;
            let layer = MultiHeadAttention::load(&cfg, WeightLayout::Bert, vb.pp("encoder.layer.0.attention"))?;
            (norm.forward(&hidden)?, layer, AttentionMask::none())
        }
        _ => {
            let hidden = table(random("wte.weight", 7)?, random("wpe.weight", 9)?)?;
            let norm = layer_norm(WIDTH, 1e-5, vb.pp("h.0.ln_1"))?;
            let layer = MultiHeadAttention::load(&cfg, WeightLayout::Conv1d, vb.pp("h.0.attn"))?;
            (norm.forward(&hidden)?, layer, AttentionMask::causal())
        }
    };
    let folder = tempfile::tempdir()?;
    vars.save(folder.path().join("model.safetensors"))?;
    std::fs::write(folder.path().join("config.json"), config.to_string())?;
    std::fs::copy(models().join("frontend_48/tokenizer.json"), folder.path().join("tokenizer.json"))?;
    Ok(HuggingFace { folder, hidden, layer, mask })
}

fn path(folder: &Path) -> &str {
    folder.to_str().expect("a UTF-8 path")
}

#[test]
fn a_hugging_face_folder_runs_with_the_models_own_embedding() -> Result<()> {
    for (model_type, config) in [
        ("bert", serde_json::json!({"model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS})),
        ("gpt2", serde_json::json!({"model_type": "gpt2", "n_embd": WIDTH, "n_head": HEADS})),
    ] {
        let HuggingFace { folder, hidden, layer, mask } = checkpoint(model_type, config)?;
        let value = json(&[SENTENCE, "--model", path(folder.path())]);
        let expected = layer.forward_with(candle_attention::AttentionInput::new(&hidden).with_mask(&mask))?;
        assert_close(&tensor(&value["output"]), &expected, 1e-6, model_type);
        let refused = run(&[SENTENCE, "--model", path(folder.path()), "--layer", "1"]);
        assert!(refused.stderr.starts_with("error: --layer 1: [hf] "), "{}", refused.stderr);
    }
    Ok(())
}

/// The models of the tests of `hf` hold attention and no embedding, which is drawn then.
#[test]
fn every_kind_of_architecture_runs() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf/models");
    let mut types = std::collections::HashSet::new();
    for entry in std::fs::read_dir(models).expect("the models of the tests") {
        let folder = entry.expect("can be listed").path();
        // As many words as the image has patches where positions are those of a grid or a window.
        let refused = run(&["the cat sat", "--model", path(&folder)]).stderr;
        let grid = refused.split_once("expected the ").and_then(|(_, grid)| grid.split_once(" of the "));
        let text = match grid.and_then(|(grid, _)| grid.split_once(" × ")) {
            Some((h, w)) => vec!["cat"; h.parse::<usize>().unwrap() * w.parse::<usize>().unwrap()].join(" "),
            None => "the cat sat".to_string(),
        };
        let value = json(&[&text, "--model", path(&folder)]);
        let (weights, embedding) = (value["weights"].as_str().unwrap(), value["embedding"].as_str().unwrap());
        assert!(embedding.contains("drawn after torch.manual_seed(0)"), "{folder:?}: {embedding}");
        let config = std::fs::read_to_string(folder.join("config.json")).expect("a config.json");
        let config: serde_json::Value = serde_json::from_str(&config).expect("JSON");
        assert_eq!(weights.rsplit(' ').next(), config["model_type"].as_str(), "{folder:?}");
        types.insert(config["model_type"].to_string());
    }
    // Of what `hf` knows, those that need more than other names; docs/architectures.md has the rest.
    assert!(types.len() >= 45, "{} types ran", types.len());
}

#[test]
fn a_variant_that_is_not_supported_is_refused() -> Result<()> {
    let variant = serde_json::json!({
        "model_type": "bert", "hidden_size": WIDTH, "num_attention_heads": HEADS, "position_embedding_type": "relative_key",
    });
    let HuggingFace { folder, .. } = checkpoint("bert", variant)?;
    let refused = run(&[SENTENCE, "--model", path(folder.path())]);
    assert_eq!(refused.code, Some(1));
    assert!(refused.stderr.starts_with("error: [hf] bert: position_embedding_type is"), "{}", refused.stderr);
    Ok(())
}

/// As the tokenizer.json of all-MiniLM-L6-v2, which cuts and pads at 128 tokens.
#[test]
fn a_length_in_a_tokenizer_file_neither_pads_nor_cuts() -> Result<()> {
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(models().join("frontend_48/tokenizer.json"))?).expect("JSON");
    tokenizer["padding"] = serde_json::json!({
        "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    });
    tokenizer["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0});
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, tokenizer.to_string())?;
    assert_eq!(json(&["hello", "--tokenizer", path(&file)])["ids"], serde_json::json!([[1]]));
    let long = json(&[&vec!["you"; 200].join(" "), "--tokenizer", path(&file), "--model", "mqa_48"]);
    assert_eq!(long["lens"], serde_json::json!([200]));
    Ok(())
}
