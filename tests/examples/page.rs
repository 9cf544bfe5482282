//! `--page` of every example that has it: each layer of each model is in the page.

use crate::process::{Checkpoint, Run, SENTENCE, names, run_example};

/// The page that a run writes, which has so many layers.
#[track_caller]
fn page(example: &str, args: &[&str], layers: Option<usize>) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("attention.html");
    let path = file.to_str().expect("UTF-8");
    let Run { code, stderr, .. } = run_example(example, &[args, &["--page", path]].concat());
    assert_eq!(code, Some(0), "{example} {args:?}: {stderr}");
    assert!(stderr.contains("attention.html: "), "{stderr}");
    let html = std::fs::read_to_string(file).expect("the page is there");
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</script>"), "{example} {args:?}");
    if let Some(layers) = layers {
        let found = (0..).take_while(|layer| html.contains(&format!("id=\"layer-{layer}\""))).count();
        assert_eq!(found, layers, "{example} {args:?}");
    }
    html
}

/// The number of layers that a checkpoint's config names, but for those of linear attention.
fn layers(checkpoint: &Checkpoint) -> Option<usize> {
    let json = checkpoint.json("config.json");
    let text = json.get("text_config").unwrap_or(&json);
    let layers = ["num_hidden_layers", "n_layer", "n_layers"].iter().find_map(|key| text[*key].as_u64());
    let kinds = text["layer_types"].as_array().into_iter().flatten();
    let linear = kinds.filter(|kind| *kind == "linear_attention").count();
    layers.map(|layers| layers as usize - linear)
}

/// Every checkpoint of an example has a page of its layers.
fn every_checkpoint(example: &'static str, args: &[&str]) {
    for model in names(example) {
        let checkpoint = Checkpoint::of(example, &model);
        let path = checkpoint.path.to_str().expect("UTF-8");
        let is_picture = example == "image_embedding";
        let html = page(example, &[&["--model", path], args].concat(), layers(&checkpoint).filter(|_| !is_picture));
        assert_eq!(html.contains("id=\"picture-data\""), is_picture, "{model}");
    }
}

#[test]
fn one_layer_has_a_page_of_its_tokens() {
    let html = page("tokenize_attend", &[SENTENCE], Some(1));
    for token in SENTENCE.split(' ') {
        assert!(html.contains(&format!("\"{token}\"")), "{token}");
    }
    // Keys that the layer appends, and no tokens.
    page("tokenize_attend", &["hello world", "--model", "torch_mha_bias_kv"], Some(1));
    let several = run_example("tokenize_attend", &["one", "two", "--page", "none.html"]);
    assert!(several.stderr.contains("--plot and --page show one text, found several"), "{}", several.stderr);
}

#[test]
fn every_decoder_has_a_page_of_all_layers() {
    every_checkpoint("causal_lm", &["--ids", "5,7,9,11,2", "--max-tokens", "1"]);
}

#[test]
fn encoders_of_texts_and_pictures_have_pages() {
    every_checkpoint("sentence_embedding", &["a man is eating", "another"]);
    every_checkpoint("rerank", &["what is it", "a man", "a bird"]);
    every_checkpoint("image_embedding", &["tests/image_embedding/picture.png"]);
}

#[test]
fn a_training_ends_with_a_page_of_both_layers() {
    let out = tempfile::tempdir().expect("a folder");
    let out = out.path().to_str().expect("UTF-8");
    page("induction_heads", &["--steps", "1", "--out", out], Some(2));
}
