//! Sessions with programs: each file of `sessions/` is a text of lines that run in turn, with the output of each.
//! `UPDATE_EXPECT=1 cargo test --test examples` writes the outputs.
//!
//! ```text
//! + FROM                 copies a folder to the folder DIR
//! + FROM TO              copies a file or folder into DIR
//! - FILE                 deletes a file of DIR
//! - FILE KEY             deletes a key of a JSON file of DIR
//! = FILE /POINTER JSON   sets a value in a JSON file of DIR; `.` is all of it
//! ~ PART OTHER ..        replaces a part of the names of tensors in DIR, where ^ is the beginning of each name. With
//!                        several replacements, they share the rows; with none, the tensors are deleted
//! $ PROGRAM ARGUMENT ..  runs an example; an argument with spaces is written as a JSON string
//! | the output, then the text on stderr after an exclamation mark, then the exit code unless 0
//! ```

use std::path::Path;
use std::process::{Command, Output, Stdio};

use candle_core::{Device, safetensors};
use rayon::prelude::*;
use serde_json::Value;
use tempfile::TempDir;

use crate::common::{Run, listed, recorded, root, run};
use crate::process::{self, Tensors};

#[test]
fn sessions_match_reviewed_texts() {
    let mut files = listed(recorded("examples/sessions"));
    files.retain(|path| path.is_file());
    files.par_iter().for_each(|path| assert_reviewed(path));
}

#[test]
fn sessions_of_features_match_reviewed_texts() {
    for (file, runs) in [
        ("hub", cfg!(feature = "hub")),
        ("no_hub", cfg!(not(feature = "hub"))),
        ("plot", cfg!(feature = "plot")),
        ("image_embedding", cfg!(feature = "plot")),
        ("no_plot", cfg!(not(feature = "plot"))),
        ("no_device", cfg!(not(any(feature = "cuda", feature = "metal")))),
    ] {
        if runs {
            assert_reviewed(&recorded("examples/sessions/features").join(file).with_extension("txt"));
        }
    }
}

/// Runs programs whose output nobody reads, as in `causal_lm .. | head -n 1`.
#[test]
fn program_with_closed_standard_output_ends_without_error() {
    let tokens = ["--model", "tests/causal_lm/models/llama", "--ids", "5,7,9", "--max-tokens", "5"];
    for (program, args) in [("causal_lm", &tokens[..]), ("swap_in_candle_model", &[])] {
        let mut command = process::command(program);
        let mut child = command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
        drop(child.stdout.take());
        let Output { status, stderr, .. } = child.wait_with_output().expect("it ends");
        let said = String::from_utf8_lossy(&stderr);
        assert!(status.success() && !said.contains("error") && !said.contains("panicked"), "{program}: {said}");
    }
}

fn assert_reviewed(file: &Path) {
    let script = std::fs::read_to_string(file).expect("a text");
    let found = Session(tempfile::tempdir().expect("a folder")).answer(&script);
    if !is_near(&script, &found) {
        expect_test::expect_file![file].assert_eq(&found);
    }
}

/// Returns whether texts are equal except for numbers that differ by one in their last digit, and the shades of such
/// numbers.
fn is_near(expected: &str, found: &str) -> bool {
    let number = |word: &str| {
        let digits = word.trim_matches(|c: char| !c.is_ascii_digit() && c != '.' && c != '-');
        let (_, decimals) = digits.split_once('.')?;
        Some((digits.parse::<f64>().ok()?, decimals.len() as i32))
    };
    let is_near = |(a, b): (&str, &str)| match (number(a), number(b)) {
        _ if a == b => true,
        (Some((a, digits)), Some((b, others))) => digits == others && (a - b).abs() < 1.5 * 0.1f64.powi(digits),
        _ => false,
    };
    let words = |text: &'_ str| text.split([' ', '\n']).count();
    words(expected) == words(found) && expected.split([' ', '\n']).zip(found.split([' ', '\n'])).all(is_near)
}

/// Splits a line into words, which are separated by spaces or are JSON strings.
fn words(mut line: &str) -> Vec<String> {
    let mut words = Vec::new();
    while !line.is_empty() {
        let mut json = serde_json::Deserializer::from_str(line).into_iter::<String>();
        let (word, end) = match json.next() {
            Some(Ok(word)) => (word, json.byte_offset()),
            _ => line.find(' ').map_or((line.to_string(), line.len()), |end| (line[..end].to_string(), end)),
        };
        words.push(word);
        line = line[end..].trim_start();
    }
    words
}

/// The folder DIR.
struct Session(TempDir);

impl Session {
    /// Runs a script, and returns it with its results.
    fn answer(&self, script: &str) -> String {
        let mut text = String::new();
        for line in script.lines().filter(|line| !line.starts_with(['|', '!', '('])) {
            text += &format!("{line}\n");
            let dir = self.0.path();
            let parts = words(&line.replace("DIR", dir.to_str().expect("UTF-8")));
            let parts: Vec<_> = parts.iter().map(String::as_str).collect();
            match parts[..] {
                ["$", program, ref args @ ..] => {
                    let mut command = process::command(program);
                    command.args(args).env("HF_HUB_OFFLINE", "1").env("HF_HUB_CACHE", dir);
                    text += &self.said(command);
                }
                ["+", from] => {
                    std::fs::remove_dir_all(dir).and_then(|()| std::fs::create_dir(dir)).expect("an empty folder");
                    process::copy(&root().join(from), dir).expect(line);
                }
                ["+", from, to] => process::copy(&root().join(from), &dir.join(to)).expect(line),
                ["-", file] => std::fs::remove_file(dir.join(file)).expect(line),
                ["-", file, key] => {
                    self.edit(file, |json| _ = json.as_object_mut().expect(line).remove(key).expect(line))
                }
                ["=", file, pointer, ..] => self.set(file, pointer, line.splitn(4, ' ').last().unwrap_or_default()),
                ["~", part, ref others @ ..] => self.rename(part, others),
                _ => assert!(parts.is_empty() || parts[0] == "#", "{line}"),
            }
        }
        text
    }

    fn edit(&self, file: &str, change: impl FnOnce(&mut Value)) {
        let path = self.0.path().join(file);
        let text = std::fs::read_to_string(&path).unwrap_or("{}".into());
        let mut json = serde_json::from_str(&text).expect(file);
        change(&mut json);
        std::fs::write(path, json.to_string()).expect(file);
    }

    fn set(&self, file: &str, pointer: &str, value: &str) {
        let value = serde_json::from_str(value).expect(value);
        self.edit(file, |json| match (json.pointer_mut(pointer), pointer.rsplit_once('/')) {
            (Some(place), _) => *place = value,
            (None, Some((parent, key))) => json.pointer_mut(parent).expect(pointer)[key] = value,
            (None, None) => *json = value,
        });
    }

    fn rename(&self, part: &str, others: &[&str]) {
        let file = self.0.path().join("model.safetensors");
        let mut tensors = Tensors::new();
        for (name, tensor) in safetensors::load(&file, &Device::Cpu).expect("weights") {
            let name = format!("^{name}");
            let others = if name.contains(part) { others } else { &[part][..] };
            let parts = tensor.chunk(others.len().max(1), 0).expect("rows that can be shared");
            let parts = others.iter().zip(parts).map(|(other, rows)| (name.replace(part, other), rows));
            tensors.extend(parts.map(|(new, rows)| (new.replace('^', ""), rows.contiguous().expect("memory"))));
        }
        safetensors::save(&tensors, file).expect("weights are written");
    }

    /// Returns the output of a run. Parts that depend on the machine or the run are replaced by `…`.
    fn said(&self, command: Command) -> String {
        let Run { code, stdout, stderr } = run(command);
        let said = |mark: &str, text: &str| -> String {
            let text = text.replace(self.0.path().to_str().expect("UTF-8"), "DIR");
            let text = text.replace(root().to_str().expect("UTF-8"), "ROOT");
            text.lines().map(|line| format!("{}\n", format!("{mark} {}", stable(line)).trim_end())).collect()
        };
        let end = if code == Some(0) { String::new() } else { format!("({})\n", code.unwrap_or(-1)) };
        format!("{}{}{end}", said("|", &stdout), said("!", &stderr))
    }
}

fn stable(line: &str) -> String {
    if let Some((said, _)) = line.split_once(" (os error ") {
        return said.rsplit_once(": ").map_or(line.to_string(), |(said, _)| format!("{said}: …"));
    }
    let is_timed = line.starts_with("times ") || line.contains(" tokens/s");
    let word = |word: &str| match word.trim_end_matches([',', ';']).parse::<f64>() {
        Ok(_) if word.contains("e-") || (is_timed && word.contains('.')) => "…".to_string(),
        _ => word.to_string(),
    };
    line.split(' ').map(word).collect::<Vec<_>>().join(" ")
}
