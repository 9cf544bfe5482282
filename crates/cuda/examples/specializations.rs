//! Prints what users' programs compile, one JSON object a line: the sources, then every program for every compute
//! capability. With the argument `tiles`, it prints the macros of programs that together have every tile, one a line.

use candle_attention_cuda::{Capability, Limits, catalogue, options_of_every_tile, source_text};
use serde_json::json;

fn main() {
    if std::env::args().nth(1).as_deref() == Some("tiles") {
        for options in options_of_every_tile() {
            println!("{}", options.join(" "));
        }
        return;
    }
    let capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
    let entries_of = |(major, minor)| {
        let capability = Capability { major, minor };
        (capability, catalogue(&Limits::of_capability(capability)))
    };
    let all: Vec<_> = capabilities.map(entries_of).into();
    let mut sources: Vec<&str> = all.iter().flat_map(|(_, entries)| entries).map(|entry| entry.source).collect();
    sources.sort_unstable();
    sources.dedup();
    for source in sources {
        println!("{}", json!({ "program": source, "text": source_text(source) }));
    }
    for (capability, entries) in all {
        for entry in entries {
            let kernels: Vec<_> = entry
                .kernels
                .iter()
                .map(|kernel| {
                    json!({ "name": kernel.name, "threads": kernel.threads, "shared_bytes": kernel.shared_bytes })
                })
                .collect();
            let line = json!({
                "program": entry.source,
                "name": entry.name,
                "capability": capability.to_string(),
                "options": entry.options,
                "quick": entry.is_quick,
                "kernels": kernels,
            });
            println!("{line}");
        }
    }
}
