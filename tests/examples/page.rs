//! `--page` of every example that has it: each layer of each model is in the page.

use crate::common::{Run, run};
use crate::process::{Checkpoint, SENTENCE, command, printed};

/// The models of which there is no page, and the error: layers with different numbers of heads, and layers that return
/// no weights.
const WITHOUT_PAGE: [(&str, &str); 2] = [
    (
        "dots3_note_text",
        "error: [page] layer 1 has 2 heads, 3 queries, 3 keys and 3 top keys, the layers before it 4 heads, 3 queries, \
         3 keys and 3 top keys, expected equal numbers in all layers",
    ),
    (
        "deepseek_v4",
        "error: [causal_lm] attention to compressed keys returns no weights, expected attention to keys of tokens",
    ),
];

/// Runs an example, and returns the page that it writes and the number of its layers.
#[track_caller]
fn page(example: &str, args: &[&str]) -> (String, usize) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("attention.html");
    printed(example, &[args, &["--page", file.to_str().expect("UTF-8")]].concat());
    let html = std::fs::read_to_string(file).expect("the page is there");
    assert!(html.starts_with("<!doctype html>") && html.trim_end().ends_with("</script>"), "{example} {args:?}");
    let layers = (0..).take_while(|layer| html.contains(&format!("id=\"layer-{layer}\""))).count();
    (html, layers)
}

/// Counts the layers of each page. Layers of linear attention are not in it.
#[test]
fn page_of_every_checkpoint_has_all_layers() {
    for (example, args) in [
        ("causal_lm", &["--ids", "5,7,9,11,2", "--max-tokens", "1"][..]),
        ("sentence_embedding", &["a man is eating", "another"]),
        ("rerank", &["what is it", "a man", "a bird"]),
        #[cfg(feature = "plot")]
        ("image_embedding", &["tests/image_embedding/picture.png"]),
    ] {
        for model in Checkpoint::all(example) {
            let config = model.config();
            if WITHOUT_PAGE.iter().any(|(model_type, _)| config["model_type"] == *model_type) {
                continue;
            }
            let is_picture = example == "image_embedding";
            let text = config.get("text_config").filter(|_| !is_picture).unwrap_or(&config);
            let layers = ["num_hidden_layers", "n_layer", "n_layers"].iter().find_map(|key| text[*key].as_u64());
            let kinds = text["layer_types"].as_array().into_iter().flatten();
            let linear = kinds.filter(|kind| *kind == "linear_attention").count();
            let (html, found) = page(example, &[&["--model", model.path.to_str().expect("UTF-8")], args].concat());
            // CLIP's config does not say.
            assert_eq!(found, layers.map_or(2, |layers| layers as usize - linear), "{model}");
            assert_eq!(html.contains("layer 3 of the model"), linear > 0, "{model}");
            assert_eq!(html.contains("id=\"picture-data\""), is_picture, "{model}");
        }
    }
}

#[test]
fn page_of_layers_without_weights_or_with_different_numbers_of_heads_is_an_error() {
    for (name, expected) in WITHOUT_PAGE {
        let model = Checkpoint::of("causal_lm", name);
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("attention.html");
        let mut causal_lm = command("causal_lm");
        causal_lm
            .arg("--model")
            .arg(&model.path)
            .args(["--ids", "5,7,9", "--max-tokens", "1"])
            .arg("--page")
            .arg(&file);
        let Run { code, stderr, .. } = run(causal_lm);
        assert_eq!((code, stderr.trim()), (Some(1), expected));
        assert!(!file.exists());
    }
}

#[test]
fn page_of_tokenize_attend_and_induction_heads_has_their_layers() {
    let (html, layers) = page("tokenize_attend", &[SENTENCE]);
    assert_eq!(layers, 1);
    for token in SENTENCE.split(' ') {
        assert!(html.contains(&format!("\"{token}\"")), "{token}");
    }
    // The first of several texts, without padding, with keys that the layer appends and that are no tokens.
    assert_eq!(page("tokenize_attend", &["hello world", "how are you", "--model", "torch_mha_bias_kv"]).1, 1);
    let out = tempfile::tempdir().expect("a folder");
    assert_eq!(page("induction_heads", &["--steps", "1", "--out", out.path().to_str().expect("UTF-8")]).1, 2);
}
