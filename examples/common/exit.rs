//! How a run ends.

use std::process::ExitCode;

use candle_core::Result;

/// Says in a line what went wrong, without the backtrace that Candle appends where `RUST_BACKTRACE` is set.
pub fn exit(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", error.to_string().lines().next().unwrap_or_default());
            ExitCode::from(1)
        }
    }
}
