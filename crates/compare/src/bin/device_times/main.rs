//! Times of attention, of layers and of a model on a device, for beside_pytorch.py.
//!
//! ```sh
//! cargo build --release -p candle-attention-compare --bin device_times --features cuda
//! python crates/compare/src/bin/device_times/beside_pytorch.py target/release/device_times
//! ```

mod args;
mod attention;
mod cell;
mod clock;
mod coded_rows;
#[path = "../../../../../examples/common/command_line.rs"]
mod command_line;
mod delta;
mod grid;
mod layer;
mod llama;
mod memory;
mod outcome;

use std::process::ExitCode;

use candle_core::{Device, Error, Result};

use args::{Args, DeviceChoice};
use cell::{Cell, Work};
use clock::Clock;
use command_line::one_line;
use llama::Sizes;
use outcome::Outcome;

fn main() -> ExitCode {
    command_line::main(|args: Args| run(&args))
}

fn run(args: &Args) -> Result<()> {
    let sizes = Sizes::new(args.longest as usize);
    let mut cells = grid::cells(args.longest as usize);
    cells.retain(|cell| args.sections.is_empty() || args.sections.contains(&cell.section));
    cells.retain(|cell| cell.name.contains(&args.rows));
    if args.list {
        for cell in &cells {
            let mut entry = cell.to_json();
            if let Work::Model(_) = cell.work {
                entry["config"] = sizes.config();
                entry["prompt"] = sizes.prompt.into();
            }
            println!("{entry}");
        }
        return Ok(());
    }
    if args.first_call {
        println!("{}", llama::first_call(&sizes, || open(args.device))?);
        return Ok(());
    }
    let clock = Clock { device: open(args.device)?, turns: args.turns as usize };
    for cell in &cells {
        // One call that fails does not keep the others from being timed.
        let outcome = time(cell, &sizes, &clock).unwrap_or_else(|error| Outcome::Skipped(one_line(&error)));
        println!("{}", outcome.to_json(&cell.name));
    }
    Ok(())
}

fn open(choice: DeviceChoice) -> Result<Device> {
    let (name, device) = match choice {
        DeviceChoice::Cpu => return Ok(Device::Cpu),
        DeviceChoice::Cuda => ("cuda", Device::new_cuda(0)),
        DeviceChoice::Metal => ("metal", Device::new_metal(0)),
    };
    device.map_err(|error| Error::msg(format!("no {name} device: {}", one_line(&error))))
}

fn time(cell: &Cell, sizes: &Sizes, clock: &Clock) -> Result<Outcome> {
    match &cell.work {
        Work::Attention(own) => attention::time(own, clock),
        Work::Memory(own) => attention::memory(own, &clock.device),
        Work::Row(own) => coded_rows::time(own, clock),
        Work::CachedToken(own) => layer::time_cached_token(own, clock),
        Work::DeltaRule(own) => delta::time(own, clock),
        Work::LayerTraining(own) => layer::time_training(own, clock),
        Work::Model(step) => llama::time(*step, sizes, clock),
    }
}
