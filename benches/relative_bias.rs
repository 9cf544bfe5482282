//! Time and memory of a relative bias like T5's, as a vector by distance and as a tensor (H, T_q, T_kv): `cargo bench
//! --bench relative_bias`, and `-- --help`. ALiBi, which computes its biases, is timed with the same numbers by
//! distance.
//!
//! The ways take turns in each round. The time of a cell is the least of its rounds; its memory is what a call adds to
//! the process at its peak.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
#[path = "common/mod.rs"]
mod common;

use std::collections::HashMap;

use candle_attention::{
    AttentionMask, RelativeBias, RelativeBiasConfig, SdpaOptions, alibi_slopes, scaled_dot_product_attention,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use clap::Parser;

use common::turns;

#[derive(Parser)]
struct Args {
    /// The numbers of keys, and of queries unless those are given.
    #[arg(long, value_delimiter = ',', default_values_t = [512, 2048, 4096, 16384])]
    lengths: Vec<usize>,
    #[arg(long)]
    queries: Option<usize>,
    #[arg(long, default_value_t = 16)]
    heads: usize,
    /// The head dimension.
    #[arg(long, default_value_t = 64)]
    width: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The most positions for which a tensor (H, T_q, T_kv) is allocated.
    #[arg(long, default_value_t = 4096)]
    most_by_pair: usize,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (h, d) = (args.heads, args.width);
    let weight = Tensor::randn(0f32, 1., (32, h), &Device::Cpu)?;
    let tensors = HashMap::from([("relative_attention_bias.weight".to_string(), weight)]);
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let bias = RelativeBias::new(&RelativeBiasConfig::new(true), h, vb)?;
    let slopes = Tensor::from_vec(alibi_slopes(h)?, h, &Device::Cpu)?;
    turns::print_header("T", "bias");
    for &t in &args.lengths {
        let t_q = args.queries.unwrap_or(t);
        let random = |len: usize| Tensor::randn(0f32, 1., (1, h, len, d), &Device::Cpu);
        let (q, k, v) = (random(t_q)?, random(t)?, random(t)?);
        let attend =
            |mask: &AttentionMask, options: &SdpaOptions| scaled_dot_product_attention(&q, &k, &v, mask, options);
        let (none, plain) = (AttentionMask::none(), SdpaOptions::default);
        let distances = Tensor::arange(1 - t as i64, t_q as i64, &Device::Cpu)?.to_dtype(DType::F32)?.abs()?.neg()?;
        let mut ways: Vec<turns::Way> = vec![
            ("none", Box::new(|| attend(&none, &plain()))),
            (
                "T5's by distance",
                Box::new(|| attend(&none, &plain().with_relative_bias(&bias.by_distance(t_q, t, t - t_q)?))),
            ),
            ("ALiBi's slopes", Box::new(|| attend(&none, &plain().with_alibi_slopes(&slopes)))),
            (
                "ALiBi's by distance",
                Box::new(|| {
                    let biases = slopes.unsqueeze(1)?.broadcast_mul(&distances)?;
                    attend(&none, &plain().with_relative_bias(&biases))
                }),
            ),
        ];
        if t <= args.most_by_pair {
            ways.push((
                "T5's (H, T_q, T_kv)",
                Box::new(|| attend(&none.clone().with_bias(&bias.forward(t_q, t, t - t_q)?), &plain())),
            ));
        }
        turns::print(&t.to_string(), &turns::take(&ways, args.rounds)?);
    }
    Ok(())
}
