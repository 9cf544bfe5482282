//! `CANDLE_ATTENTION_CPU`, in subprocesses: it is read once, and a test cannot change its environment.

use std::process::Command;

use crate::*;

const VARIABLE: &str = "CANDLE_ATTENTION_CPU";

/// Asks the child for its answers.
const ASKED: &str = "ATTENTION_TEST_INSTRUCTION_SET";

const MARK: &str = "answer: ";

/// Prints how a call of each dtype and a projection run.
#[test]
#[ignore = "runs in a process that another test starts"]
fn child_prints_plan_and_instruction_set() -> Result<()> {
    let asked = std::env::var(ASKED).expect("a test that starts this one");
    for dtype in DTYPES {
        let dims = Dims { b: 1, h: 2, h_kv: 1, t_q: 3, t_kv: 5, d: 8, d_v: 8 };
        let mut call = Call::fused(&Recipe::of_kernel(dims, vec![], dtype).case(), dtype)?;
        if asked == "scalar" {
            call = call.on_instruction_set(InstructionSet::Scalar);
        }
        let planned = call.plan().and_then(|plan| call.context().map(|_| plan.to_string()));
        let packed = PackedLinear::new(&Tensor::ones((3, 4), dtype, &CPU)?, None).map(|packed| format!("{packed:?}"));
        for answer in [planned, packed] {
            let answer = answer.unwrap_or_else(|error| error.to_string());
            println!("\n{MARK}{}", answer.lines().next().unwrap_or_default());
        }
    }
    Ok(())
}

/// Returns the answers of the child: of a call and of a projection, for each dtype.
fn answers(value: &str, asked: &str) -> Vec<[String; 2]> {
    let mut child = Command::new(std::env::current_exe().expect("a path to this test"));
    child
        .args(["environment::child_prints_plan_and_instruction_set", "--exact", "--ignored", "--nocapture"])
        .env(VARIABLE, value)
        .env(ASKED, asked);
    let output = child.output().expect("the child runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let answers: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(MARK)).collect();
    assert_eq!(answers.len(), 2 * DTYPES.len(), "{text}");
    answers.chunks(2).map(|pair| [pair[0].to_string(), pair[1].to_string()]).collect()
}

fn names(instruction_sets: &[InstructionSet]) -> String {
    instruction_sets.iter().map(InstructionSet::to_string).collect::<Vec<_>>().join(", ")
}

/// Checks too that an empty value is no value, and that an option overrides the variable.
#[test]
fn instruction_set_of_environment_is_used_by_calls() {
    for instruction_set in InstructionSet::available() {
        for [planned, packed] in answers(&instruction_set.to_string(), "as it comes") {
            assert!(
                planned.starts_with("Fused: ") && has_word(&planned, &instruction_set.to_string()),
                "{instruction_set}: {planned}"
            );
            assert!(packed.contains(&format!(", {instruction_set})")), "{instruction_set}: {packed}");
        }
    }
    assert!(answers("", "as it comes").iter().all(|[planned, _]| planned.starts_with("Fused: ")));
    for value in
        [names(&InstructionSet::available()[InstructionSet::available().len() - 1..]), "no instruction set".to_string()]
    {
        for [planned, _] in answers(&value, "scalar") {
            assert!(planned.starts_with("Fused: ") && has_word(&planned, "scalar"), "{planned}");
        }
    }
}

#[test]
fn instruction_set_of_environment_with_unknown_value_is_rejected() {
    let available = names(&InstructionSet::available());
    let unknown = ["avx3", "AVX2", "avx2 ", "scalar,avx2", "0"].map(|value| {
        let expected = format!(" is {value:?}, which is no instruction set, expected one of {available}");
        (value.to_string(), expected)
    });
    let lacking = InstructionSet::ALL.into_iter().filter(|instruction_set| !instruction_set.is_available()).map(
        |instruction_set| {
            let expected = format!(" is {instruction_set}, which this processor lacks, expected one of {available}");
            (instruction_set.to_string(), expected)
        },
    );
    for (value, expected) in unknown.into_iter().chain(lacking) {
        for answers in answers(&value, "as it comes") {
            assert_eq!(answers, ["plan", "packed_linear"].map(|op| format!("[{op}] {VARIABLE}{expected}")));
        }
    }
}
