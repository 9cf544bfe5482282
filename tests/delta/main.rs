//! The gated delta rule: every path against an oracle of plain loops, gradients against differences of the oracle's
//! numbers, and both against PyTorch and transformers.

#[path = "../common/mod.rs"]
mod common;

mod calls;
mod case;
mod golden;
mod gradients;
