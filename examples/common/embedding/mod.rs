//! The files of sentence-transformers in a checkpoint's folder, and the modules that they list: a transformer, pooling
//! and layers after it. A module or a setting that is not known is an error that names it.
#![allow(dead_code, reason = "each program uses a part")]

pub mod fields;
mod jina_names;
pub mod layers;
pub mod modules;
pub mod pipeline;
pub mod pooling;
pub mod prompts;
pub mod task_adapters;
pub mod template;
pub mod transformer;
