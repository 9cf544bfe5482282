//! Linear attention by the gated delta rule: `cargo bench --bench delta -- --python PATH` compares it with the
//! functions of transformers on PyTorch and the operators of ONNX Runtime and llama.cpp. `-- --help` lists the options.
//!
//! The work of a prompt is the three multiply-adds of the recurrence for each number of a state and each token. The
//! results of engines are compared with this crate's before anything is timed. Engines take turns, and the shortest of
//! their rounds counts.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
#[path = "../common/mod.rs"]
mod common;

use std::cell::{Cell, RefCell};

use candle_attention::{DeltaLayout, DeltaOptions, GatedDeltaNet, GatedDeltaNetConfig, gated_delta_rule};
use candle_core::{DType, Device, Result, Tensor, Var, bail};
use candle_nn::{VarBuilder, VarMap};
use clap::Parser;
use rayon::prelude::*;
use serde_json::json;

use common::peak;
use common::peer::Peer;
use common::turns;

#[derive(Parser)]
struct Args {
    /// The parts to run: prompt, token, train and layer.
    #[arg(long, value_delimiter = ',', default_values = ["prompt", "token", "train", "layer"])]
    parts: Vec<String>,
    /// The number of tokens.
    #[arg(long, default_value_t = 4096)]
    length: usize,
    /// The number of value heads, each of which has a state.
    #[arg(long, default_value_t = 16)]
    heads: usize,
    /// The number of heads of queries and keys.
    #[arg(long, default_value_t = 16)]
    key_heads: usize,
    /// The width of a head.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// The width of a layer's input.
    #[arg(long, default_value_t = 2048)]
    embed_dim: usize,
    /// Decay each channel, as in Kimi Delta Attention.
    #[arg(long)]
    channels: bool,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The number of states that single tokens update in turn, as in the layers of a model.
    #[arg(long, default_value_t = 64)]
    layers: usize,
    /// A Python that has PyTorch and transformers, ONNX Runtime, or xllamacpp.
    #[arg(long)]
    python: Option<String>,
    /// Engines of Python: torch, onnxruntime, llama.cpp.
    #[arg(long, value_delimiter = ',', default_values = ["torch", "onnxruntime", "llama.cpp"])]
    engines: Vec<String>,
    /// The flag that cargo passes.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The inputs of a call, (B, T, H, D) in memory as in a layer, and the options of the call.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor,
    options: DeltaOptions,
}

impl Inputs {
    fn new(args: &Args, t: usize) -> Result<Self> {
        let device = &Device::Cpu;
        let rows = |heads| Tensor::randn(0f32, 1., (1, t, heads, args.width), device)?.transpose(1, 2);
        let decays = if args.channels { vec![1, args.heads, t, args.width] } else { vec![1, args.heads, t] };
        Ok(Self {
            q: rows(args.key_heads)?,
            k: rows(args.key_heads)?,
            v: rows(args.heads)?,
            decay: Tensor::rand(-0.1f32, 0., decays, device)?,
            beta: Tensor::rand(0f32, 1., (1, args.heads, t), device)?,
            state: Tensor::randn(0f32, 1., (1, args.heads, args.width, args.width), device)?,
            options: DeltaOptions::default().with_qk_norm(1e-6),
        })
    }

    /// Returns the tensors by the names that the other engines read.
    fn named(&self) -> Vec<(&'static str, Tensor)> {
        let Self { q, k, v, decay, beta, state, .. } = self;
        let named = [("q", q), ("k", k), ("v", v), ("decay", decay), ("beta", beta), ("state", state)];
        named.into_iter().map(|(name, tensor)| (name, tensor.clone())).collect()
    }

    /// Computes the outputs and the states after the tokens.
    fn call(&self) -> Result<(Tensor, Tensor)> {
        let Self { q, k, v, decay, beta, state, options } = self;
        gated_delta_rule(q, k, v, Some(decay), Some(beta), Some(state), options)
    }

    /// Returns the inputs as variables.
    fn variables(&self) -> Result<Self> {
        let variable = |tensor: &Tensor| Var::from_tensor(tensor).map(Var::into_inner);
        Ok(Self {
            q: variable(&self.q)?,
            k: variable(&self.k)?,
            v: variable(&self.v)?,
            decay: variable(&self.decay)?,
            beta: variable(&self.beta)?,
            state: variable(&self.state)?,
            options: self.options.clone(),
        })
    }

    /// Computes the output, and the gradients of q, k, v, decay and beta if `upstream` is the gradient of the output.
    fn run(&self, upstream: Option<&Tensor>) -> Result<Vec<Tensor>> {
        let Some(upstream) = upstream else { return Ok(vec![self.call()?.0]) };
        let variables = self.variables()?;
        let y = variables.call()?.0;
        let gradients = (&y * upstream)?.sum_all()?.backward()?;
        let mut results = vec![y.detach()];
        for input in [&variables.q, &variables.k, &variables.v, &variables.decay, &variables.beta] {
            let Some(gradient) = gradients.get(input) else { bail!("an input has no gradient") };
            results.push(gradient.clone());
        }
        Ok(results)
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    turns::print_header("part", "engine");
    for part in &args.parts {
        match part.as_str() {
            "prompt" => tokens(&args, part, false)?,
            "train" => tokens(&args, part, true)?,
            "token" => token(&args)?,
            "layer" => layer(&args)?,
            other => bail!("{other:?} is no part, expected prompt, token, train or layer"),
        }
    }
    Ok(())
}

/// Times a prompt, or a forward and a backward pass.
fn tokens(args: &Args, part: &str, trains: bool) -> Result<()> {
    let inputs = &Inputs::new(args, args.length)?;
    let shape = [1, args.heads, args.length, args.width];
    let upstream = &trains.then(|| Tensor::randn(0f32, 1., &shape, &Device::Cpu)).transpose()?;
    let ours = inputs.run(upstream.as_ref())?;
    let first = |results: Vec<Tensor>| results.into_iter().next().map_or_else(|| bail!("there is no result"), Ok);
    let mut ways: Vec<turns::Way> = vec![("this crate", Box::new(|| first(inputs.run(upstream.as_ref())?)))];
    for engine in args.python.iter().flat_map(|_| &args.engines) {
        let others: Vec<_> = upstream.iter().map(|upstream| ("upstream", upstream.clone())).collect();
        let dims: Vec<_> = ours.iter().map(Tensor::dims).collect();
        let cell = json!({ "engine": engine, "trains": trains });
        let prepared =
            Peer::start(args.python.as_deref().unwrap_or_default(), "delta/peers.py").and_then(|mut peer| {
                compare(&ours, &peer.prepare(cell, &inputs.named(), &others, &dims)?)?;
                Ok(RefCell::new(peer))
            });
        match prepared {
            Ok(peer) => ways.push((
                engine.clone().leak(),
                Box::new(move || {
                    peer.borrow_mut().run()?;
                    Tensor::zeros(1, DType::F32, &Device::Cpu)
                }),
            )),
            Err(error) => println!("{part:<8} {engine}: {}", error.to_string().lines().next().unwrap_or_default()),
        }
    }
    let taken = turns::take(&ways, args.rounds)?;
    turns::print(part, &taken);
    if !trains {
        let multiply_adds = (3 * args.length * args.heads * args.width * args.width) as f64;
        let (found, peak) = (2.0 * multiply_adds / taken[0].seconds() / 1e9, peak::measure(DType::F32)?);
        println!("{part:<8} {found:.0} GFLOP/s, {:.2} of {:.0} by {}", found / peak.gflops, peak.gflops, peak.name);
    }
    Ok(())
}

/// Times a layer of Qwen3-Next's form forward and backward, with gradients of its input and its parameters.
fn layer(args: &Args) -> Result<()> {
    let cfg = GatedDeltaNetConfig::new(args.embed_dim, args.heads).with_num_key_heads(args.key_heads);
    let cfg = cfg.with_key_head_dim(args.width).with_value_head_dim(args.width);
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    let net = GatedDeltaNet::load(&cfg, DeltaLayout::Qwen3Next, vb)?;
    let xs = Var::randn(0f32, 1., (1, args.length, args.embed_dim), &Device::Cpu)?;
    let upstream = xs.randn_like(0., 1.)?;
    let run = || {
        let ys = net.forward(&xs)?;
        let gradients = (&ys * &upstream)?.sum_all()?.backward()?;
        gradients.get(&xs).cloned().map_or_else(|| bail!("the input has no gradient"), Ok)
    };
    let mut ways: Vec<turns::Way> = vec![("this crate", Box::new(run))];
    let sizes = [args.embed_dim, args.key_heads, args.heads, args.width];
    if let Some(python) = args.python.as_deref().filter(|_| args.engines.iter().any(|engine| engine == "torch")) {
        let mut peer = Peer::start(python, "delta/peers.py")?;
        let cell = json!({ "engine": "layer", "trains": true, "sizes": sizes });
        peer.prepare(cell, &[("xs", xs.as_tensor().clone())], &[("upstream", upstream.clone())], &[])?;
        let peer = RefCell::new(peer);
        ways.push((
            "torch",
            Box::new(move || {
                peer.borrow_mut().run()?;
                Tensor::zeros(1, DType::F32, &Device::Cpu)
            }),
        ));
    }
    turns::print("layer", &turns::take(&ways, args.rounds)?);
    Ok(())
}

/// Checks that two engines return the same numbers, up to the rounding over thousands of tokens.
fn compare(ours: &[Tensor], theirs: &[Tensor]) -> Result<()> {
    for (n, (own, other)) in ours.iter().zip(theirs).enumerate() {
        let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
        let error = largest(&(own - other)?)? / largest(own)?;
        if error.is_nan() || error > 1e-3 {
            bail!("result {n} differs from this crate's by {error:.1e} of its largest number")
        }
    }
    Ok(())
}

/// Times a token for each layer, whose states are no longer in a cache, and a copy of these states by all threads.
fn token(args: &Args) -> Result<()> {
    let layers = (0..args.layers).map(|_| Inputs::new(args, 1)).collect::<Result<Vec<_>>>()?;
    let next = Cell::new(0);
    let turn = || {
        next.set((next.get() + 1) % layers.len());
        &layers[next.get()]
    };
    let words = args.heads * args.width * args.width;
    let states = layers.iter().map(|layer| layer.state.flatten_all()?.to_vec1::<f32>()).collect::<Result<Vec<_>>>()?;
    let copied = RefCell::new(vec![0f32; words]);
    let copy = || {
        next.set((next.get() + 1) % layers.len());
        let part = words.div_ceil(peak::threads());
        let mut copied = copied.borrow_mut();
        let parts = copied.par_chunks_mut(part).zip(states[next.get()].par_chunks(part));
        parts.for_each(|(to, from)| to.copy_from_slice(from));
        Tensor::zeros(1, DType::F32, &Device::Cpu)
    };
    // Each way runs through all layers, so that all rounds begin with the same data in caches.
    let walk = |once: &dyn Fn() -> Result<Tensor>| (0..args.layers).try_fold(None, |_, _| once().map(Some));
    let whole = |last: Option<Tensor>| last.map_or_else(|| bail!("expected a layer"), Ok);
    let ways: Vec<turns::Way> = vec![
        ("this crate", Box::new(|| whole(walk(&|| Ok(turn().call()?.1))?))),
        ("a copy of the states", Box::new(|| whole(walk(&copy)?))),
    ];
    turns::print("token", &turns::take(&ways, args.rounds)?);
    Ok(())
}
