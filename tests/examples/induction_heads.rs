//! `induction_heads`: the training, what it leaves behind, and the trained model of `models/`.

use std::path::Path;

use crate::common::models;
use crate::process::{Run, run_example, shown};

fn train(out: &Path, options: &[&str]) -> Run {
    let out = out.to_str().expect("a UTF-8 path");
    run_example("induction_heads", &[&["--out", out], options].concat())
}

/// The steps of the rows that a run prints.
fn steps(run: &Run) -> Vec<usize> {
    assert_eq!(run.code, Some(0), "{}", run.stderr);
    run.stdout
        .lines()
        .filter(|line| line.contains(" %  "))
        .map(|row| row[..5].trim().parse().expect("a step"))
        .collect()
}

#[test]
fn a_training_that_stops_goes_on_from_its_checkpoint() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("new");
    let without = train(&out, &["--resume"]);
    assert_eq!(without.code, Some(1));
    assert!(without.stderr.contains("run without --resume first"), "{}", without.stderr);

    let first = train(&out, &["--steps", "3", "--save-every", "2"]);
    assert_eq!(steps(&first), [0, 2, 3]);
    assert!(first.stdout.contains("no induction head has formed yet after 3 steps"), "{}", first.stdout);
    let again = train(&out, &["--steps", "4", "--resume"]);
    assert_eq!(steps(&again), [4]);
    let row = |run: &Run, step: &str| run.stdout.lines().find(|line| line.trim().starts_with(step)).map(String::from);
    assert_ne!(row(&first, "3"), row(&again, "4"), "the weights do not change");
    assert_eq!(steps(&train(&out, &["--steps", "4", "--resume"])), [0; 0], "nothing is left to do");

    #[cfg(feature = "plot")]
    for picture in ["loss", "before", "after"] {
        let svg = std::fs::read_to_string(out.join(picture).with_extension("svg")).expect("an SVG");
        assert!(svg.contains(if picture == "loss" { "loss (nats)" } else { "Second layer" }), "{picture}");
        assert!(std::fs::read(out.join(picture).with_extension("png")).expect("a PNG").starts_with(b"\x89PNG"));
    }
    let shown = shown(&["the cat sat", "--model", out.to_str().expect("a UTF-8 path")]);
    assert_eq!(shown.line("output"), "(1, 3, 64), 2 heads of width 32");

    let other = models().join("book_mha/model.safetensors");
    std::fs::copy(other, out.join("checkpoint.safetensors")).expect("a copy");
    let refused = train(&out, &["--resume"]);
    assert!(refused.stderr.contains("is no checkpoint of this program"), "{}", refused.stderr);
}

/// Words that repeat: of the second layer, a head attends to the token after the previous copy; of the first, one
/// attends to the token before.
#[test]
fn the_trained_model_has_an_induction_head() {
    assert!(std::fs::metadata(models().join("induction_heads/model.safetensors")).expect("the model").len() < 300_000);
    let block = ["river", "said", "blue", "fish", "over", "night", "come", "wind", "book", "she", "we", "tree"];
    let text = [block, block].concat().join(" ");
    let queries = block.len()..2 * block.len() - 1;
    // The mean over queries of the weight on a key, over both heads.
    let weight_on = |layer: &[&str], key: &dyn Fn(usize) -> usize| {
        let map = shown(&[&[&text, "--model", "induction_heads"], layer].concat()).maps().swap_remove(0);
        queries.clone().map(|query| map[query][key(query)]).sum::<f64>() / queries.len() as f64
    };
    let copied = weight_on(&[], &|query| query + 1 - block.len());
    assert!(copied > 0.8, "{copied} of the weight is on the token after the previous copy");
    let previous = weight_on(&["--layer", "0"], &|query| query - 1);
    assert!(previous > 0.3, "{previous} of the weight is on the token before");
}
