//! The output: a table for each device.

use std::collections::BTreeMap;
use std::fmt;

use candle_attention::Backend;
use candle_core::{DType, Result};

use super::check::{Checked, DTYPES};

/// A row: checks of one kind, in each dtype.
pub struct Row {
    name: String,
    passed: usize,
    skipped: usize,
    /// The number of calls that took a fused path, if the calls were planned.
    fused: Option<usize>,
    /// The largest error in each of [`DTYPES`]; none if nothing was checked.
    errors: [Option<f64>; 3],
    /// The reasons for skipped checks, the failures, and notes.
    pub remarks: Vec<String>,
    /// The reasons for the paths that calls took.
    pub reasons: Vec<String>,
    pub failed: usize,
}

impl Row {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_string(),
            passed: 0,
            skipped: 0,
            fused: None,
            errors: [None; 3],
            remarks: Vec::new(),
            reasons: Vec::new(),
            failed: 0,
        }
    }

    /// Counts a check whose error may be up to `allowed`; `what` names it if it fails.
    pub fn add(&mut self, dtype: DType, checked: Result<Checked>, allowed: f64, what: &dyn fmt::Display) {
        let outcome = match checked {
            Ok(Checked { error, plan }) => {
                if let Some(plan) = plan {
                    *self.fused.get_or_insert(0) += usize::from(plan.backend == Backend::Fused);
                    self.reasons.push(plan.to_string());
                }
                if let Some(slot) = DTYPES.iter().position(|&known| known == dtype) {
                    self.errors[slot] = Some(self.errors[slot].map_or(error, |most| most.max(error)));
                }
                let off = error.is_nan() || error > allowed;
                off.then(|| format!("off by {error:.1e}, more than {allowed:.1e}"))
            }
            Err(error) => Some(crate::command_line::one_line(&error)),
        };
        match outcome {
            None => self.passed += 1,
            Some(outcome) => {
                self.failed += 1;
                self.remarks.push(format!("FAILED: {}, {what} in {}: {outcome}", self.name, dtype.as_str()));
            }
        }
    }

    pub fn skip(&mut self, count: usize, reason: &str) {
        self.skipped += count;
        self.remarks.push(format!("skipped: {}: {reason}", self.name));
    }

    /// Adds a remark that is no failure.
    pub fn note(&mut self, remark: &str) {
        self.remarks.push(format!("noted: {}: {remark}", self.name));
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = |error: Option<f64>| error.map_or_else(|| "-".into(), |error| format!("{error:.1e}"));
        let [wide, half, brain] = self.errors.map(error);
        let fused = self.fused.map_or_else(|| "-".into(), |fused| fused.to_string());
        let Self { name, passed, skipped, failed, .. } = self;
        write!(f, "{name:<28}{passed:>6}{skipped:>6}{failed:>6}{fused:>7}{wide:>10}{half:>10}{brain:>10}")
    }
}

/// The rows of a device, and the numbers of checks that passed, were skipped and failed.
#[derive(Default)]
pub struct Totals {
    pub passed: usize,
    pub skipped: usize,
    pub failed: usize,
}

impl Totals {
    pub fn add(&mut self, rows: &[Row]) {
        for row in rows {
            self.passed += row.passed;
            self.skipped += row.skipped;
            self.failed += row.failed;
        }
    }
}

/// Prints rows below their columns: the number of checks, how many of them took a fused path, and the largest error in
/// each dtype.
pub fn print(rows: &[Row]) {
    println!(
        "{:<28}{:>6}{:>6}{:>6}{:>7}{:>10}{:>10}{:>10}",
        "check", "pass", "skip", "fail", "fused", "f32", "f16", "bf16"
    );
    for row in rows {
        println!("{row}");
    }
    for remark in rows.iter().flat_map(|row| &row.remarks) {
        println!("{remark}");
    }
}

/// Prints each reason once, with the number of calls.
pub fn explain(rows: &[Row]) {
    let mut reasons = BTreeMap::new();
    for reason in rows.iter().flat_map(|row| &row.reasons) {
        *reasons.entry(reason).or_insert(0) += 1;
    }
    for (reason, calls) in reasons {
        println!("{calls:>6} {reason}");
    }
}
