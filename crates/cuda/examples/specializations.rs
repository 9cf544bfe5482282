//! Prints what users' programs compile, one JSON object a line: the sources, then every program for every compute
//! capability. With the argument `tiles`, it prints the macros of programs that together have every tile, one a line.
//! With `options`, it prints all macros of the program of each line of standard input, such as `-DHEAD_DIM=64
//! -DFORWARD_WARPS=2`: macros that are not given have a default. With `headers` and a folder, it writes the headers
//! that are printed from structs in Rust.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use candle_attention_cuda::{
    Capability, CiProgram, Limits, all_options, ci_programs, options_of_every_tile, write_headers,
};
use serde_json::json;

fn main() -> io::Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        [] => print_programs(),
        ["tiles"] => options_of_every_tile().iter().for_each(|options| println!("{}", options.join(" "))),
        ["options"] => print_options()?,
        ["headers", folder] => write_headers(Path::new(folder))?,
        other => {
            return Err(io::Error::other(format!(
                "expected `tiles`, `options`, or `headers` and a folder, found {other:?}"
            )));
        }
    }
    Ok(())
}

fn print_options() -> io::Result<()> {
    for line in io::stdin().lines() {
        let options = all_options(&line?).map_err(io::Error::other)?;
        println!("{}", options.join(" "));
    }
    Ok(())
}

fn print_programs() {
    let capabilities = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
    let entries_of = |(major, minor)| {
        let capability = Capability { major, minor };
        (capability, ci_programs(&Limits::of_capability(capability)))
    };
    let all: Vec<_> = capabilities.map(entries_of).into();
    let sources: BTreeMap<&str, &CiProgram> =
        all.iter().flat_map(|(_, entries)| entries).map(|entry| (entry.source, entry)).collect();
    for (source, entry) in sources {
        println!("{}", json!({ "program": source, "text": entry.source_text() }));
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
