//! A model on a machine that does other things too: `cargo bench --bench shared`.
//!
//! Busy neighbours are processes that use one core each. Every measurement is a separate process, with a thread for
//! each core and with one thread, in turn. `--program NAME=COMMAND` times another program in the same turns;
//! its last `N tokens/s` or `N texts/s` counts:
//!
//! ```sh
//! cargo build --release --example causal_lm
//! cargo bench --bench shared -- --program 'causal_lm=target/release/examples/causal_lm --model MODEL.gguf --ids 1,2,3'
//! ```

use std::collections::{BTreeMap, HashMap};
use std::env;
use std::hint::black_box;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use candle_attention::{
    AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedGatedLinear, PackedLinear,
    packed_linear_no_bias,
};
use candle_core::{DType, Device, Error, Module, Result, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use clap::{Parser, ValueEnum};

/// Layers, width, heads and the inner width of SmolLM2-135M.
const LAYERS: usize = 30;
const EMBED_DIM: usize = 576;
const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const INNER: usize = 1536;

/// The tokens of a prompt, and the tokens that are generated after it.
const PROMPT: usize = 256;
const GENERATED: usize = 96;

/// Times a model while busy neighbours run
#[derive(Parser)]
struct Args {
    /// The numbers of busy neighbours, by comma
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1, 2])]
    neighbours: Vec<usize>,
    /// The number of processes that do the same work at the same time; their rates are added
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    processes: u32,
    /// How often each side has its turn
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only these kinds of work, by comma
    #[arg(long, value_delimiter = ',')]
    work: Vec<Work>,
    /// The type of weights and activations of this bench's own work
    #[arg(long, value_enum, default_values_t = [Numbers::F32, Numbers::Bf16])]
    dtype: Vec<Numbers>,
    /// A program to time, with its name
    #[arg(long, value_name = "NAME=COMMAND")]
    program: Vec<String>,
    /// Runs one measurement in this process, and prints its tokens/s
    #[arg(long, hide = true)]
    measure: Option<Work>,
    /// Uses one core until the process is killed
    #[arg(long, hide = true)]
    busy: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Work {
    /// A prompt of 256 tokens
    Prompt,
    /// 96 tokens after the prompt, one by one
    Generation,
    /// Forward and backward pass of the prompt
    Training,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Numbers {
    F32,
    Bf16,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.busy {
        let mut count = 0u64;
        loop {
            count = black_box(count.wrapping_add(1));
        }
    }
    if let Some(work) = args.measure {
        let dtype = match args.dtype[0] {
            Numbers::F32 => DType::F32,
            Numbers::Bf16 => DType::BF16,
        };
        println!("{:.2} tokens/s", Model::new(dtype, work)?.tokens_per_second(work)?);
        return Ok(());
    }
    let sides = sides(&args)?;
    println!(
        "median rate (tokens/s or texts/s) of {} rounds; in brackets the CPU time of a whole run in seconds",
        args.rounds
    );
    println!("| neighbours | work | all threads | one thread | ratio |\n| ---: | --- | ---: | ---: | ---: |");
    for &count in &args.neighbours {
        let neighbours = Neighbours::start(count)?;
        for side in &sides {
            let mut runs: BTreeMap<bool, Vec<Run>> = BTreeMap::new();
            for _ in 0..args.rounds {
                for is_single in [false, true] {
                    runs.entry(is_single).or_default().push(side.run(is_single, args.processes)?);
                }
            }
            let all = median(&runs[&false]);
            let one = median(&runs[&true]);
            println!(
                "| {count} | {} | {:.1} ({:.1}) | {:.1} ({:.1}) | {:.2} |",
                side.name,
                all.rate,
                all.cpu_seconds,
                one.rate,
                one.cpu_seconds,
                all.rate / one.rate
            );
        }
        drop(neighbours);
    }
    Ok(())
}

/// A command that prints its rate.
struct Side {
    name: String,
    command: Vec<String>,
}

/// One turn of a side.
#[derive(Clone, Copy)]
struct Run {
    /// Tokens or texts a second.
    rate: f64,
    cpu_seconds: f64,
}

/// Returns the programs of the command line, or this bench's own work if there are none.
fn sides(args: &Args) -> Result<Vec<Side>> {
    let mut sides = Vec::new();
    for program in &args.program {
        let Some((name, command)) = program.split_once('=') else {
            return Err(Error::msg(format!("--program is {program:?}, expected NAME=COMMAND")));
        };
        sides.push(Side { name: name.into(), command: command.split_whitespace().map(Into::into).collect() });
    }
    if !sides.is_empty() {
        return Ok(sides);
    }
    let own = env::current_exe()?.display().to_string();
    for &dtype in &args.dtype {
        for work in [Work::Prompt, Work::Generation, Work::Training] {
            let is_wanted = args.work.is_empty() || args.work.contains(&work);
            // Candle multiplies bf16 matrices of a backward pass on a CPU in more time than the rest takes.
            if !is_wanted || (work == Work::Training && dtype == Numbers::Bf16) {
                continue;
            }
            let (work, dtype) = (format!("{work:?}").to_lowercase(), format!("{dtype:?}").to_lowercase());
            let command = [&own, "--measure", &work, "--dtype", &dtype].map(String::from).into();
            sides.push(Side { name: format!("{work}, {dtype}"), command });
        }
    }
    Ok(sides)
}

impl Side {
    /// Runs the command with one thread or with all, in a number of processes at the same time.
    fn run(&self, is_single: bool, processes: u32) -> Result<Run> {
        let [program, arguments @ ..] = &self.command[..] else {
            return Err(Error::msg(format!("{} has no command", self.name)));
        };
        let mut command = Command::new(program);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        if is_single {
            command.env("RAYON_NUM_THREADS", "1");
        }
        let before = children_cpu_seconds();
        let mut children = Vec::new();
        for _ in 0..processes {
            children.push(command.spawn()?);
        }
        let mut rate = 0.0;
        for child in children {
            let output = child.wait_with_output()?;
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            let Some(own_rate) = last_rate(&text) else {
                return Err(Error::msg(format!("{} printed no `N tokens/s` or `N texts/s`:\n{text}", self.name)));
            };
            rate += own_rate;
        }
        Ok(Run { rate, cpu_seconds: children_cpu_seconds() - before })
    }
}

/// Returns the last number of a text that is followed by `tokens/s` or `texts/s`.
fn last_rate(text: &str) -> Option<f64> {
    let mut rate = None;
    let mut before = "";
    for word in text.split_whitespace() {
        let unit = word.trim_end_matches(|character: char| character.is_ascii_punctuation());
        if unit == "tokens/s" || unit == "texts/s" {
            rate = before.parse().ok().or(rate);
        }
        before = word;
    }
    rate
}

/// Returns the run whose speed is the median.
fn median(runs: &[Run]) -> Run {
    let mut sorted = runs.to_vec();
    sorted.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    sorted[sorted.len() / 2]
}

/// Returns the CPU time of all child processes that have ended; 0 where the system does not tell it.
fn children_cpu_seconds() -> f64 {
    #[cfg(unix)]
    {
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: the call writes the struct that it is given.
        let usage = unsafe {
            if libc::getrusage(libc::RUSAGE_CHILDREN, usage.as_mut_ptr()) != 0 {
                return 0.0;
            }
            usage.assume_init()
        };
        let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
        seconds(usage.ru_utime) + seconds(usage.ru_stime)
    }
    #[cfg(not(unix))]
    0.0
}

/// Processes that use one core each until they are dropped.
struct Neighbours(Vec<Child>);

impl Neighbours {
    fn start(count: usize) -> Result<Self> {
        let mut neighbours = Self(Vec::new());
        for _ in 0..count {
            let mut command = Command::new(env::current_exe()?);
            neighbours.0.push(command.arg("--busy").stdout(Stdio::null()).spawn()?);
        }
        Ok(neighbours)
    }
}

impl Drop for Neighbours {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // A process that has ended needs no signal.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Layers of a decoder.
struct Model {
    layers: Vec<Layer>,
    prompt: Tensor,
    token: Tensor,
}

struct Layer {
    attention: MultiHeadAttention,
    mlp: PackedGatedLinear,
    down: PackedLinear,
}

impl Model {
    /// Creates a model with random weights, which are variables if the work trains them.
    fn new(dtype: DType, work: Work) -> Result<Self> {
        let variables = VarMap::new();
        let trainable = Self::from_weights(dtype, &VarBuilder::from_varmap(&variables, dtype, &Device::Cpu))?;
        if work == Work::Training {
            return Ok(trainable);
        }
        let mut weights = HashMap::new();
        for (name, variable) in variables.data().lock().expect("no other thread").iter() {
            weights.insert(name.clone(), variable.as_detached_tensor());
        }
        Self::from_weights(dtype, &VarBuilder::from_tensors(weights, dtype, &Device::Cpu))
    }

    fn from_weights(dtype: DType, vb: &VarBuilder) -> Result<Self> {
        let config =
            MultiHeadAttentionConfig::new(EMBED_DIM, NUM_HEADS).with_num_kv_heads(NUM_KV_HEADS).with_causal(true);
        let mut layers = Vec::new();
        for index in 0..LAYERS {
            let layer = vb.pp(index);
            let gate = packed_linear_no_bias(EMBED_DIM, INNER, layer.pp("gate"))?;
            let up = packed_linear_no_bias(EMBED_DIM, INNER, layer.pp("up"))?;
            layers.push(Layer {
                attention: MultiHeadAttention::new(&config, layer.pp("attention"))?,
                mlp: PackedGatedLinear::new(gate, up, Activation::Silu)?,
                down: packed_linear_no_bias(INNER, EMBED_DIM, layer.pp("down"))?,
            });
        }
        let random = |t| Tensor::randn(0f32, 1f32, (1, t, EMBED_DIM), &Device::Cpu)?.to_dtype(dtype);
        Ok(Self { layers, prompt: random(PROMPT)?, token: random(1)? })
    }

    /// Runs the work for about two seconds, after one run that is not counted.
    fn tokens_per_second(&self, work: Work) -> Result<f64> {
        self.run(work)?;
        let mut tokens = 0.0;
        let mut seconds = 0.0;
        while seconds < 2.0 {
            let counted = self.run(work)?;
            tokens += counted.tokens;
            seconds += counted.seconds;
        }
        Ok(tokens / seconds)
    }

    fn run(&self, work: Work) -> Result<Counted> {
        let mut caches = Vec::new();
        for _ in &self.layers {
            caches.push(AttentionCache::default());
        }
        match work {
            Work::Prompt => {
                let start = Instant::now();
                self.forward(&self.prompt, &mut caches)?;
                Ok(Counted { tokens: PROMPT as f64, seconds: start.elapsed().as_secs_f64() })
            }
            Work::Generation => {
                self.forward(&self.prompt, &mut caches)?;
                let start = Instant::now();
                for _ in 0..GENERATED {
                    self.forward(&self.token, &mut caches)?;
                }
                Ok(Counted { tokens: GENERATED as f64, seconds: start.elapsed().as_secs_f64() })
            }
            Work::Training => {
                let start = Instant::now();
                let mut xs = self.prompt.clone();
                for layer in &self.layers {
                    xs = (&xs + layer.attention.forward(&xs)?)?;
                }
                xs.sqr()?.mean_all()?.backward()?;
                Ok(Counted { tokens: PROMPT as f64, seconds: start.elapsed().as_secs_f64() })
            }
        }
    }

    fn forward(&self, xs: &Tensor, caches: &mut [AttentionCache]) -> Result<Tensor> {
        let mut xs = xs.clone();
        for (layer, cache) in self.layers.iter().zip(caches) {
            let input = AttentionInput::new(&xs).with_cache(cache).with_train(false);
            xs = (&xs + layer.attention.forward_with(input)?)?;
            xs = (&xs + layer.down.forward(&layer.mlp.forward(&xs)?)?)?;
        }
        Ok(xs)
    }
}

/// The tokens of a run, and the time that they took.
struct Counted {
    tokens: f64,
    seconds: f64,
}
