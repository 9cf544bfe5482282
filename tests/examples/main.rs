//! The examples, run as a user runs them: real processes, their output and their exit codes. Their checkpoints are in
//! `tests/{example}/models`.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../examples/causal_lm/model.rs"]
mod decoder;
mod embedding;
#[path = "../../examples/sentence_embedding/model.rs"]
mod encoder;
mod gguf;
mod golden;
mod hash_model;
#[path = "../../examples/image_embedding/model.rs"]
#[allow(dead_code, clippy::duplicate_mod, reason = "the program's part, and the blocks of all three")]
mod images;
mod long_context;
mod page;
mod process;
mod quantized;
#[path = "../../examples/image_embedding/resample.rs"]
#[allow(dead_code, reason = "the program's part")]
mod resample;
#[path = "../../examples/serve_requests/scheduler.rs"]
mod scheduler;
mod scheduling;
mod serving;
mod sessions;
mod steps;
mod tokens;
mod training;
