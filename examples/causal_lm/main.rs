//! Generates text with a decoder (Llama, Gemma, DeepSeek, GPT-OSS, Qwen3.5 and the others in `common/blocks/family.rs`)
//! on this crate's attention layer. `model.rs` is the model.
//!
//! ```sh
//! cargo run --release --example causal_lm -- --model path/to/checkpoint --prompt "The capital of France is"
//! ```

mod args;
#[path = "../common/mod.rs"]
mod common;
mod files;
mod generate;
mod model;
mod run;

use std::process::ExitCode;

fn main() -> ExitCode {
    common::main(|args: args::Args| run::run(&args, args.model.device.open(0)?, None))
}
