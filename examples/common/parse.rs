//! A command line whose mistakes are one line.

use std::process::ExitCode;

use clap::Parser;

/// The arguments, or how to exit: help is no error, and a mistake is one line.
pub fn parse<A: Parser>() -> Result<A, ExitCode> {
    A::try_parse().map_err(|error| {
        if !error.use_stderr() {
            let _ = error.print();
            return ExitCode::SUCCESS;
        }
        let text = error.to_string();
        let summary: Vec<_> = text.lines().take_while(|line| !line.starts_with("Usage")).map(str::trim).collect();
        eprintln!("{}; see --help", summary.join(" ").trim_end());
        ExitCode::from(2)
    })
}
