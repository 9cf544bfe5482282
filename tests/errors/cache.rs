//! Errors of calls that do not fit a cache, which does not change then, a memory, or the cache of an earlier layer.

use serde::Deserialize;

use crate::common::values;
use crate::layer::run;
use crate::words::{Fields, read, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("memory", |_, call| memory(call).map(accepted))];

/// Returns distinct numbers of both signs.
pub fn numbers(shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let count = shape.elem_count() as i64;
    let numbers = Tensor::arange(0, count, &CPU).and_then(|n| (n.to_dtype(DType::F32)? * 0.7)?.sin()?.reshape(shape));
    numbers.expect("numbers of any shape")
}

/// Returns a cache after the call of an earlier layer.
pub fn filled(held: &Fields, capacity: Option<usize>) -> Result<AttentionCache> {
    // That of the layer's window.
    let cfg = match held.is("sliding") {
        true => AttentionCacheConfig::for_layer(&read(&held.json("by").expect("a layer")["config"])?),
        false => AttentionCacheConfig::new(),
    };
    let cfg = with(cfg, capacity, AttentionCacheConfig::with_capacity);
    let cfg = with(cfg, held.is("fixed").then_some(false), AttentionCacheConfig::with_growth);
    let cfg = with(cfg, held.get::<usize>("window")?, AttentionCacheConfig::with_window);
    let cfg = cfg.with_dtype(held.dtype());
    let mut cache = AttentionCache::new(&if held.is("q8") { cfg.with_q8() } else { cfg })?;
    held.part("by", |by| step(by.tensor("xs")?.shape(), by, &mut cache))?;
    Ok(cache)
}

fn step(shape: &Shape, by: &Fields, cache: &mut AttentionCache) -> Result<Tensor> {
    run(by, &numbers(shape).to_dtype(by.dtype().unwrap_or(DType::F32))?, Some(cache)).map(|(_, ys)| ys)
}

/// Runs a call with a cache of each capacity, and returns its text. A call that is an error, or a plan, does not change
/// the cache.
pub fn check(held: &Fields, call: impl Fn(&mut AttentionCache) -> Result<String>) -> Result<String> {
    let attempt = |capacity: Option<usize>| -> Result<String> {
        let [mut cache, mut untouched] = [filled(held, capacity)?, filled(held, capacity)?];
        let state = |kept: &AttentionCache| (kept.lens(), kept.capacity(), kept.memory());
        let outcome = call(&mut cache);
        if !outcome.as_ref().is_ok_and(|text| text == ACCEPTED) {
            assert_eq!(state(&cache), state(&untouched));
            held.part("by", |by| {
                let token = (cache.lens().len(), 1, by.tensor("xs")?.dim(2)?).into();
                let [own, other] = [&mut cache, &mut untouched].map(|cache| step(&token, by, cache));
                assert_eq!(values(&own?), values(&other?));
                Ok(())
            })?;
        }
        outcome
    };
    let capacities: Vec<usize> = held.get("capacities")?.unwrap_or_default();
    let Some((&last, others)) = capacities.split_last() else { return attempt(None) };
    let outcome = attempt(Some(last));
    for &capacity in others {
        // A backtrace, where there is one, has the line of each attempt.
        let texts = [&attempt(Some(capacity)), &outcome].map(|outcome| format!("{outcome:?}"));
        assert_eq!(texts[0].lines().next(), texts[1].lines().next());
    }
    outcome
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Edit {
    Truncate(usize),
    TruncateTo(Vec<usize>),
    Reorder(Vec<usize>),
    Remove(usize),
    SwapRemove(usize),
    Keep { lens: Vec<usize>, kept: Vec<Vec<usize>> },
}

impl Edit {
    pub fn apply(&self, cache: &mut AttentionCache) -> Result<()> {
        match self {
            Self::Truncate(len) => cache.truncate(*len),
            Self::TruncateTo(lens) => cache.truncate_to(lens),
            Self::Reorder(sequences) => cache.reorder(sequences),
            Self::Remove(sequence) => cache.remove(*sequence),
            Self::SwapRemove(sequence) => cache.swap_remove(*sequence),
            Self::Keep { lens, kept } => cache.keep(lens, kept),
        }
    }
}

/// Projects a memory; the values' input is the keys' unless given.
pub fn memory(of: &Fields) -> Result<ProjectedMemory> {
    let layer = MultiHeadAttention::new(&of.need("config")?, of.builder("seed")?)?;
    let keys = of.tensor("keys")?;
    let [values] = of.tensors(["values"])?;
    layer.project_memory(&keys, values.as_ref().unwrap_or(&keys))
}
