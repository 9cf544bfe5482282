//! Every system of `models/`, every case, against PyTorch's numbers.

#[path = "../common/mod.rs"]
mod common;
mod layers;
mod pieces;
mod printed;

use candle_core::{Result, Tensor};
use common::{Golden, assert_close};

/// f32 against the same module in f64.
const TOLERANCE: f64 = 2e-6;

impl Golden {
    /// Compares a result with a tensor of the case, whose dimensions may differ: single heads come without a dimension
    /// of heads, d2l with (batch · heads).
    fn check(&self, case: &str, name: &str, got: &Tensor) -> Result<()> {
        let expected = self.get(case, name);
        assert_close(&got.reshape(expected.dims())?, expected, TOLERANCE, &format!("{}, {case}, {name}", self.name));
        Ok(())
    }
}

/// Checks the source of tests for folders without a layout. Folders with a layout are the systems of `layers.rs`.
#[test]
fn model_folders_without_layout_are_named_in_a_test() {
    let readers = [include_str!("pieces.rs"), include_str!("../tokenizer/main.rs")];
    // What the example of that name trained has no numbers of PyTorch; the tests of the examples run it.
    for name in common::systems().into_iter().filter(|name| name != "induction_heads") {
        let is_read = readers.iter().any(|source| source.contains(&format!("\"{name}\"")));
        assert!(is_read || Golden::open_config(&name)["layout"].is_string(), "no test reads models/{name}");
    }
}
