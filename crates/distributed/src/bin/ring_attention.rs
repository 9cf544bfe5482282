//! Measures the time of ring attention over a long prompt and of a token after it:
//! `mpirun -n 2 ring_attention --positions 65536`.

#[path = "../../../../examples/common/mod.rs"]
mod common;

use std::process::ExitCode;
use std::rc::Rc;
use std::time::Instant;

use candle_attention::{AttentionMask, SdpaOptions};
use candle_attention_distributed::mpi::{self, Mpi};
use candle_attention_distributed::{ContextCache, RingAttention, ZigZag, check_same};
use candle_core::{Result, Tensor, bail};
use clap::Parser;

use common::DeviceChoice;

/// Measures the time of attention over a prompt whose positions are divided among the ranks of an mpirun.
#[derive(Debug, Parser)]
#[command(name = "ring_attention")]
struct Args {
    /// Positions of the prompt
    #[arg(long, value_name = "T", default_value_t = 65_536)]
    positions: usize,

    /// Query heads
    #[arg(long, value_name = "H", default_value_t = 2)]
    heads: usize,

    /// Key and value heads
    #[arg(long, value_name = "H", default_value_t = 1)]
    kv_heads: usize,

    /// Width of a head
    #[arg(long, value_name = "D", default_value_t = 64)]
    head_dim: usize,

    /// Device of the computation; on CUDA, each rank uses a separate GPU
    #[arg(long, value_enum, default_value_t = DeviceChoice::Cpu)]
    device: DeviceChoice,
}

fn main() -> ExitCode {
    mpi::run(|processes| time(&Args::parse(), processes))
}

fn time(args: &Args, mpi: &Rc<Mpi>) -> Result<()> {
    let &Args { positions, heads, kv_heads, head_dim, device } = args;
    check_same(&**mpi, "the arguments", format!("{args:?}").as_bytes())?;
    let device = device.open(mpi.device_number())?;
    let processes = &*mpi.for_device(&device)?;
    let size = processes.size();
    if positions == 0 || !positions.is_multiple_of(2 * size) {
        bail!("[ring_attention] expected positions to be a multiple of 2 * the world size {size}, found {positions}")
    }
    let draw = |h, t| Tensor::randn(0f32, 1., (1, h, t, head_dim), &device);
    let own = positions / size;
    let q = draw(heads, own)?;
    let k = draw(kv_heads, own)?;
    let v = draw(kv_heads, own)?;
    let ring = RingAttention::new(&AttentionMask::causal(), &SdpaOptions::default());
    let order = ZigZag::new(positions, processes);

    // Every rank starts after all ranks have reached the barrier.
    let barrier = || check_same(processes, "the step", b"");
    barrier()?;
    let start = Instant::now();
    let before = processes.bytes_sent();
    ring.attend(&q, &k, &v, &order, processes)?;
    device.synchronize()?;
    let sent = processes.bytes_sent() - before;
    let alone = start.elapsed().as_secs_f64();
    barrier()?;
    let prompt = start.elapsed().as_secs_f64();

    let mut cache = ContextCache::new(own + 2);
    cache.append_prompt(&k, &v, &order)?;
    let token_q = draw(heads, 1)?;
    let token_k = draw(kv_heads, 1)?;
    let token_v = draw(kv_heads, 1)?;
    cache.decode(&token_q, &token_k, &token_v, &ring, processes)?;
    device.synchronize()?;
    let decoding_start = Instant::now();
    let before_decoding = processes.bytes_sent();
    cache.decode(&token_q, &token_k, &token_v, &ring, processes)?;
    device.synchronize()?;
    let decoding = decoding_start.elapsed().as_secs_f64();
    let sent_decoding = processes.bytes_sent() - before_decoding;

    let formula = (size - 1) * own * kv_heads * 2 * head_dim * 4;
    let formula_decoding = if size > 1 { heads * (head_dim + 1) * 4 } else { 0 };
    println!(
        "rank {} of {size}: prompt {prompt:.3} s, {alone:.3} s on this rank, {sent} bytes sent, {formula} expected; \
         token {:.3} ms, {sent_decoding} bytes sent, {formula_decoding} expected",
        processes.rank(),
        decoding * 1e3
    );
    Ok(())
}
