//! Decoders whose rotary frequencies depend on the number of positions, around their original context:
//! `tests/causal_lm/long_context.py` writes the checkpoints and the tokens of transformers.

use std::path::PathBuf;

use rayon::prelude::*;
use serde::Deserialize;

use crate::common::{Run, read_json, recorded, run, spelled};
use crate::process::{command, copy};

#[derive(Deserialize)]
struct Case {
    model: String,
    sequences: Vec<Sequence>,
}

/// The first `len` tokens of a prompt, and the tokens that follow.
#[derive(Deserialize)]
struct Sequence {
    prompt: String,
    len: usize,
    generated: Vec<u32>,
}

impl Sequence {
    fn ids(&self) -> String {
        let all = std::fs::read_to_string(folder("prompts").join(&self.prompt).with_extension("txt")).expect("ids");
        all.trim().split(',').take(self.len).collect::<Vec<_>>().join(",")
    }
}

impl Case {
    fn all() -> Vec<Self> {
        read_json(folder("cases.json"))
    }

    /// Returns the number of positions before the last generated token, which no call reads.
    fn positions(&self) -> usize {
        self.sequences.iter().map(|sequence| sequence.len + sequence.generated.len() - 1).max().unwrap_or(0)
    }

    /// Runs the example with the checkpoint in `folder`: its lines, and its notes.
    fn run(&self, folder: PathBuf, chunk: &str) -> (Vec<String>, Vec<String>) {
        let mut command = command("causal_lm");
        command.arg("--model").arg(folder).args(["--chunk", chunk, "--max-tokens"]);
        command.arg(self.sequences[0].generated.len().to_string());
        for sequence in &self.sequences {
            command.args(["--ids", &sequence.ids()]);
        }
        let Run { code, stdout, stderr } = run(command);
        assert_eq!(code, Some(0), "{stderr}");
        let notes = stderr.lines().filter(|line| line.starts_with("note: "));
        (stdout.lines().map(str::to_string).collect(), notes.map(str::to_string).collect())
    }
}

fn folder(name: &str) -> PathBuf {
    recorded("causal_lm/long_context").join(name)
}

/// Runs prompts within the original context and beyond it, generation across it, and batches of unequal lengths; in
/// chunks that would end within the original context of a prompt beyond it.
#[test]
fn rope_scaled_by_length_generates_transformers_tokens() {
    let cases = Case::all();
    assert_eq!(cases.len(), 10);
    cases.par_iter().for_each(|case| {
        let expected: Vec<_> = case.sequences.iter().map(|sequence| spelled(&sequence.generated)).collect();
        let original = if case.model == "phi3" { 4096 } else { 2048 };
        let notes = usize::from(case.positions() > original);
        for chunk in ["2048", "700"] {
            let (lines, found) = case.run(folder(&case.model), chunk);
            let lens: Vec<_> = case.sequences.iter().map(|sequence| sequence.len).collect();
            assert_eq!(lines, expected, "{} with prompts of {lens:?} in chunks of {chunk}", case.model);
            assert_eq!(found.len(), notes, "{} with prompts of {lens:?}: {found:?}", case.model);
        }
    });
}

/// Ends a sequence before the other one exceeds the original context, where the cache is computed again.
#[test]
fn rope_scaled_by_length_with_ended_sequence_generates_transformers_tokens() {
    let cases = Case::all();
    let case = cases.iter().find(|case| case.model == "phi3" && case.sequences.len() == 2).expect("a batch");
    let [long, short] = &case.sequences[..] else { panic!("a batch of two") };
    let end = short.generated[2];
    assert!(!long.generated.contains(&end) && long.len < 4096 && 4096 < case.positions());
    let checkpoint = tempfile::tempdir().expect("a folder");
    copy(&folder("phi3"), checkpoint.path()).expect("a copy");
    let config = format!("{{\"eos_token_id\": {end}}}");
    std::fs::write(checkpoint.path().join("generation_config.json"), config).expect("a config");
    let (lines, _) = case.run(checkpoint.path().to_path_buf(), "2048");
    assert_eq!(lines, [spelled(&long.generated), spelled(&short.generated[..3])]);
}
