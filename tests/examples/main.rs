//! The examples, run as a user runs them: real processes, their output and their exit codes.

mod checkpoints;
#[path = "../common/mod.rs"]
mod common;
mod induction_heads;
mod misuse;
mod output;
mod page;
mod process;
mod swap_in_candle_model;
