//! The example `causal_lm` in several processes: `mpirun -n 2 causal_lm --model path/to/checkpoint --prompt "..."`.
//!
//! The arguments are those of the example. Each process has a share of the heads, of the MLPs and of the vocabulary;
//! with
//! `--divide positions` it has all weights, and a share of the prompt.

#[path = "../../../../../examples/causal_lm/args.rs"]
mod args;
#[path = "../../../../../examples/common/mod.rs"]
mod common;
#[path = "../../../../../examples/causal_lm/files.rs"]
mod files;
#[path = "../../../../../examples/causal_lm/generate.rs"]
mod generate;
#[path = "../../../../../examples/causal_lm/model.rs"]
mod model;
mod positions;
#[path = "../../../../../examples/causal_lm/run.rs"]
mod run;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::rc::Rc;

use candle_attention::HeadShard;
use candle_attention::weights::Checkpoint;
use candle_attention_distributed::mpi::{self, Mpi};
use candle_attention_distributed::{Communicator, check_same};
use candle_core::{Device, Result, Tensor};
use clap::{Parser, ValueEnum};

use args::Args;
use common::ModelArgs;
use files::Files;
use model::weights::Processes;

/// Generates text with a decoder in the processes of an mpirun.
#[derive(Debug, Parser)]
#[command(name = "causal_lm")]
struct DistributedArgs {
    /// What is divided among the processes
    #[arg(long, value_enum, default_value_t = Divide::Heads)]
    divide: Divide,

    #[command(flatten)]
    model: Args,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Divide {
    /// Weights: heads, MLPs and the vocabulary
    Heads,
    /// The prompt and the cache
    Positions,
}

/// The processes of an mpirun, to the model.
struct World(Rc<dyn Communicator>);

impl Processes for World {
    fn shard(&self) -> HeadShard {
        HeadShard::new(self.0.rank(), self.0.size()).expect("a rank is below the number of processes")
    }

    fn sum(&self, own: &Tensor) -> Result<Tensor> {
        self.0.all_reduce_sum(own)
    }

    fn gather(&self, own: &Tensor) -> Result<Vec<Tensor>> {
        self.0.all_gather(own)
    }
}

fn main() -> ExitCode {
    common::main(|args: DistributedArgs| Ok(mpi::run(|mpi| run_in(args, mpi))))
}

fn run_in(args: DistributedArgs, mpi: &Rc<Mpi>) -> Result<()> {
    let source = ModelArgs { model: None, ..args.model.model.clone() };
    let arguments = DistributedArgs { model: Args { model: source, ..args.model.clone() }, ..args };
    check_same(&**mpi, "the arguments", format!("{arguments:?}").as_bytes())?;
    let files = Files::open(&args.model, &Device::Cpu)?;
    check_same(&**mpi, "config.json", files.config()?.to_string().as_bytes())?;
    let tensors = match &files {
        Files::Folder(folder) => format!("{:?}", Checkpoint::open(folder)?.shapes().collect::<Vec<_>>()),
        Files::Gguf(gguf) => {
            let infos = gguf.content.tensor_infos.iter();
            format!("{:?}", infos.map(|(name, info)| (name, &info.shape)).collect::<BTreeMap<_, _>>())
        }
    };
    check_same(&**mpi, "the names and shapes of tensors", tensors.as_bytes())?;
    let device = args.model.model.device.open_at(mpi.device_number())?;
    let processes = mpi.for_device(&device)?;
    match args.divide {
        Divide::Heads => run::run(&args.model, device, Some(Rc::new(World(processes.clone()))))?,
        Divide::Positions => positions::run(&args.model, device, &files, &*processes)?,
    }
    mpi.say(&format!("{} bytes sent", processes.bytes_sent()));
    Ok(())
}
