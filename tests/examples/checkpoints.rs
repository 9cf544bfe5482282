//! `tokenize_attend` over files: exports, folders of `models/`, and Hugging Face checkpoints.

use std::collections::HashMap;

use crate::common::{Golden, models};
use crate::output::{assert_close_maps, assert_first};
use crate::process::{Checkpoint, SENTENCE, run, shown};

#[test]
fn a_folder_with_an_embedding_gives_pytorch_numbers() {
    for name in ["frontend_48", "gqa_48", "mqa_48"] {
        assert_first(&shown(&[SENTENCE, "--model", name]), name);
    }
}

#[test]
fn every_folder_of_models_runs_or_says_why_not() {
    for entry in std::fs::read_dir(models()).expect("models/ is there") {
        let name = entry.expect("models/ can be listed").file_name().into_string().expect("folders have plain names");
        if !models().join(&name).join("config.json").is_file() {
            continue;
        }
        let run = run(&["hello world how", "--model", &name]);
        match run.code {
            Some(0) => assert!(run.line("output").starts_with("(1, 3, "), "{name}: {}", run.stdout),
            Some(1) => {
                assert!(run.error().starts_with('['), "{name}: {}", run.stderr);
                // One of self-attention with weights runs.
                let layer = &Golden::open_config(&name)["layer"];
                let has_weights = models().join(&name).join("model.safetensors").is_file();
                let is_cross = layer.get("key_size").is_some();
                assert!(layer.get("num_heads").is_none() || !has_weights || is_cross, "{name}: {}", run.stderr);
            }
            code => panic!("{name} ended with {code:?}: {}", run.stderr),
        }
    }
}

#[test]
fn an_export_is_recognised_in_both_formats() {
    let [from_safetensors, from_pth] = ["model.safetensors", "model.pth"]
        .map(|file| shown(&[SENTENCE, "--weights", &format!("models/book_mha/{file}"), "--heads", "2"]));
    assert_eq!((from_safetensors.first(), from_safetensors.maps()), (from_pth.first(), from_pth.maps()));
    assert_eq!(from_pth.line("weights"), "models/book_mha/model.pth (book)");
    assert_eq!(from_pth.line("embedding"), "drawn, since the weights hold none");
    assert_eq!(from_pth.line("mask"), "hides later tokens", "the mask buffer says so");
    for (query, row) in from_pth.maps()[0].iter().enumerate() {
        assert!(row.iter().enumerate().all(|(key, &weight)| (weight > 0.0) == (key <= query)), "{query}: {row:?}");
    }
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
        let file = ["hello world", "--weights", alone.to_str().expect("a path"), "--heads", heads];
        let refused = run(&file);
        assert!(refused.error().contains(readings), "{}", refused.stderr);
        let layout = Golden::open_config(name)["layout"].as_str().expect("a layout").to_string();
        let named = shown(&[&file[..], &["--layout", &layout]].concat());
        let known = shown(&["hello world", "--weights", &beside, "--heads", heads]);
        assert_eq!((named.first(), named.maps()), (known.first(), known.maps()), "{name}");
    }
}

#[test]
fn a_file_has_an_embedding_or_counts_its_heads() {
    let run = shown(&[SENTENCE, "--weights", "models/frontend_48/prefixed.safetensors", "--heads", "4"]);
    assert_first(&run, "frontend_48");
    assert_eq!(run.line("embedding"), "the file's");
    let stack = shown(&[SENTENCE, "--weights", "models/book_stack/model.safetensors"]);
    assert_eq!(stack.line("output"), "(1, 6, 4), 2 heads of width 2");
}

/// Two texts of different lengths, in the first layer and in one that has blocks before it.
#[test]
fn a_hugging_face_checkpoint_attends_as_transformers_says() {
    let exact = std::fs::read_to_string("tests/examples/attentions.json").expect("what make.py wrote");
    let exact: HashMap<String, Vec<Vec<Vec<Vec<f64>>>>> = serde_json::from_str(&exact).expect("JSON");
    for (checkpoint, texts) in [
        ("causal_lm/models/gpt2", ["a b", "c d e"]),
        ("sentence_embedding/models/bert", ["man eats", "the sky is blue"]),
    ] {
        let folder = format!("tests/{checkpoint}");
        for (layer, exact) in exact[checkpoint].iter().enumerate() {
            let run = shown(&[&texts[..], &["--model", &folder, "--layer", &layer.to_string()]].concat());
            assert_close_maps(&run.maps(), exact, &format!("layer {layer} of {checkpoint}"));
        }
        let refused = run(&["a", "--model", &folder, "--layer", "9"]);
        assert_eq!(refused.error(), format!("[tokenize_attend] {folder}, layer 9 is none of multi-head attention"));
    }
}

#[test]
fn a_checkpoint_that_no_example_has_a_model_of_is_refused() {
    let copy = Checkpoint::of("causal_lm", "llama").copied();
    copy.write("config.json", &serde_json::json!({"model_type": "t5"}));
    let refused = run(&["hello", "--model", copy.path.to_str().expect("a path")]);
    let message = "[causal_lm] model_type is \"t5\", expected one of";
    assert!(refused.error().starts_with(message), "{}", refused.stderr);
}

/// As the tokenizer.json of all-MiniLM-L6-v2, which cuts and pads at 128 tokens.
#[test]
fn a_length_in_a_tokenizer_file_neither_pads_nor_cuts() -> std::io::Result<()> {
    let mut tokenizer: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(models().join("frontend_48/tokenizer.json"))?).expect("JSON");
    tokenizer["padding"] = serde_json::json!({
        "strategy": {"Fixed": 128}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<pad>",
    });
    tokenizer["truncation"] =
        serde_json::json!({"direction": "Right", "max_length": 128, "strategy": "LongestFirst", "stride": 0});
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    std::fs::copy(models().join("frontend_48/model.safetensors"), &file)?;
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string())?;
    let source = ["--weights", file.to_str().expect("a path"), "--heads", "4"];
    assert_eq!(shown(&[&["hello"], &source[..]].concat()).line("ids"), "1");
    assert_eq!(shown(&[&[&*vec!["you"; 200].join(" ")], &source[..]].concat()).line("hidden"), "(1, 200, 48) f32");
    Ok(())
}
