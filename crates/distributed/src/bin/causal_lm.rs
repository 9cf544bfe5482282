//! Example `causal_lm` on several ranks: `mpirun -n 2 causal_lm --model path/to/checkpoint --prompt "..."`.
//!
//! The program has the arguments of the example. Each rank has a shard of the heads, of the MLPs and of the vocabulary.
//! With `--divide positions`, it has all weights and a shard of the prompt.

#[path = "../../../../examples/causal_lm/args.rs"]
mod args;
#[path = "../../../../examples/common/mod.rs"]
mod common;
#[path = "../../../../examples/causal_lm/files.rs"]
mod files;
#[path = "../../../../examples/causal_lm/generate.rs"]
mod generate;
#[path = "../../../../examples/causal_lm/model.rs"]
mod model;
#[path = "../../../../examples/causal_lm/run.rs"]
mod run;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use candle_attention::gguf;
use candle_attention::weights::Checkpoint;
use candle_attention::{AttentionMask, HeadShard, SdpaOptions};
use candle_attention_distributed::mpi::{self, Mpi};
use candle_attention_distributed::{Communicator, ContextCache, RingAttention, ZigZag, check_same};
use candle_core::{Device, IndexOp, Result, Tensor, bail};
use clap::{Parser, ValueEnum};

use args::Args;
use common::ModelArgs;
use files::Files;
use model::CausalLm;
use model::attention::{Attention, Input};
use model::weights::Ranks;

/// Generates text with a decoder on the ranks of an mpirun.
#[derive(Debug, Parser)]
#[command(name = "causal_lm")]
struct DistributedArgs {
    /// Division among the ranks
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

/// Ranks of an mpirun as the model uses them.
struct World(Rc<dyn Communicator>);

impl Ranks for World {
    fn shard(&self) -> HeadShard {
        HeadShard::new(self.0.rank(), self.0.size()).expect("a rank is below the world size")
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
            let names = gguf::tensor_names(&gguf.content);
            let shapes = names.map(|name| (name, gguf::tensor_info(&gguf.content, name).map(|info| info.dims)));
            format!("{:?}", shapes.collect::<BTreeMap<_, _>>())
        }
    };
    check_same(&**mpi, "the names and shapes of tensors", tensors.as_bytes())?;
    let device = args.model.model.device.open(mpi.device_number())?;
    let processes = mpi.for_device(&device)?;
    match args.divide {
        Divide::Heads => run::run(&args.model, device, Some(Rc::new(World(processes.clone()))))?,
        Divide::Positions => run_by_positions(&args.model, device, &files, &*processes)?,
    }
    mpi.say(&format!("{} bytes sent", processes.bytes_sent()));
    Ok(())
}

/// Generates greedily from one prompt of ids whose positions are divided among the ranks. Every rank has all weights,
/// and rank 0 prints the tokens.
fn run_by_positions(args: &Args, device: Device, files: &Files, processes: &dyn Communicator) -> Result<()> {
    let [prompt] = args.ids.as_slice() else { bail!("[causal_lm] expected one --ids for --divide positions") };
    if prompt.0.is_empty() || args.temperature != 0.0 || args.logits.is_some() || args.kv_cache.is_some() {
        bail!("[causal_lm] expected tokens, and no --temperature, --logits and --kv-cache for --divide positions")
    }
    let json = files.config()?;
    let model = CausalLm::load(&json, files.weights(args, &device, None)?, |_, _| {})?;
    if model.blocks.attentions().any(Attention::is_linear) {
        bail!("[causal_lm] states of linear attention cannot be divided by positions, expected --divide heads")
    }
    let len = prompt.0.len().saturating_add(args.max_tokens.unwrap_or(100));
    if model.frequencies_differ(1, len) {
        bail!(
            "[causal_lm] the rotary frequencies of the model depend on the number of positions on all ranks, and up to \
             {len} positions exceed the original context; expected --divide heads"
        )
    }
    let order = ZigZag::new(prompt.0.len(), processes);
    let end = files.end_tokens(&json)?;
    let capacity = order.positions().count() + args.max_tokens.unwrap_or(100) / processes.size() + 1;
    // This rank's cache of each layer.
    let caches: Vec<_> = model.blocks.attentions().map(|_| RefCell::new(ContextCache::new(capacity))).collect();

    let forward = |ids: Vec<u32>, positions: Vec<usize>, attend: &Attend| -> Result<Tensor> {
        let ids = Tensor::new(ids, &device)?.unsqueeze(0)?;
        let longest = positions.iter().max().map_or(0, |last| last + 1);
        let xs = model.embed(&ids, &positions, longest)?;
        let positions = Tensor::new(positions.into_iter().map(|at| at as u32).collect::<Vec<_>>(), &device)?;
        model.through_blocks(xs, |layer, attention, input| {
            let attend = |q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions| {
                attend(&mut caches[layer].borrow_mut(), [q, k, v], &RingAttention::new(mask, options))
            };
            attention.forward(Input::Softmax(input.softmax()?.with_positions(&positions).with_function(&attend)))
        })
    };
    let start = Instant::now();
    let own = order.positions().map(|at| prompt.0[at]).collect();
    let hidden = forward(own, order.positions().collect(), &|cache, [q, k, v], ring| {
        cache.append_prompt(k, v, &order)?;
        Ok(ring.attend(q, k, v, &order, processes)?.0)
    })?;
    // Rank 0 has the last position.
    let last = match hidden.dim(1)? {
        0 => Tensor::zeros((1, hidden.dim(2)?), hidden.dtype(), &device)?,
        t => hidden.i((.., t - 1))?,
    };
    let mut last = processes.all_gather(&last)?.swap_remove(0);
    let prefill = start.elapsed();

    let decoding_start = Instant::now();
    let mut made = Vec::new();
    for position in prompt.0.len().. {
        if made.len() == args.max_tokens.unwrap_or(100) || made.last().is_some_and(|token| end.contains(token)) {
            break;
        }
        let token = model.logits(&last)?.i(0)?.argmax(0)?.to_scalar::<u32>()?;
        made.push(token);
        last = forward(vec![token], vec![position], &|cache, [q, k, v], ring| cache.decode(q, k, v, ring, processes))?
            .i((.., 0))?;
    }
    if processes.rank() == 0 {
        writeln!(std::io::stdout(), "{}", made.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?;
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        eprintln!(
            "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s",
            prompt.0.len(),
            rate(prompt.0.len(), prefill.as_secs_f64()),
            made.len(),
            rate(made.len(), decoding_start.elapsed().as_secs_f64())
        );
    }
    Ok(())
}

/// Function that returns a layer's attention output from queries, keys and values.
type Attend<'a> = dyn Fn(&mut ContextCache, [&Tensor; 3], &RingAttention) -> Result<Tensor> + 'a;
