//! A prompt whose positions are divided among processes that have all weights, and the tokens after it.

use std::cell::RefCell;
use std::io::Write;
use std::time::Instant;

use candle_attention::{AttentionMask, SdpaOptions};
use candle_attention_distributed::{Communicator, ContextCache, RingAttention, ZigZag};
use candle_core::{Device, IndexOp, Result, Tensor, bail};

use crate::args::Args;
use crate::files::Files;
use crate::model::CausalLm;
use crate::model::attention::{Attention, Input};

/// Goes on from one prompt of ids, greedily. The first process writes.
pub fn run(args: &Args, device: Device, files: &Files, processes: &dyn Communicator) -> Result<()> {
    let [prompt] = args.ids.as_slice() else { bail!("[causal_lm] expected one --ids where positions are divided") };
    if prompt.0.is_empty() || args.temperature != 0.0 || args.logits.is_some() || args.kv_cache.is_some() {
        bail!(
            "[causal_lm] expected tokens, and none of --temperature, --logits and --kv-cache where positions are divided"
        )
    }
    let json = files.config()?;
    let model = CausalLm::load(&json, files.weights(args.model.dtype, &device, None)?, |_, _| {})?;
    if model.blocks.attentions().any(Attention::is_linear) {
        bail!("[causal_lm] states of linear attention cannot be divided by positions, expected --divide heads")
    }
    let (order, end) = (ZigZag::new(prompt.0.len(), processes), files.end_tokens(&json)?);
    let capacity = order.positions().count() + args.max_tokens.unwrap_or(100) / processes.size() + 1;
    // This process's part of the cache of each layer.
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
        Ok(ring.attend([q, k, v], &order, processes)?.0)
    })?;
    // The first process has the last position.
    let last = match hidden.dim(1)? {
        0 => Tensor::zeros((1, hidden.dim(2)?), hidden.dtype(), &device)?,
        t => hidden.i((.., t - 1))?,
    };
    let mut last = processes.all_gather(&last)?.swap_remove(0);
    let prefill = start.elapsed();

    let (start, mut made) = (Instant::now(), Vec::new());
    for position in prompt.0.len().. {
        if made.len() == args.max_tokens.unwrap_or(100) || made.last().is_some_and(|token| end.contains(token)) {
            break;
        }
        let token = model.logits(&last)?.i(0)?.argmax(0)?.to_scalar::<u32>()?;
        made.push(token);
        last =
            forward(vec![token], vec![position], &|cache, qkv, ring| cache.decode(qkv, ring, processes))?.i((.., 0))?;
    }
    if processes.rank() == 0 {
        writeln!(std::io::stdout(), "{}", made.iter().map(u32::to_string).collect::<Vec<_>>().join(","))?;
        let rate = |tokens: usize, seconds: f64| tokens as f64 / seconds.max(1e-9);
        eprintln!(
            "prompt: {} tokens, {:.1} tokens/s; generation: {} tokens, {:.1} tokens/s",
            prompt.0.len(),
            rate(prompt.0.len(), prefill.as_secs_f64()),
            made.len(),
            rate(made.len(), start.elapsed().as_secs_f64())
        );
    }
    Ok(())
}

/// A layer's context from queries, keys and values.
type Attend<'a> = dyn Fn(&mut ContextCache, [&Tensor; 3], &RingAttention) -> Result<Tensor> + 'a;
