//! Time and memory of statistics of attention weights, compared with attention without statistics and with the whole
//! weights: `cargo bench --bench statistics`, and `-- --help`.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
#[path = "common/mod.rs"]
mod common;

use candle_attention::{
    AttentionMask, SdpaOptions, StatisticsOptions, scaled_dot_product_attention,
    scaled_dot_product_attention_with_statistics, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor};
use clap::Parser;

use common::turns;

#[derive(Parser)]
struct Args {
    /// The numbers of queries and keys.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048, 4096, 16384])]
    lengths: Vec<usize>,
    #[arg(long, default_value_t = 16)]
    heads: usize,
    #[arg(long, default_value_t = 16)]
    kv_heads: usize,
    /// The head dimension.
    #[arg(long, default_value_t = 64)]
    width: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// bf16 instead of f32.
    #[arg(long)]
    bf16: bool,
    /// Every query attends to all keys.
    #[arg(long)]
    not_causal: bool,
    /// The most positions for which weights (H, T, T) are allocated.
    #[arg(long, default_value_t = 2048)]
    most_whole: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dtype = if args.bf16 { DType::BF16 } else { DType::F32 };
    let mask = if args.not_causal { AttentionMask::none() } else { AttentionMask::causal() };
    let options = SdpaOptions::default();
    turns::print_header("T", "attention");
    for &t in &args.lengths {
        let random = |heads: usize| Tensor::randn(0f32, 1., (1, heads, t, args.width), &Device::Cpu)?.to_dtype(dtype);
        let (q, k, v) = (random(args.heads)?, random(args.kv_heads)?, random(args.kv_heads)?);
        let with_top = |top: usize| {
            let wanted = StatisticsOptions::default().with_top_keys(top);
            Ok(scaled_dot_product_attention_with_statistics(&q, &k, &v, &mask, &options, &wanted)?.0)
        };
        let mut ways: Vec<turns::Way> = vec![
            ("alone", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &mask, &options))),
            ("with statistics, no top keys", Box::new(|| with_top(0))),
            ("with statistics, top 8", Box::new(|| with_top(8))),
            ("with statistics, top 32", Box::new(|| with_top(32))),
        ];
        if t <= args.most_whole {
            let whole = || Ok(scaled_dot_product_attention_with_weights(&q, &k, &v, &mask, &options)?.output);
            ways.push(("with all weights", Box::new(whole)));
        }
        turns::print(&t.to_string(), &turns::take(&ways, args.rounds)?);
    }
    Ok(())
}
