//! `CANDLE_ATTENTION_CPU`, in processes of their own: it is read once, and a test cannot change its own environment.

use std::process::Command;

use candle_attention::cpu::Tier;
use candle_attention::plan;
use candle_core::DType;

use crate::draw::Draw;
use crate::fused::{Call, DTYPES};
use crate::oracle::Dims;
use crate::planned::has_word;

const VARIABLE: &str = "CANDLE_ATTENTION_CPU";

/// Asks the child for its answer.
const ASKED: &str = "FLASH_TEST_PLAN";

const MARK: &str = "answer: ";

fn call(dtype: DType) -> Call {
    let dims = Dims { b: 1, h: 2, h_kv: 1, t_q: 3, t_kv: 5, d: 8, d_v: 8 };
    Call::new(&Draw::plain(dims, vec![], dtype).case(), dtype).expect("tensors")
}

/// What the child processes run; by itself it does nothing.
#[test]
fn answer() {
    let Ok(asked) = std::env::var(ASKED) else { return };
    for dtype in DTYPES {
        let mut call = call(dtype);
        if asked == "scalar" {
            call = call.on_tier(Tier::Scalar);
        }
        let Call { q, k, v, mask, options } = &call;
        let answer = plan(q, k, v, mask, options).and_then(|plan| call.context().map(|_| plan.to_string()));
        let answer = answer.unwrap_or_else(|error| error.to_string());
        println!("\n{MARK}{}", answer.lines().next().unwrap_or_default());
    }
}

/// The child's answers, one a dtype.
fn answers(value: &str, asked: &str) -> Vec<String> {
    let mut child = Command::new(std::env::current_exe().expect("a path to this test"));
    child.args(["environment::answer", "--exact", "--nocapture"]).env(VARIABLE, value).env(ASKED, asked);
    let output = child.output().expect("the child runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).expect("text");
    let answers: Vec<_> = text.lines().filter_map(|line| line.strip_prefix(MARK)).map(str::to_string).collect();
    assert_eq!(answers.len(), DTYPES.len(), "{text}");
    answers
}

fn names(tiers: &[Tier]) -> String {
    tiers.iter().map(Tier::to_string).collect::<Vec<_>>().join(", ")
}

#[test]
fn a_tier_of_the_environment_shows_in_the_plan() {
    for tier in Tier::available() {
        for answer in answers(&tier.to_string(), "as it comes") {
            assert!(answer.starts_with("Fused: ") && has_word(&answer, &tier.to_string()), "{tier}: {answer}");
        }
    }
}

#[test]
fn an_empty_value_is_no_value() {
    for answer in answers("", "as it comes") {
        assert!(answer.starts_with("Fused: "), "{answer}");
    }
}

#[test]
fn an_option_overrides_the_environment() {
    for value in [names(&Tier::available()[Tier::available().len() - 1..]), "no tier".to_string()] {
        for answer in answers(&value, "scalar") {
            assert!(answer.starts_with("Fused: ") && has_word(&answer, "scalar"), "{answer}");
        }
    }
}

#[test]
fn a_wrong_value_is_an_error() {
    let all = names(&Tier::ALL);
    for value in ["avx3", "AVX2", "avx2 ", "scalar,avx2", "0"] {
        let expected = format!("[plan] {VARIABLE}: [cpu_tier] {value:?} is no CPU tier, expected one of {all}");
        assert!(answers(value, "as it comes").iter().all(|answer| *answer == expected), "{value}");
    }
    let available = names(&Tier::available());
    for tier in Tier::ALL.into_iter().filter(|tier| !tier.is_available()) {
        let expected = format!("[plan] {VARIABLE} is {tier}, which this processor lacks, expected one of {available}");
        assert!(answers(&tier.to_string(), "as it comes").iter().all(|answer| *answer == expected), "{tier}");
    }
}
