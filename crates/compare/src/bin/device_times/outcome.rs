//! The result of a measurement.

use serde_json::{Value, json};

pub enum Outcome {
    Milliseconds {
        ms: f64,
        /// The path that the call took.
        path: String,
    },
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "memory is measured on CUDA devices only"))]
    Mebibytes(f64),
    /// There is nothing to measure here, for a reason.
    Skipped(String),
}

impl Outcome {
    /// Returns the outcome of a named cell as a script reads it.
    pub fn to_json(&self, name: &str) -> Value {
        match self {
            Self::Milliseconds { ms, path } => json!({"name": name, "ms": ms, "path": path}),
            Self::Mebibytes(mebibytes) => json!({"name": name, "mebibytes": mebibytes}),
            Self::Skipped(reason) => json!({"name": name, "skipped": reason}),
        }
    }
}
