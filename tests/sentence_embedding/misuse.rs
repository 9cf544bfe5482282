//! Mistakes, each said in one line.

use std::fs;

use serde_json::json;

use crate::checkpoint;
use crate::process::Checkpoint;

#[track_caller]
fn fails(model: &Checkpoint, args: &[&str], message: &str) {
    assert_eq!(model.run(args).error(), message);
}

#[test]
fn a_command_line_that_says_too_little_or_nonsense_is_refused() {
    for (args, message) in [
        (&["--batch", "0", "man"][..], "number would be zero for non-zero type"),
        (&[], "<TEXT|--file <FILE>>"),
        (&["man", "--model-id", "a/b"], "cannot be used with"),
        (&["man", "--dtype", "f8"], "possible values: f32, bf16, f16, f64"),
    ] {
        let run = checkpoint("bert").run(args);
        assert_eq!(run.code, Some(2), "{args:?}");
        let text = run.stderr;
        assert!(text.contains(message) || (args.is_empty() && text.contains("TEXT")), "{args:?}: {text}");
    }
}

#[test]
fn files_that_are_not_there_are_named() {
    let nowhere = Checkpoint::at("sentence_embedding", "/nowhere");
    fails(&nowhere, &["man"], "[sentence_embedding] /nowhere has no config.json");
    let copy = checkpoint("bert").copied();
    let path = copy.path.display();
    fs::write(copy.file("blank.txt"), "\n  \n").unwrap();
    let blank = format!("{path}/blank.txt");
    fails(&copy, &["--file", &blank], "[sentence_embedding] there is no text");
    let absent = "No such file or directory (os error 2)";
    let message = format!("[sentence_embedding] cannot read /nowhere.txt: {absent}");
    fails(&copy, &["--file", "/nowhere.txt"], &message);
    fs::rename(copy.file("tokenizer.json"), copy.file("tokenizer")).unwrap();
    fails(&copy, &["man"], &format!("[tokenizer] cannot read \"{path}/tokenizer.json\": {absent}"));
    fs::remove_file(copy.file("1_Pooling/config.json")).unwrap();
    fails(&copy, &["man"], &format!("[sentence_embedding] cannot read {path}/1_Pooling/config.json: {absent}"));
}

/// A checkpoint, its file, a field of it, the value that it gets, and what is said of that.
const CASES: &str = r#"
bert config.json /model_type "llama" => [encoder] model_type is "llama", expected one of bert, distilbert, modernbert, mpnet, nomic_bert, roberta, xlm-roberta
bert config.json /hidden_act "magic" => [encoder] the activation "magic" is not one of Candle's
bert config.json /position_embedding_type "relative_key" => [hf] bert: position_embedding_type is "relative_key", which is not supported, expected "absolute"
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
        let copy = checkpoint(model).copied();
        copy.edit(file, |json| {
            let (parent, key) = field.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = serde_json::from_str(value).unwrap();
        });
        fails(&copy, &["--file", crate::SENTENCES], message);
    }
}

#[test]
fn a_prompt_that_is_not_there_is_an_error() {
    let (copy, file) = (checkpoint("bert").copied(), "config_sentence_transformers.json");
    copy.write(file, &json!({"prompts": {}, "default_prompt_name": "query"}));
    let message = format!("[sentence_embedding] {file} has no prompt \"query\", which it names as the default");
    fails(&copy, &["man"], &message);
}

#[test]
fn a_token_that_the_model_has_no_row_for_is_named() {
    let copy = checkpoint("distilbert").copied();
    copy.edit("tokenizer.json", |json| json["model"]["vocab"]["extra"] = 1000.into());
    let message = "[embedding] id 1000 at position 1 is not below the vocabulary size";
    fails(&copy, &["extra"], &format!("{message} {}", copy.json("config.json")["vocab_size"]));
}

#[test]
fn weights_that_are_not_there_are_named() {
    let tables = ["embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"];
    let biases = ["encoder.layer.0.output.LayerNorm.bias", "encoder.layer.0.intermediate.dense.bias"];
    for name in [tables, biases].concat() {
        let copy = checkpoint("bert").copied();
        copy.edit_weights(|tensors| _ = tensors.remove(name).expect(name));
        let run = copy.run(&["man"]);
        let error = run.error();
        assert!(error.contains(&format!("{name} is missing")), "{error}");
    }
    let copy = checkpoint("bert").copied();
    let without = |name: &str| copy.edit_weights(|tensors| _ = tensors.remove(name).expect(name));
    without("encoder.layer.1.output.dense.weight");
    let missing = "encoder.layer.1.output.dense.weight is missing; there are \"encoder.layer.1.output.dense.bias\"";
    fails(&copy, &["man"], &format!("[weights] {missing}"));
    without("embeddings.word_embeddings.weight");
    let message = "[checkpoint] there is no weight below any of embeddings.word_embeddings, embeddings.tok_embeddings";
    fails(&copy, &["man"], message);
}

#[cfg(not(feature = "hub"))]
#[test]
fn without_the_feature_the_hub_is_refused_with_the_way_to_it() {
    let run = crate::process::run_example("sentence_embedding", &["man", "--model-id", "org/name"]);
    let way = "run again with `cargo run --features hub --example sentence_embedding ..`";
    assert_eq!(run.error(), format!("--model-id needs the hub: {way}"));
}
