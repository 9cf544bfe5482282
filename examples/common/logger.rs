//! A logger that prints warnings on stderr: the crate logs calls that are allowed and usually a mistake.

use log::{Level, LevelFilter, Log, Metadata, Record};

struct Warnings;

impl Log for Warnings {
    fn enabled(&self, metadata: &Metadata) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record) {
        if self.enabled(record.metadata()) {
            let kind = if record.level() == Level::Error { "error" } else { "warning" };
            eprintln!("{kind}: {}", record.args());
        }
    }

    fn flush(&self) {}
}

/// Prints warnings and errors from now on, unless the program has a logger.
pub fn print_warnings() {
    if log::set_logger(&Warnings).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
