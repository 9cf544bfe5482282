//! The command line of a program and its exit code: a request for help is not an error, and every error is one line.

#[path = "logger.rs"]
mod logger;

use std::fmt::Display;
use std::io::ErrorKind;
use std::process::{ExitCode, Termination};

use candle_core::{Error, Result};
use clap::Parser;

/// Runs a program on its arguments, with a logger that prints warnings.
pub fn main<A: Parser, T: Termination>(run: impl FnOnce(A) -> Result<T>) -> ExitCode {
    let args = match A::try_parse() {
        Ok(args) => args,
        Err(help) if !help.use_stderr() => {
            let _ = help.print();
            return ExitCode::SUCCESS;
        }
        Err(mistake) => {
            let text = mistake.to_string();
            let is_summary = |line: &&str| !line.starts_with("Usage") && !line.starts_with("For more information");
            let summary: Vec<_> = text.lines().take_while(is_summary).map(str::trim).collect();
            eprintln!("{}; see --help", summary.join(" ").trim_end());
            return ExitCode::from(2);
        }
    };
    logger::print_warnings();
    match run(args) {
        Ok(done) => done.report(),
        // A reader that has seen enough (`| head`).
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::from(1)
        }
    }
}

/// Returns whether an error is that of writing to a program that no longer reads.
fn is_closed_pipe(error: &Error) -> bool {
    match error {
        Error::WithBacktrace { inner, .. } | Error::Context { inner, .. } => is_closed_pipe(inner),
        Error::Io(error) => error.kind() == ErrorKind::BrokenPipe,
        _ => false,
    }
}

/// Returns the message of an error: its contexts, the outermost first, without the cause below them and without the
/// backtrace that Candle appends if `RUST_BACKTRACE` is set.
pub fn one_line(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => one_line(inner),
        Error::Context { inner, context } if matches!(**inner, Error::Context { .. }) => {
            format!("{}; {}", first_line(context), one_line(inner))
        }
        Error::Context { context, .. } => first_line(context),
        other => first_line(other),
    }
}

fn first_line(message: &impl Display) -> String {
    message.to_string().lines().next().unwrap_or_default().to_string()
}
