//! Bad input to `tokenize_attend` ends with one line that says what to do.

use crate::process::{run, shown};

/// Arguments, exit code, and a part of the one line on stderr.
const TABLE: &str = r#"
 => 2 the following required arguments were not provided: <TEXTS>...
hello | --bogus => 2 unexpected argument '--bogus' found
hello | --dtype | f99 => 2 possible values: f32, bf16, f16, f64
hello | --device | tpu => 2 invalid value 'tpu' for '--device
hello | --layout | book => 2 --weights
hello | --weights | a | --model | b => 2 cannot be used with
hello | --layout | buch | --weights | a => 2 unknown layout "buch", expected one of: canonical, book,
hello world how are you? | --model | frontend_48 => 1 error: [tokenizer] word 5, "you?", is not in the vocabulary: did you mean "you"?
Hello | --model | frontend_48 => 1 did you mean "hello"?
zzzz | --model | frontend_48 => 1 its words begin with "<pad>", "hello", "world", "how"
   => 1 [tokenize_attend] expected texts of at least one word
hello |    => 1 [tokenize_attend] expected texts of at least one word
hello | you nowhere | --model | frontend_48 => 1 word 2, "nowhere", is not in the vocabulary
hello | --model | induction_heads | --layer | 2 => 1 induction_heads, layer 2 is none of multi-head attention
hello | --model | nowhere => 1 models/nowhere has no config.json
hello | --model | src => 1 [tokenize_attend] src has no config.json
hello | --weights | nowhere.safetensors => 1 cannot read nowhere.safetensors
hello | --weights | README.md => 1 README.md is neither a safetensors file nor a .pth file
hello | --weights | models/d2l_additive/model.safetensors => 1 AdditiveAttention
hello | --weights | models/book_mha/model.safetensors => 1 [weights] shapes do not tell the number of heads
hello | --weights | models/book_mha/model.safetensors | --heads | 0 => 1 do not tell the number of heads; give num_heads (at least 1)
hello | --weights | models/book_mha/model.safetensors | --heads | 5 => 1 [weights] the query projection has 2 rows, which is no multiple of 5
hello | --weights | models/frontend_embedding/model.safetensors => 1 [tokenize_attend] no layer 0 in models/frontend_embedding/model.safetensors
hello world how are you ? hello | --model | book_mha => 1 7 positions are more than the context length 6
"#;

#[cfg(feature = "plot")]
const PLOT: &str = r#"
hello | --plot | a.gif => 1 [heat_map] the extension of a.gif is "gif"; expected svg or png
hello | hello | --plot | a.svg => 1 [tokenize_attend] --plot and --page show one text, found several
"#;
#[cfg(not(feature = "plot"))]
const PLOT: &str = "\nhello | --plot | a.svg => 1 --features plot\n";

#[cfg(feature = "hub")]
const HUB: &str = "\nhello | --model-id | ../evil => 1 [hub]\n";
#[cfg(not(feature = "hub"))]
const HUB: &str = "\nhello | --model-id | google-bert/bert-base-uncased => 1 --features hub\n";

#[test]
fn mistakes_end_with_one_line_that_says_what_to_do() {
    for line in [TABLE, PLOT, HUB].into_iter().flat_map(str::lines).filter(|line| !line.is_empty()) {
        let (args, expected) = line.split_once(" => ").expect("arguments and what is said of them");
        let (code, expected) = expected.split_once(' ').expect("a code and a text");
        let args: Vec<_> = if args.is_empty() { Vec::new() } else { args.split(" | ").collect() };
        let run = run(&args);
        assert_eq!(run.code, Some(code.parse().expect("a code")), "{args:?}: {}{}", run.stdout, run.stderr);
        assert_eq!(run.stdout, "", "{args:?}");
        assert!(run.stderr.starts_with("error: "), "{args:?}: {}", run.stderr);
        assert_eq!(run.stderr.lines().count(), 1, "{args:?}: {}", run.stderr);
        assert!(run.stderr.contains(expected), "{args:?}: {}", run.stderr);
    }
}

#[test]
fn an_absent_device_is_one_line() {
    for device in ["cuda", "metal"] {
        let run = run(&["hello", "--device", device]);
        if run.code == Some(0) {
            eprintln!("skipped: there is a {device} device");
            continue;
        }
        let said = run.error();
        assert!(said.contains(&format!("no {device} device: ")) && said.contains("try `--device cpu`"), "{said}");
    }
}

#[test]
fn help_is_no_error() {
    let run = shown(&["--help"]);
    let of_model = ["--model", "--weights", "--model-id", "--heads", "--layout", "--layer", "--device", "--dtype"];
    for option in of_model.into_iter().chain(["--plot", "--page"]) {
        assert!(run.stdout.contains(option), "{option} is not in the help");
    }
}
