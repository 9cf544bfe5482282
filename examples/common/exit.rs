//! How a run ends.

use std::process::ExitCode;

use candle_core::{Error, Result};

/// Says in a line what went wrong.
pub fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::from(1)
        }
    }
}

/// The message, without its cause and without the backtrace that Candle appends where `RUST_BACKTRACE` is set.
pub fn one_line(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => one_line(inner),
        error => error.to_string().lines().next().unwrap_or_default().to_string(),
    }
}
