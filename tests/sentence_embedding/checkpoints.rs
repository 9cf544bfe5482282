//! What the files of a checkpoint say, and the spellings that checkpoints have.

use std::fs;

use serde_json::{Value, json};

use crate::common::assert_close;
use crate::process::Checkpoint;
use crate::{SENTENCES, checkpoint, golden, unit, vectors};

/// The weights under other names.
fn rename(copy: &Checkpoint, name: impl Fn(&str) -> String) {
    copy.edit_weights(|tensors| *tensors = tensors.drain().map(|(own, tensor)| (name(&own), tensor)).collect());
}

#[test]
fn pooling_is_by_the_first_token_where_the_checkpoint_says_so() {
    let copy = checkpoint("bert").copied();
    let (first, mean) = (("cls", "first token"), ("mean", "mean over tokens"));
    for (pooling, (name, said)) in [
        (json!({"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}), first),
        (json!({"embedding_dimension": 16, "pooling_mode": "cls", "include_prompt": true}), first),
        (json!({"pooling_mode": "mean"}), mean),
        (json!({"word_embedding_dimension": 16}), mean),
    ] {
        copy.write("1_Pooling/config.json", &pooling);
        let got = vectors(&copy, &["--file", SENTENCES]);
        assert_close(&got, &unit(&golden("bert", name)), 1e-5, &pooling.to_string());
        let shown = copy.run(&["man"]).stdout;
        assert!(shown.contains(&format!("pooling     {said}, normalised (as 1_Pooling")), "{shown}");
    }
}

#[test]
fn vectors_keep_their_lengths_where_no_module_normalises() {
    let copy = checkpoint("roberta").copied();
    copy.edit("modules.json", |modules| _ = modules.as_array_mut().expect("a list").pop());
    assert_close(&vectors(&copy, &["--file", SENTENCES]), &golden("roberta", "mean"), 1e-5, "means");
    let shown = copy.run(&["man"]).stdout;
    assert!(shown.contains("pooling     mean over tokens (as 1_Pooling/config.json and modules.json say)"), "{shown}");
}

/// Neither modules.json nor a length: the mean, normalised, cut where the model's positions end.
#[test]
fn a_checkpoint_without_the_files_of_sentence_transformers_is_averaged() {
    for model in crate::MODELS {
        let copy = checkpoint(model).copied();
        for file in ["modules.json", "sentence_bert_config.json"] {
            fs::remove_file(copy.file(file)).expect(file);
        }
        let got = vectors(&copy, &["--file", SENTENCES]);
        assert_close(&got, &unit(&golden(model, "long")), 1e-5, model);
        let shown = copy.run(&["--file", SENTENCES]).stdout;
        let said = "pooling     mean over tokens, normalised (assumed, since there is no modules.json)";
        assert!(shown.contains(said), "{model}: {shown}");
        assert!(shown.contains("sentences   6 of 3 to 16 tokens, 1 cut at 16"), "{model}: {shown}");
    }
}

#[test]
fn the_length_is_that_of_the_first_file_that_has_one() {
    let copy = checkpoint("bert").copied();
    let cut = || {
        let shown = copy.run(&["--file", SENTENCES]).stdout;
        shown.lines().find_map(|line| line.strip_prefix("sentences   6 of 3 to ").map(str::to_string)).expect("a line")
    };
    copy.write("tokenizer_config.json", &json!({"model_max_length": 11}));
    assert_eq!(cut(), "12 tokens, 1 cut at 12");
    copy.edit("sentence_bert_config.json", |settings| settings["max_seq_length"] = Value::Null);
    assert_eq!(cut(), "11 tokens, 1 cut at 11");
    fs::remove_file(copy.file("sentence_bert_config.json")).expect("the file");
    copy.write("tokenizer_config.json", &json!({"model_max_length": 1e30}));
    assert_eq!(cut(), "16 tokens, 1 cut at 16");
    copy.write("sentence_distilbert_config.json", &json!({"max_seq_length": 9}));
    assert_eq!(cut(), "9 tokens, 2 cut at 9");
}

#[test]
fn letters_are_lowered_and_a_prompt_stands_in_front_where_the_checkpoint_says_so() {
    let copy = checkpoint("bert").copied();
    copy.edit("tokenizer.json", |tokenizer| tokenizer["normalizer"] = Value::Null);
    let [small, large] = ["the sky", "The SKY"].map(|text| vectors(&copy, &[text]));
    assert!(crate::common::max_error(&small, &large) > 1e-3, "letters matter to this tokenizer");
    copy.edit("sentence_bert_config.json", |settings| settings["do_lower_case"] = true.into());
    assert_close(&vectors(&copy, &["The SKY"]), &small, 1e-6, "lowered");

    let prompts = json!({"prompts": {"query": "a man on ", "": ""}, "default_prompt_name": "query"});
    let expected = vectors(&copy, &["a man on the sky"]);
    copy.write("config_sentence_transformers.json", &prompts);
    assert_close(&vectors(&copy, &["the sky"]), &expected, 1e-6, "after the prompt");
    let shown = copy.run(&["the sky"]).stdout;
    assert!(shown.contains("sentences   1 of 7 to 7 tokens, 0 cut at 12, each after \"a man on \""), "{shown}");
}

/// transformers saves the names under which nomic-embed-text was published, and the fields of its own; the published
/// config.json has GPT-2's.
#[test]
fn nomic_bert_loads_with_the_config_that_was_published() {
    let copy = checkpoint("nomic_bert").copied();
    copy.edit("config.json", |config| {
        *config = json!({
            "model_type": "nomic_bert", "n_embd": 16, "n_inner": 20, "n_layer": 2, "n_head": 4, "n_positions": 16,
            "vocab_size": config["vocab_size"], "type_vocab_size": 2, "layer_norm_epsilon": 1e-12,
            "activation_function": "swiglu", "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "prenorm": false,
            "qkv_proj_bias": false, "mlp_fc1_bias": false, "mlp_fc2_bias": false, "use_rms_norm": false,
        });
    });
    let expected = unit(&golden("nomic_bert", "mean"));
    assert_close(&vectors(&copy, &["--file", SENTENCES]), &expected, 1e-5, "the published config");
}

/// The names of transformers' own modules, as `state_dict` gives them.
#[test]
fn nomic_bert_loads_by_the_names_of_its_modules() {
    let copy = checkpoint("nomic_bert").copied();
    rename(&copy, |name| {
        let pairs = [
            ("encoder.layers", "layers"),
            ("emb_ln", "embeddings.LayerNorm"),
            ("attn.out_proj", "self_attn.o_proj"),
            ("fc11", "up_proj"),
            ("fc12", "gate_proj"),
            ("fc2", "down_proj"),
            ("norm1", "post_attention_layernorm"),
            ("norm2", "post_mlp_layernorm"),
        ];
        pairs.iter().fold(name.to_string(), |name, (published, module)| name.replace(published, module))
    });
    copy.edit_weights(|tensors| {
        for layer in 0..2 {
            let joint = tensors.remove(&format!("layers.{layer}.attn.Wqkv.weight")).expect("one weight");
            for (part, weight) in ["q", "k", "v"].into_iter().zip(joint.chunk(3, 0).expect("three")) {
                let name = format!("layers.{layer}.self_attn.{part}_proj.weight");
                tensors.insert(name, weight.contiguous().expect("rows"));
            }
        }
    });
    let expected = unit(&golden("nomic_bert", "mean"));
    assert_close(&vectors(&copy, &["--file", SENTENCES]), &expected, 1e-5, "the modules' names");
}

/// Below a head, as `BertForMaskedLM` saves it; and with the names that norms had in TensorFlow.
#[test]
fn a_model_below_a_head_and_the_old_names_of_norms_load() {
    for (model, prefix) in [("bert", "bert."), ("roberta", "roberta."), ("distilbert", "distilbert.")] {
        let copy = checkpoint(model).copied();
        rename(&copy, |name| {
            let old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta");
            format!("{prefix}{old}")
        });
        assert_close(&vectors(&copy, &["--file", SENTENCES]), &unit(&golden(model, "mean")), 1e-5, model);
    }
}

/// From the hub's cache, with the files that modules.json names: the model of the test below a commit.
#[cfg(feature = "hub")]
#[test]
fn a_checkpoint_of_the_hub_comes_with_its_files() {
    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    let (model, cache) = (checkpoint("bert").copied(), tempfile::tempdir().expect("a folder"));
    model.write("1_Pooling/config.json", &json!({"pooling_mode": "cls"}));
    let repo = cache.path().join("models--org--name");
    fs::create_dir_all(repo.join("refs")).expect("a folder");
    fs::create_dir_all(repo.join("snapshots")).expect("a folder");
    fs::write(repo.join("refs/main"), COMMIT).expect("a file");
    fs::rename(&model.path, repo.join("snapshots").join(COMMIT)).expect("one file system");
    let file = cache.path().join("out.safetensors");
    let output = std::process::Command::new(crate::process::executable("sentence_embedding"))
        .args(["--model-id", "org/name", "--file", SENTENCES, "--out", file.to_str().expect("UTF-8")])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("HF_HUB_CACHE", cache.path())
        .env("HF_HUB_OFFLINE", "1")
        .output()
        .expect("the example starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let tensors = candle_core::safetensors::load(&file, &candle_core::Device::Cpu).expect("vectors");
    assert_close(&tensors["embeddings"], &unit(&golden("bert", "cls")), 1e-5, "the first token's");
}
