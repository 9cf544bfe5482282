//! Every architecture against transformers, and what must not change a vector.

use candle_core::IndexOp;

use crate::common::{assert_close, max_error};
use crate::{MODELS, SENTENCES, checkpoint, golden, sentences, unit, vectors};

/// Each sentence by itself and the longest beside the shortest: padding is not seen.
#[test]
fn vectors_are_those_of_transformers_in_batches_of_any_size() {
    for model in MODELS {
        let of_batches = |batch| vectors(&checkpoint(model), &["--file", SENTENCES, "--batch", batch]);
        let alone = of_batches("1");
        assert_close(&alone, &unit(&golden(model, "mean")), 1e-5, model);
        for batch in ["4", "32"] {
            assert_close(&of_batches(batch), &alone, 1e-6, &format!("{model}, batches of {batch}"));
        }
        let gap = max_error(&alone.i(0).unwrap(), &alone.i(1).unwrap());
        assert!(gap > 0.05, "{model}: the first two sentences are {gap} apart");
    }
}

#[test]
fn arguments_come_before_the_lines_of_the_file_and_the_order_stays() {
    let (file, odd) = (tempfile::NamedTempFile::new().unwrap(), "a \"man\"\teats");
    let args = ["man", odd, "--file", SENTENCES, "--out", file.path().to_str().unwrap()];
    checkpoint("bert").run(&args).succeeded();
    let bytes = std::fs::read(&file).unwrap();
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let list = &metadata.metadata().as_ref().unwrap()["sentences"];
    let expected = [vec!["man".to_string(), odd.to_string()], sentences()].concat();
    assert_eq!(serde_json::from_str::<Vec<String>>(list).unwrap(), expected);

    let both = &candle_core::safetensors::load(&file, &candle_core::Device::Cpu).unwrap()["embeddings"];
    assert_eq!(both.dims(), [expected.len(), 16]);
    let file = vectors(&checkpoint("bert"), &["--file", SENTENCES]);
    assert_close(&both.narrow(0, 2, sentences().len()).unwrap(), &file, 1e-6, "the file's");
    let man = sentences().iter().position(|sentence| sentence == "man").unwrap();
    assert_close(&both.i(0).unwrap(), &file.i(man).unwrap(), 1e-6, "the argument's");
}

#[test]
fn half_precision_runs_and_comes_close() {
    for model in MODELS {
        let expected = unit(&golden(model, "mean"));
        for (dtype, most) in [("f16", 1e-2), ("bf16", 5e-2)] {
            let got = vectors(&checkpoint(model), &["--file", SENTENCES, "--dtype", dtype]);
            assert_eq!(got.dtype(), candle_core::DType::F32);
            let error = max_error(&got, &expected);
            assert!(error > 1e-6 && error < most, "{model} in {dtype}: {error:e}");
        }
    }
}

#[test]
fn a_run_says_what_it_did_and_how_similar_the_sentences_are() {
    let run = checkpoint("bert").run(&["--file", SENTENCES]).succeeded();
    let lines: Vec<_> = run.stdout.lines().collect();
    let head = [
        "model       bert, 2 layers of width 16",
        "pooling     mean over tokens, normalised (as 1_Pooling/config.json and modules.json say)",
        "sentences   6 of 3 to 12 tokens, 1 cut at 12",
        "embeddings  (6, 16) f32",
        "",
        "cosine similarity",
        "        1       2       3       4       5       6",
    ];
    assert_eq!(lines[..7], head);
    let unit = unit(&golden("bert", "mean"));
    let cosines = unit.matmul(&unit.t().unwrap()).unwrap().to_vec2::<f64>().unwrap();
    for (i, (row, sentence)) in cosines.iter().zip(sentences()).enumerate() {
        let cells: String = row.iter().map(|cosine| format!(" {cosine:>7.4}")).collect();
        let shown = if sentence.len() > 50 { "a girl carries a baby on the street while the old.." } else { &sentence };
        assert_eq!(lines[7 + i], format!("{}{cells}  {shown}", i + 1));
    }
    assert_eq!(lines.len(), 13);
}

/// Thirteen and more: the nearest to each. Every sentence stands in the list twice, so that it is nearest to its
/// double.
#[test]
fn many_sentences_make_a_list_of_the_nearest() {
    let sentences = sentences();
    let twice: Vec<&str> = sentences.iter().chain(&sentences).map(String::as_str).collect();
    let run = checkpoint("bert").run(&[&twice[..], &["the\u{7} street"]].concat());
    let lines: Vec<_> = run.stdout.lines().skip(5).collect();
    assert_eq!(lines[0], "the nearest to each, by cosine similarity");
    assert_eq!(lines.len(), 14);
    assert_eq!(lines[1], " 1   1.0000  to  7  a man eats food");
    assert_eq!(lines[12], "12   1.0000  to  6  two men push carts through the woods");
    assert!(lines[13].starts_with("13 ") && lines[13].ends_with("  the\\u{7} street"), "{}", lines[13]);
}
