//! What `tokenize_attend` prints and writes.

use candle_core::Tensor;

use crate::common::{Golden, assert_close, max_error, values};
use crate::process::{SENTENCE, executable, json, run, tensor};

#[test]
fn the_main_job_prints_tokens_shapes_and_a_heat_map() {
    let run = run(&[SENTENCE, "--device", "cpu"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let lines: Vec<_> = run.stdout.lines().collect();
    assert_eq!(lines[0], "tokens    hello  world  how  are  you  ?");
    assert_eq!(lines[1], "ids       1      2      3    4    5    6");
    for line in [
        "hidden    (1, 6, 1536) f32",
        "output    (1, 6, 1536), 16 heads of width 96",
        "mask      none",
        "weights   drawn as PyTorch draws them after torch.manual_seed(0)",
        "device    cpu",
        "mean of 16 heads",
    ] {
        assert!(lines.contains(&line), "no line {line:?} in\n{}", run.stdout);
    }
    let times = lines.iter().find(|line| line.starts_with("times ")).expect("a line of times");
    for step in ["weights", "tokens", "embedding", "attention"] {
        assert!(times.contains(&format!("{step} ")), "{times}");
    }
    let golden = Golden::open("frontend_1536");
    let numbers = run.stdout.split("[0, 0, ..] = [").nth(1).and_then(|rest| rest.split(", ..]").next());
    let shown: Vec<f64> =
        numbers.expect("the first numbers").split(", ").map(|n| n.parse().expect("a number")).collect();
    assert_eq!(shown.len(), 4);
    for (shown, exact) in shown.iter().zip(values(golden.get("main", "expected_f64"))) {
        assert!((shown - exact).abs() < 0.6e-4, "{shown} is shown for {exact}");
    }
    // A row of the map for each token, its weights below the tokens that are attended to.
    for token in ["hello", "world", "how", "are", "you", "?"] {
        let row = lines.iter().any(|line| line.trim_start().starts_with(&format!("{token} ")) && line.contains('.'));
        assert!(row, "no row for {token:?}");
    }
}

#[test]
fn the_main_job_gives_pytorch_numbers() {
    let golden = Golden::open("frontend_1536");
    let value = json(&[SENTENCE, "--device", "cpu"]);
    assert_close(&tensor(&value["output"]), golden.get("main", "expected_f64"), 2e-6, "output");
    let weights = golden.get("main", "attn_weights_f64").squeeze(0).expect("one sequence");
    assert_close(&tensor(&value["attention"]), &weights, 2e-6, "weights");
    assert_eq!(value["ids"], serde_json::json!([[1, 2, 3, 4, 5, 6]]));
    assert_eq!(
        (&value["hidden_shape"], &value["num_heads"]),
        (&serde_json::json!([1, 6, 1536]), &serde_json::json!(16))
    );
}

#[test]
fn padding_changes_nothing_for_a_text_in_a_batch() {
    let texts = ["hello world", "how are you ?", "hello"];
    let batch = json(&[&texts[..], &["--model", "frontend_48"]].concat());
    assert_eq!(batch["lens"], serde_json::json!([2, 4, 1]));
    assert_eq!(batch["tokens"][2], serde_json::json!(["hello", "<pad>", "<pad>", "<pad>"]));
    let batched = tensor(&batch["output"]);
    for (row, text) in texts.iter().enumerate() {
        let alone = tensor(&json(&[text, "--model", "frontend_48"])["output"]);
        let len = alone.dim(1).expect("a length");
        let row = batched.narrow(0, row, 1).and_then(|t| t.narrow(1, 0, len)).expect("the text's own rows");
        assert_close(&row, &alone, 1e-6, text);
    }
    let shown = run(&[&texts[..], &["--model", "frontend_48"]].concat()).stdout;
    assert!(shown.contains("mask      padding is hidden (lengths 2, 4, 1)"), "{shown}");
    assert_eq!(shown.matches("mean of 4 heads").count(), 3, "a map for each text");
}

#[test]
fn causal_hides_later_tokens() {
    let value = json(&[SENTENCE, "--model", "frontend_48", "--causal"]);
    let weights = tensor(&value["attention"]).to_vec3::<f64>().expect("(B · H, T, T)");
    for (i, row) in weights.iter().flat_map(|head| head.iter().enumerate()) {
        assert!(row.iter().enumerate().all(|(j, &weight)| (weight > 0.0) == (j <= i)), "query {i}: {row:?}");
    }
}

#[test]
fn half_precision_runs_and_comes_close() {
    let exact = tensor(&json(&[SENTENCE, "--model", "frontend_48"])["output"]);
    for (dtype, tolerance) in [("f16", 2e-3), ("bf16", 2e-2), ("f64", 1e-6)] {
        let value = json(&[SENTENCE, "--model", "frontend_48", "--dtype", dtype]);
        assert_eq!(value["dtype"], dtype);
        let error = max_error(&tensor(&value["output"]), &exact);
        assert!(error > 0.0 && error < tolerance, "{dtype} is off by {error:e}");
    }
}

#[test]
fn another_seed_gives_other_weights() {
    let [zero, also_zero, one]: [Tensor; 3] =
        ["0", "0", "1"].map(|seed| tensor(&json(&["hello", "--seed", seed])["output"]));
    assert_close(&zero, &also_zero, 0.0, "the same seed");
    assert!(max_error(&zero, &one) > 0.01);
}

#[test]
fn one_head_can_be_shown() {
    let shown = run(&[SENTENCE, "--head", "3"]);
    assert!(shown.stdout.contains("head 3 of 16"), "{}", shown.stdout);
}

#[test]
fn punctuation_may_be_split_off() {
    let value = json(&["hello world how are you?", "--punctuation"]);
    assert_eq!(value["ids"], serde_json::json!([[1, 2, 3, 4, 5, 6]]));
}

#[test]
fn without_a_vocabulary_the_words_of_the_text_are_it() {
    let note = "the words of the text are the vocabulary, since no file gives one";
    let mut unknown = vec![vec!["the cat sat on the mat"]];
    unknown.push(vec!["the cat sat on the mat", "--weights", "models/book_mha/model.safetensors", "--heads", "2"]);
    unknown.push(vec!["the cat sat on the mat", "--model", "book_mha"]);
    for args in unknown {
        let value = json(&args);
        assert_eq!(value["ids"], serde_json::json!([[1, 2, 3, 4, 1, 5]]), "{args:?}");
        assert_eq!(value["words"], note);
        assert!(run(&args).stdout.contains(&format!("\nwords     {note}\n")));
    }
    let value = json(&["the cat?", "a cat", "--punctuation"]);
    assert_eq!(value["ids"], serde_json::json!([[1, 2, 3], [4, 2, 0]]));
    assert_eq!(json(&["how are you"])["words"], serde_json::Value::Null, "the tutorial has these");
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_error() {
    // The long JSON does not fit a pipe's buffer, so the write fails once the reader has left.
    let run = std::process::Command::new("sh")
        .args(["-c", "\"$0\" 'hello world how are you ?' --json | head -c 10"])
        .arg(executable("tokenize_attend"))
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("a shell");
    assert_eq!(String::from_utf8_lossy(&run.stdout), "{\"attentio");
    assert!(!String::from_utf8_lossy(&run.stderr).contains("panicked"));
}

#[cfg(feature = "plot")]
#[test]
fn pictures_are_written_as_svg_and_png() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).to_str().expect("a UTF-8 path").to_string();
    assert_eq!(run(&[SENTENCE, "--model", "frontend_48", "--plot", &file("heads.svg")]).code, Some(0));
    let svg = std::fs::read_to_string(file("heads.svg")).expect("the picture");
    assert!(svg.starts_with("<svg") || svg.starts_with("<?xml"), "{}", &svg[..60]);
    for caption in ["head 0", "head 3", "hello", SENTENCE] {
        assert!(svg.contains(caption), "no {caption:?} in the picture");
    }
    assert_eq!(run(&["hello world", "how are you ?", "--plot", &file("two.png")]).code, Some(0));
    for name in ["two-1.png", "two-2.png"] {
        let png = std::fs::read(file(name)).expect("the picture");
        assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"), "{name}");
    }
}
