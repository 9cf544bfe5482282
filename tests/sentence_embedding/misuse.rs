//! Mistakes, each said in one line.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::checkpoints::edit;
use crate::{copy, folder, run};

#[track_caller]
fn fails(model: &Path, args: &[&str], message: &str) {
    let run = run(model, args);
    assert_eq!(run.code, Some(1), "{}", run.stdout);
    assert_eq!((run.stdout.as_str(), run.stderr.trim_end()), ("", format!("error: {message}").as_str()));
}

#[test]
fn a_command_line_that_says_too_little_or_nonsense_is_refused() {
    for (args, message) in [
        (&["--batch", "0", "man"][..], "number would be zero for non-zero type"),
        (&[], "<TEXT|--file <FILE>>"),
        (&["man", "--model-id", "a/b"], "cannot be used with"),
        (&["man", "--dtype", "f8"], "possible values: f32, bf16, f16, f64"),
    ] {
        let run = run(&folder("bert"), args);
        assert_eq!(run.code, Some(2), "{args:?}");
        let text = run.stderr;
        assert!(text.contains(message) || (args.is_empty() && text.contains("TEXT")), "{args:?}: {text}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    fails(Path::new("/nowhere"), &["man"], "[sentence_embedding] /nowhere has no config.json");
    let copy = copy("bert");
    let path = copy.path().display();
    fs::write(copy.path().join("blank.txt"), "\n  \n").unwrap();
    let blank = format!("{path}/blank.txt");
    fails(copy.path(), &["--file", &blank], "[sentence_embedding] there is no text");
    fails(
        copy.path(),
        &["--file", "/nowhere.txt"],
        "[sentence_embedding] cannot read /nowhere.txt: No such file or directory (os error 2)",
    );
    let absent = "No such file or directory (os error 2)";
    fs::rename(copy.path().join("tokenizer.json"), copy.path().join("tokenizer")).unwrap();
    fails(copy.path(), &["man"], &format!("[tokenizer] cannot read \"{path}/tokenizer.json\": {absent}"));
    fs::remove_file(copy.path().join("1_Pooling/config.json")).unwrap();
    fails(copy.path(), &["man"], &format!("[sentence_embedding] cannot read {path}/1_Pooling/config.json: {absent}"));
}

/// A checkpoint, its file, a field of it, the value that it gets, and what is said of that.
const CASES: &str = r#"
bert config.json /model_type "llama" => [encoder] model_type is "llama", expected one of bert, distilbert, modernbert, mpnet, nomic_bert, roberta, xlm-roberta
bert config.json /hidden_act "magic" => [encoder] the activation "magic" is not one of Candle's
bert config.json /position_embedding_type "relative_key" => [hf] bert: position_embedding_type is "relative_key", which is not supported, expected "absolute"
bert config.json /intermediate_size 0 => [encoder] config.json has no intermediate_size or hidden_dim or n_inner, or it is no number above 0
nomic_bert config.json /prenorm true => [encoder] prenorm is true, which is not supported, expected false
bert sentence_bert_config.json /max_seq_length "many" => [sentence_embedding] max_seq_length is "many", expected a number of tokens
bert sentence_bert_config.json /max_seq_length 99 => [encoder] 21 tokens are more than the model's 16 positions
bert sentence_bert_config.json /max_seq_length 1 => [tokenizer] texts are cut at 1 tokens, expected more than the 2 that are added
bert sentence_bert_config.json /max_seq_length 2 => [tokenizer] texts are cut at 2 tokens, expected more than the 2 that are added
roberta sentence_bert_config.json /max_seq_length 17 => [encoder] 17 tokens are more than the model's 16 positions
bert modules.json /2/type "sentence_transformers.models.Dense" => [sentence_embedding] modules.json has Transformer, Pooling, Dense, expected Transformer, Pooling and perhaps Normalize
bert modules.json /0/path "0_Transformer" => [sentence_embedding] modules.json has its Transformer in "0_Transformer", expected it beside modules.json
bert 1_Pooling/config.json /pooling_mode_max_tokens true => [sentence_embedding] 1_Pooling/config.json pools by max_tokens and mean_tokens, expected mean or cls
bert 1_Pooling/config.json /pooling_mode "lasttoken" => [sentence_embedding] 1_Pooling/config.json pools by lasttoken, expected mean or cls
"#;

#[test]
fn what_a_checkpoint_asks_for_and_is_not_supported_is_named() {
    for (case, message) in CASES.trim().lines().map(|line| line.split_once(" => ").unwrap()) {
        let [model, file, field, value] = case.split(' ').collect::<Vec<_>>()[..] else { panic!("{case}") };
        let copy = copy(model);
        edit(copy.path(), file, |json| {
            let (parent, key) = field.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = serde_json::from_str(value).unwrap();
        });
        fails(copy.path(), &["--file", crate::SENTENCES], message);
    }
}

#[test]
fn a_prompt_that_is_not_there_is_an_error() {
    let copy = copy("bert");
    let prompts = copy.path().join("config_sentence_transformers.json");
    fs::write(&prompts, r#"{"prompts": {}, "default_prompt_name": "query"}"#).unwrap();
    let message =
        "[sentence_embedding] config_sentence_transformers.json has no prompt \"query\", which it names as the default";
    fails(copy.path(), &["man"], message);
}

#[test]
fn a_token_that_the_model_has_no_row_for_is_named() {
    let copy = copy("distilbert");
    edit(copy.path(), "tokenizer.json", |json| json["model"]["vocab"]["extra"] = 1000.into());
    let config: Value = serde_json::from_str(&fs::read_to_string(copy.path().join("config.json")).unwrap()).unwrap();
    let message = "[embedding] id 1000 at position 1 is not below the vocabulary size";
    fails(copy.path(), &["extra"], &format!("{message} {}", config["vocab_size"]));
}

#[test]
fn weights_that_are_not_there_are_named() {
    let copy = copy("bert");
    let file = copy.path().join("model.safetensors");
    let mut tensors = candle_core::safetensors::load(&file, &candle_core::Device::Cpu).unwrap();
    fs::remove_file(&file).unwrap();
    tensors.remove("encoder.layer.1.output.dense.weight").unwrap();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let missing = "encoder.layer.1.output.dense.weight is missing; there are \"encoder.layer.1.output.dense.bias\"";
    fails(copy.path(), &["man"], &format!("[weights] {missing}"));
    tensors.remove("embeddings.word_embeddings.weight").unwrap();
    fs::remove_file(&file).unwrap();
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let looked = ["bert.", "roberta.", ""]
        .map(|prefix| format!("{prefix}embeddings.word_embeddings.weight with {prefix}embeddings.LayerNorm.weight"));
    fails(
        copy.path(),
        &["man"],
        &format!("[encoder] no embeddings in the checkpoint, looked for {}", looked.join(", ")),
    );
}

#[cfg(not(feature = "hub"))]
#[test]
fn without_the_feature_the_hub_is_refused_with_the_way_to_it() {
    let run = crate::process::run_example("sentence_embedding", &["man", "--model-id", "org/name"]);
    let expected =
        "error: --model-id needs the hub: run again with `cargo run --features hub --example sentence_embedding ..`\n";
    assert_eq!((run.code, run.stderr.as_str()), (Some(1), expected));
}
