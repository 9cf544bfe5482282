//! What `tokenize_attend` prints and writes.

use crate::common::{Golden, values};
use crate::process::{Run, SENTENCE, executable, shown};

/// The first numbers of the output against PyTorch's of a system.
#[track_caller]
pub fn assert_first(run: &Run, system: &str) {
    let exact = values(Golden::open(system).get("main", "expected_f64"));
    let shown = run.first();
    assert_eq!(shown.len(), exact.len().min(4));
    assert!(shown.iter().zip(&exact).all(|(shown, exact)| (shown - exact).abs() < 0.6e-4), "{shown:?} for {exact:?}");
}

/// Weights as they are shown against exact ones.
#[track_caller]
pub fn assert_close_maps(shown: &[Vec<Vec<f64>>], exact: &[Vec<Vec<f64>>], what: &str) {
    let sizes = |maps: &[Vec<Vec<f64>>]| maps.iter().flatten().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(shown), sizes(exact), "{what}");
    let mut cells = shown.iter().flatten().flatten().zip(exact.iter().flatten().flatten());
    assert!(cells.all(|(shown, exact)| (shown - exact).abs() <= 0.006), "{what}: {shown:?}");
}

#[test]
fn the_main_job_prints_tokens_shapes_and_a_heat_map() {
    let run = shown(&[SENTENCE, "--device", "cpu"]);
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
    assert_first(&run, "frontend_1536");
    // A row of the map for each token, its weights below the tokens that are attended to.
    for token in ["hello", "world", "how", "are", "you", "?"] {
        let row = lines.iter().any(|line| line.trim_start().starts_with(&format!("{token} ")) && line.contains('.'));
        assert!(row, "no row for {token:?}");
    }
}

#[test]
fn the_main_job_gives_pytorch_weights() {
    let weights = Golden::open("frontend_1536").get("main", "attn_weights_f64").mean(1).expect("a mean over heads");
    let exact: Vec<Vec<Vec<f64>>> = weights.to_vec3().expect("(B, T, T)");
    assert_close_maps(&shown(&[SENTENCE]).maps(), &exact, "weights");
}

#[test]
fn padding_changes_nothing_for_a_text_in_a_batch() {
    let texts = ["hello world", "how are you ?", "hello"];
    for model in ["frontend_48", "torch_mha_bias_kv"] {
        let batch = shown(&[&texts[..], &["--model", model]].concat());
        assert_eq!(batch.line("mask"), "hides padding");
        assert!(batch.stdout.contains("\ntokens    hello  <pad>  <pad>  <pad>\nids       1      0      0      0\n"));
        let alone = texts.iter().flat_map(|text| shown(&[text, "--model", model]).maps());
        assert_eq!(batch.maps(), alone.collect::<Vec<_>>(), "{model}");
    }
}

#[test]
fn learned_keys_have_a_column() {
    let run = shown(&["hello world", "--model", "torch_mha_bias_kv"]);
    assert!(run.stdout.contains("(learned)"), "{}", run.stdout);
    assert!(run.maps()[0].iter().all(|row| row.len() == 3 && (row.iter().sum::<f64>() - 1.0).abs() < 0.02));
}

#[test]
fn half_precision_runs_and_comes_close() {
    let exact = shown(&[SENTENCE, "--model", "frontend_48"]).first();
    for (dtype, tolerance) in [("f16", 2e-3), ("bf16", 2e-2), ("f64", 1e-4)] {
        let run = shown(&[SENTENCE, "--model", "frontend_48", "--dtype", dtype]);
        assert_eq!(run.line("hidden"), format!("(1, 6, 48) {dtype}"));
        let error = run.first().iter().zip(&exact).map(|(got, exact)| (got - exact).abs()).fold(0.0, f64::max);
        assert!(error < tolerance, "{dtype} is off by {error:e}");
    }
}

#[test]
fn without_a_vocabulary_the_words_of_the_text_are_it() {
    let book = ["--weights", "models/book_mha/model.safetensors", "--heads", "2"];
    for source in [&[][..], &book, &["--model", "book_mha"]] {
        let run = shown(&[&["the cat sat on the mat"], source].concat());
        let ids: Vec<_> = run.line("ids").split_whitespace().collect();
        assert_eq!(ids, ["1", "2", "3", "4", "1", "5"], "{source:?}");
    }
}

#[cfg(unix)]
#[test]
fn a_reader_that_goes_away_is_no_error() {
    // The map does not fit a pipe's buffer, so the write fails once the reader has left.
    let text = vec!["hello"; 200].join(" ");
    let run = std::process::Command::new("sh")
        .args(["-c", "\"$0\" \"$1\" --model frontend_48 | head -c 10"])
        .args([executable("tokenize_attend").as_os_str(), text.as_ref()])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("a shell");
    assert_eq!(String::from_utf8_lossy(&run.stdout), "tokens    ");
    assert!(!String::from_utf8_lossy(&run.stderr).contains("panicked"));
}

#[cfg(feature = "plot")]
#[test]
fn pictures_are_written_as_svg_and_png() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).to_str().expect("a UTF-8 path").to_string();
    assert_eq!(crate::process::run(&[SENTENCE, "--model", "frontend_48", "--plot", &file("heads.svg")]).code, Some(0));
    let svg = std::fs::read_to_string(file("heads.svg")).expect("the picture");
    assert!(svg.starts_with("<svg") || svg.starts_with("<?xml"), "{}", &svg[..60]);
    for caption in ["head 0", "head 3", "hello", SENTENCE] {
        assert!(svg.contains(caption), "no {caption:?} in the picture");
    }
    assert_eq!(crate::process::run(&["hello world", "--plot", &file("heads.png")]).code, Some(0));
    let png = std::fs::read(file("heads.png")).expect("the picture");
    assert!(png.starts_with(b"\x89PNG\r\n\x1a\n"));
}
