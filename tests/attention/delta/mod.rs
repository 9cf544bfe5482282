//! The gated delta rule: every path against an oracle of plain loops, gradients against the slopes of the oracle's
//! numbers, and both against PyTorch and transformers.

mod calls;
mod case;
mod decays;
mod golden;
mod gradients;
mod range;
