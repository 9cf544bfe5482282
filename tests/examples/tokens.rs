//! `tokenize_attend` against PyTorch's numbers, over every folder of `models/`, and as part of a pipe.

use std::collections::HashMap;

use crate::common::{Golden, Run, models, read_json, recorded, root, run, systems, values};
use crate::process::{SENTENCE, command, copy, printed};
use candle_attention::text::{SimpleTokenizer, Split};

type Maps = Vec<Vec<Vec<f64>>>;

/// Reads the weights of each heat map, to two digits.
fn maps(printed: &str) -> Maps {
    let cell = |cell: &str| cell.trim_start_matches(['░', '▒', '▓', '█']).parse::<f64>();
    let map = |map: &str| {
        let rows = map.lines().skip(1).take_while(|line| !line.contains("blank is exactly 0"));
        rows.map(|row| row.split_whitespace().skip(1).map(cell).collect::<Result<_, _>>().expect("cells")).collect()
    };
    printed.split(" heads\n").skip(1).map(map).collect()
}

#[track_caller]
fn assert_maps(args: &[&str], exact: &Maps) {
    let shown = maps(&printed("tokenize_attend", args));
    let sizes = |maps: &Maps| maps.iter().flatten().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(sizes(&shown), sizes(exact), "{args:?}");
    let mut cells = shown.iter().flatten().flatten().zip(exact.iter().flatten().flatten());
    assert!(cells.all(|(one, other)| (one - other).abs() <= 0.006), "{args:?}: {shown:?}");
}

#[test]
fn tokenize_attend_numbers_match_pytorch() {
    let of_folder = |name: &'static str| vec![SENTENCE, "--model", name];
    let in_dtype = |dtype: &'static str| vec![SENTENCE, "--model", "frontend_48", "--dtype", dtype];
    for (args, system, most) in [
        (vec![SENTENCE], "frontend_1536", 0.6e-4),
        (of_folder("frontend_48"), "frontend_48", 0.6e-4),
        (of_folder("gqa_48"), "gqa_48", 0.6e-4),
        (of_folder("mqa_48"), "mqa_48", 0.6e-4),
        (in_dtype("f64"), "frontend_48", 0.6e-4),
        (in_dtype("f16"), "frontend_48", 2e-3),
        (in_dtype("bf16"), "frontend_48", 2e-2),
    ] {
        let printed = printed("tokenize_attend", &args);
        let (_, numbers) = printed.split_once("[0, 0, ..] = [").expect("the first numbers");
        let numbers = numbers.split(", ").map_while(|number| number.parse::<f64>().ok()).collect::<Vec<_>>();
        let exact = values(Golden::open(system).get("main", "expected_f64"));
        assert_eq!(numbers.len(), 4, "{args:?}");
        let dtype = if args.len() == 5 { args[4] } else { "f32" };
        assert!(printed.contains(&format!(") {dtype}\n")), "{args:?}: {printed}");
        assert!(numbers.iter().zip(exact).all(|(got, exact)| (got - exact).abs() < most), "{args:?}: {numbers:?}");
    }
}

/// Maps of the tutorial's layer; and of two texts of different lengths, in the first layer of a checkpoint and in a
/// layer that has blocks before it, by `make.py`.
#[test]
fn tokenize_attend_maps_match_pytorch_and_transformers() {
    let weights = Golden::open("frontend_1536").get("main", "attn_weights_f64").mean(1).expect("a mean over heads");
    assert_maps(&[SENTENCE], &weights.to_vec3().expect("(B, T, T)"));
    let attentions: HashMap<String, Vec<Maps>> = read_json(recorded("examples/attentions.json"));
    for (checkpoint, texts) in [
        ("causal_lm/models/gpt2", ["a b", "c d e"]),
        ("sentence_embedding/models/bert", ["man eats", "the sky is blue"]),
    ] {
        for (layer, exact) in attentions[checkpoint].iter().enumerate() {
            let copied = tempfile::tempdir().expect("a folder");
            copy(&recorded(checkpoint), copied.path()).expect("the checkpoint");
            let tokenizer = copied.path().join("tokenizer.json");
            if !tokenizer.exists() {
                let words = SimpleTokenizer::from_texts(&texts, Split::Whitespace).expect("words");
                words.save(tokenizer).expect("the tokenizer is written");
            }
            let folder = copied.path().to_str().expect("UTF-8");
            let layer = layer.to_string();
            assert_maps(&[&texts[..], &["--model", folder, "--layer", &layer]].concat(), exact);
        }
    }
}

/// Runs layers of self-attention. Folders without a layer or without weights, and layers of cross-attention, are
/// errors.
#[test]
fn tokenize_attend_runs_folders_of_self_attention_and_rejects_others() {
    for name in systems() {
        let mut command = command("tokenize_attend");
        command.args(["hello world how", "--model", &name]);
        let Run { code, stdout, stderr } = run(command);
        let layer = &Golden::open_config(&name)["layer"];
        let has_weights = models().join(&name).join("model.safetensors").is_file();
        let is_self_attention = !layer["num_heads"].is_null() && layer["kdim"].is_null();
        if is_self_attention && has_weights {
            assert!(code == Some(0) && stdout.contains("\noutput    (1, 3, "), "{name}: {stdout}{stderr}");
        } else {
            assert!(code == Some(1) && stderr.starts_with("error: ["), "{name}: {stdout}{stderr}");
        }
    }
}

#[cfg(unix)]
#[test]
fn tokenize_attend_with_closed_pipe_exits_quietly() {
    // The map does not fit a pipe's buffer, so the write fails once the reader has left.
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "\"$0\" \"$1\" --model frontend_48 | head -c 10"]).current_dir(root());
    shell.args([command("tokenize_attend").get_program(), vec!["hello"; 200].join(" ").as_ref()]);
    let Run { stdout, stderr, .. } = run(shell);
    assert_eq!(stdout, "tokens    ");
    assert!(!stderr.contains("panicked"), "{stderr}");
}

#[cfg(feature = "plot")]
#[test]
fn plot_files_are_written_as_svg_and_png() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str| folder.path().join(name).to_str().expect("UTF-8").to_string();
    for extension in ["svg", "png"] {
        let heads = file(&format!("heads.{extension}"));
        printed("tokenize_attend", &[SENTENCE, "--model", "frontend_48", "--plot", &heads]);
    }
    printed("induction_heads", &["--out", &file(""), "--steps", "1"]);
    for (picture, parts) in [
        ("heads", &["head 0", "head 3", "hello", SENTENCE][..]),
        ("loss", &["loss (nats)"]),
        ("before", &["Second layer before"]),
        ("after", &["Second layer after 1 step"]),
    ] {
        let svg = std::fs::read_to_string(file(&format!("{picture}.svg"))).expect("an SVG");
        assert!(svg.starts_with("<svg") && parts.iter().all(|part| svg.contains(part)), "{picture}");
        assert!(std::fs::read(file(&format!("{picture}.png"))).expect("a PNG").starts_with(b"\x89PNG\r\n\x1a\n"));
    }
}

/// Repeats words. In the second layer, a head attends to the token after the previous copy; in the first, one attends
/// to the previous token.
#[test]
fn induction_heads_of_trained_model_attend_to_previous_copy() {
    assert!(std::fs::metadata(models().join("induction_heads/model.safetensors")).expect("the model").len() < 300_000);
    let block = ["river", "said", "blue", "fish", "over", "night", "come", "wind", "book", "she", "we", "tree"];
    let text = [block, block].concat().join(" ");
    let queries = block.len()..2 * block.len() - 1;
    // The mean over queries of the weight on a key, over both heads.
    let weight_on = |layer: &str, key: &dyn Fn(usize) -> usize| {
        let printed = printed("tokenize_attend", &[&text, "--model", "induction_heads", "--layer", layer]);
        let map = maps(&printed).swap_remove(0);
        queries.clone().map(|query| map[query][key(query)]).sum::<f64>() / queries.len() as f64
    };
    let copied = weight_on("1", &|query| query + 1 - block.len());
    assert!(copied > 0.8, "{copied} of the weight is on the token after the previous copy");
    let previous = weight_on("0", &|query| query - 1);
    assert!(previous > 0.3, "{previous} of the weight is on the token before");
}
