//! Attention on every device of a machine: right or not, and how fast.
//!
//! ```sh
//! cargo run --release -p candle-attention-compare                                  # the CPU
//! cargo run --release -p candle-attention-compare --features flash-attn -- --bench # CUDA
//! cargo run --release -p candle-attention-compare --features metal -- --bench      # Metal
//! ```

mod args;
mod bench;
mod case;
mod check;
mod golden;
mod grid;
mod layer;
mod packed;
#[path = "../../../../examples/common/parse.rs"]
mod parse;
mod progress;
mod table;

use std::process::ExitCode;

use candle_core::{Device, Error, Result};

use args::{Args, DeviceChoice};
use check::{DTYPES, allowed};
use progress::Progress;
use table::{Row, Totals};

fn main() -> ExitCode {
    let args: Args = match parse::parse() {
        Ok(args) => args,
        Err(exit) => return exit,
    };
    if args.list {
        bench::cells(args.longest).into_iter().for_each(|cell| println!("{}", cell.to_json()));
        return ExitCode::SUCCESS;
    }
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {}", one_line(&error));
            ExitCode::from(1)
        }
    }
}

/// Whether everything passed.
fn run(args: &Args) -> Result<bool> {
    let mut totals = Totals::default();
    let mut present = Vec::new();
    for (name, choice, device) in [
        ("cpu", DeviceChoice::Cpu, Ok(Device::Cpu)),
        ("cuda", DeviceChoice::Cuda, Device::new_cuda(0)),
        ("metal", DeviceChoice::Metal, Device::new_metal(0)),
    ] {
        match device {
            _ if args.device != choice && args.device != DeviceChoice::All => {}
            Ok(device) => {
                println!("{name}");
                let rows = check_device(&device, args)?;
                table::print(&rows);
                if args.explain {
                    table::explain(&rows);
                }
                totals.add(&rows);
                println!();
                present.push((name, device));
            }
            Err(error) if args.device == DeviceChoice::All => println!("{name}: absent: {}\n", one_line(&error)),
            Err(error) => return Err(Error::msg(format!("no {name} device: {}", one_line(&error)))),
        }
    }
    println!("{} passed, {} skipped, {} failed", totals.passed, totals.skipped, totals.failed);
    if args.bench {
        // Attention of these sizes takes a CPU minutes a call.
        if args.device == DeviceChoice::All && present.len() > 1 {
            present.remove(0);
        }
        for (name, device) in &present {
            println!("\ntimes on {name}");
            bench::run(args, device)?;
        }
    }
    Ok(totals.failed == 0)
}

fn check_device(device: &Device, args: &Args) -> Result<Vec<Row>> {
    let groups = grid::groups(args.short);
    let progress = Progress::new(groups.len() + 3);
    let mut rows = Vec::new();
    for group in groups {
        progress.step(group.name);
        let mut row = Row::new(group.name);
        for case in &group.cases {
            for dtype in DTYPES {
                row.add(dtype, check::check(case, dtype, device), args.tolerance * allowed(dtype), &case.dims);
            }
        }
        rows.push(row);
    }
    progress.step("packed sequences");
    rows.push(packed::check(device, args.tolerance)?);
    progress.step("models");
    rows.push(golden::check(device, args.tolerance, &progress)?);
    progress.step("a layer");
    rows.push(layer::check(device, args.short, (args.tolerance, &progress))?);
    Ok(rows)
}

/// The message without the backtrace that Candle appends where `RUST_BACKTRACE` is set.
pub fn one_line(error: &Error) -> String {
    match error {
        Error::WithBacktrace { inner, .. } => one_line(inner),
        error => error.to_string().lines().map(str::trim).collect::<Vec<_>>().join(" "),
    }
}
