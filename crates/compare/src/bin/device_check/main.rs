//! A check of attention on every device of a machine, of its numbers and of its speed.
//!
//! ```sh
//! cargo run --release -p candle-attention-compare                             # the CPU
//! cargo run --release -p candle-attention-compare --features cuda -- --bench  # CUDA
//! cargo run --release -p candle-attention-compare --features metal -- --bench # Metal
//! ```

mod args;
mod bench;
mod case;
mod check;
#[path = "../../../../../examples/common/command_line.rs"]
mod command_line;
mod golden;
mod grid;
mod layer;
mod packed;
mod progress;
mod table;

use std::process::ExitCode;

use candle_core::{Device, Error, Result};

use args::{Args, DeviceChoice};
use check::{DTYPES, allowed};
use command_line::one_line;
use progress::Progress;
use table::{Row, Totals};

fn main() -> ExitCode {
    command_line::main(|args: Args| {
        if args.list {
            bench::cells(args.longest).into_iter().for_each(|cell| println!("{}", cell.to_json()));
            return Ok(ExitCode::SUCCESS);
        }
        Ok(if run(&args)? { ExitCode::SUCCESS } else { ExitCode::from(1) })
    })
}

/// Runs the checks, and returns whether all passed.
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
        // A CPU takes minutes for a call of these sizes.
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
