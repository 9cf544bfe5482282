//! Serves requests by continuous batching over pages, with a decoder of the example `causal_lm`. `scheduler.rs` knows
//! no model, and can be copied into a server.
//!
//! ```sh
//! cargo run --release --example serve_requests -- --model path/to/checkpoint \
//!     --requests examples/serve_requests/requests.jsonl
//! ```

mod args;
mod clock;
#[path = "../common/mod.rs"]
mod common;
mod engine;
#[path = "../causal_lm/files.rs"]
mod files;
#[path = "../causal_lm/model.rs"]
mod model;
mod picture;
mod report;
mod requests;
mod run;
mod scheduler;
mod timeline;

use std::process::ExitCode;

fn main() -> ExitCode {
    common::main(|args: args::Args| run::run(&args))
}
