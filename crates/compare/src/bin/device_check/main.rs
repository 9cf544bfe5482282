//! A check of the numbers of attention, and of what surrounds it, on every device of a machine.
//!
//! ```sh
//! cargo run --release -p candle-attention-compare --bin device_check                  # the CPU
//! cargo run --release -p candle-attention-compare --bin device_check --features cuda  # CUDA
//! cargo run --release -p candle-attention-compare --bin device_check --features metal # Metal
//! ```

mod args;
mod blocks;
mod case;
mod check;
mod coded_rows;
#[path = "../../../../../examples/common/command_line.rs"]
mod command_line;
mod delta;
mod few_rows;
mod first_use;
mod golden;
mod grid;
mod layer;
mod operands;
mod packed;
mod progress;
mod table;
mod token;

use std::process::ExitCode;

use candle_core::{Device, Error, Result};

use args::{Args, DeviceChoice};
use check::{DTYPES, allowed};
use command_line::one_line;
use grid::{Grid, Group};
use progress::Progress;
use table::{Row, Totals};

fn main() -> ExitCode {
    command_line::main(|args: Args| Ok(if run(&args)? { ExitCode::SUCCESS } else { ExitCode::from(1) }))
}

/// Runs the checks, and returns whether all passed.
fn run(args: &Args) -> Result<bool> {
    let mut totals = Totals::default();
    let mut all_passed = true;
    for (name, choice, device) in [
        ("cpu", DeviceChoice::Cpu, Ok(Device::Cpu)),
        ("cuda", DeviceChoice::Cuda, Device::new_cuda(0)),
        ("metal", DeviceChoice::Metal, Device::new_metal(0)),
    ] {
        match device {
            _ if args.device != choice && args.device != DeviceChoice::All => {}
            Ok(device) => {
                println!("{name}");
                if args.first_use {
                    all_passed &= first_use::report(&device);
                    println!();
                    continue;
                }
                let rows = check_device(&device, args)?;
                table::print(&rows);
                if args.explain {
                    table::explain(&rows);
                }
                totals.add(&rows);
                println!();
            }
            Err(error) if args.device == DeviceChoice::All => println!("{name}: absent: {}\n", one_line(&error)),
            Err(error) => return Err(Error::msg(format!("no {name} device: {}", one_line(&error)))),
        }
    }
    if args.first_use {
        return Ok(all_passed);
    }
    println!("{} passed, {} skipped, {} failed", totals.passed, totals.skipped, totals.failed);
    Ok(totals.failed == 0)
}

/// A check that fills one or two rows of the table.
enum Task {
    Calls(Group),
    Packed,
    Models,
    Layer,
    CachedLayer,
    LayerGradients,
    Blocks,
    DeltaRule,
    LinearLayer,
    FewRows,
    CodedRows,
    Token,
}

fn check_device(device: &Device, args: &Args) -> Result<Vec<Row>> {
    let default_widths: &[usize] = if args.short { &[64] } else { &[32, 64, 96, 128] };
    let widths = if args.widths.is_empty() { default_widths } else { &args.widths };
    let mut tasks: Vec<Task> = Grid::new(args.short, widths).groups().into_iter().map(Task::Calls).collect();
    tasks.extend([Task::Packed, Task::Models, Task::Layer, Task::CachedLayer, Task::LayerGradients]);
    tasks.extend([Task::Blocks, Task::DeltaRule, Task::LinearLayer, Task::FewRows, Task::CodedRows, Task::Token]);
    let mut own_tasks = Vec::new();
    for (at, task) in tasks.into_iter().enumerate() {
        if args.part.has(at) {
            own_tasks.push(task);
        }
    }
    let progress = Progress::new(own_tasks.len());
    let tolerance = args.tolerance;
    let mut rows = Vec::new();
    for task in own_tasks {
        progress.step(task.name());
        match task {
            Task::Calls(group) => rows.push(check_group(&group, device, tolerance)),
            Task::Packed => rows.extend(packed::check(device, tolerance)?),
            Task::Models => rows.push(golden::check(device, &args.models, tolerance, &progress)?),
            Task::Layer => rows.push(layer::check(device, args.short, tolerance, &progress)?),
            Task::CachedLayer => rows.extend(layer::check_cached(device, tolerance)?),
            Task::LayerGradients => rows.push(layer::check_gradients(device, tolerance)?),
            Task::Blocks => rows.push(blocks::check(device, tolerance)?),
            Task::DeltaRule => rows.extend(delta::check(device, args.short, tolerance)?),
            Task::LinearLayer => rows.push(delta::check_layer(device, tolerance)?),
            Task::FewRows => rows.push(few_rows::check(device, tolerance)?),
            Task::CodedRows => rows.push(coded_rows::check(device, tolerance)?),
            Task::Token => rows.push(token::check(device, tolerance)?),
        }
    }
    Ok(rows)
}

fn check_group(group: &Group, device: &Device, tolerance: f64) -> Row {
    let mut row = Row::new(group.name);
    for case in &group.cases {
        for dtype in DTYPES {
            row.add(dtype, check::check(case, dtype, device), tolerance * allowed(dtype), &case.dims);
        }
    }
    row
}

impl Task {
    fn name(&self) -> &'static str {
        match self {
            Self::Calls(group) => group.name,
            Self::Packed => "packed sequences",
            Self::Models => "models",
            Self::Layer => "a layer",
            Self::CachedLayer => "a layer with a cache",
            Self::LayerGradients => "gradients of a layer",
            Self::Blocks => "norms and rotation",
            Self::DeltaRule => "gated delta rule",
            Self::LinearLayer => "a layer, linear",
            Self::FewRows => "linear layers of few rows",
            Self::CodedRows => "linear layers of codes",
            Self::Token => "a token of a block",
        }
    }
}
