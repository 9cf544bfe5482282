//! What does not fit a cache, which stays as it was, a memory, or the cache of an earlier layer.

use serde::Deserialize;

use crate::common::values;
use crate::layer::{LayerCall, read};
use crate::words::{Tensors, builder, dtype, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("memory", run::<Memory>)];

/// A cache, and the call of a layer that came before.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub struct Held {
    by: Option<Box<LayerCall>>,
    /// Whether it is that of the layer's window.
    sliding: bool,
    /// Of several caches, with each of which the call is tried.
    capacities: Vec<usize>,
    fixed: bool,
    window: Option<usize>,
    dtype: Option<String>,
    q8: bool,
}

/// Distinct numbers of both signs.
pub fn numbers(shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let count = shape.elem_count() as i64;
    let numbers = Tensor::arange(0, count, &CPU).and_then(|n| (n.to_dtype(DType::F32)? * 0.7)?.sin()?.reshape(shape));
    numbers.expect("numbers of any shape")
}

fn step(shape: Shape, by: &LayerCall, cache: &mut AttentionCache) -> Result<Tensor> {
    by.run(&numbers(shape).to_dtype(by.dtype())?, Some(cache)).map(|(_, ys)| ys)
}

impl Held {
    pub fn fill(&self, capacity: Option<usize>) -> Result<AttentionCache> {
        let cfg = match self.by.as_ref().filter(|_| self.sliding) {
            Some(by) => AttentionCacheConfig::for_layer(&by.config()?),
            None => AttentionCacheConfig::new(),
        };
        let cfg = with(cfg, capacity, AttentionCacheConfig::with_capacity);
        let cfg = with(cfg, self.fixed.then_some(false), AttentionCacheConfig::with_growth);
        let cfg = with(cfg, self.window, AttentionCacheConfig::with_window);
        let cfg = with(cfg, self.dtype.as_ref().map(|_| dtype(&self.dtype)), AttentionCacheConfig::with_dtype);
        let mut cache = AttentionCache::new(&if self.q8 { cfg.with_q8() } else { cfg })?;
        if let Some(by) = &self.by {
            step(by.xs.shape().clone(), by, &mut cache)?;
        }
        Ok(cache)
    }

    /// What a call with a cache of each capacity gives. Where that is an error, or a plan, it leaves no trace.
    pub fn check(&self, call: impl Fn(&mut AttentionCache) -> Result<String>) -> Result<String> {
        let attempt = |capacity: Option<usize>| -> Result<String> {
            let [mut cache, mut untouched] = [self.fill(capacity)?, self.fill(capacity)?];
            let state = |cache: &AttentionCache| (cache.lens(), cache.capacity(), cache.memory());
            let outcome = call(&mut cache);
            if !outcome.as_ref().is_ok_and(|text| text == ACCEPTED) {
                assert_eq!(state(&cache), state(&untouched));
                if let Some(by) = &self.by {
                    let token: Shape = (cache.lens().len(), 1, by.xs.dims()[2]).into();
                    let [own, other] = [&mut cache, &mut untouched].map(|cache| step(token.clone(), by, cache));
                    assert_eq!(values(&own?), values(&other?));
                }
            }
            outcome
        };
        let Some((&last, others)) = self.capacities.split_last() else { return attempt(None) };
        let outcome = attempt(Some(last));
        for &capacity in others {
            // A backtrace, where there is one, has the line of each attempt.
            let texts = [&attempt(Some(capacity)), &outcome].map(|outcome| format!("{outcome:?}"));
            assert_eq!(texts[0].lines().next(), texts[1].lines().next());
        }
        outcome
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Edit {
    Truncate(usize),
    TruncateTo(Vec<usize>),
    Reorder(Vec<usize>),
}

impl Edit {
    pub fn apply(&self, cache: &mut AttentionCache) -> Result<()> {
        match self {
            Self::Truncate(len) => cache.truncate(*len),
            Self::TruncateTo(lens) => cache.truncate_to(lens),
            Self::Reorder(sequences) => cache.reorder(sequences),
        }
    }
}

/// What a layer projects.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Memory {
    config: Value,
    dtype: Option<String>,
    keys: Tensors,
    /// The keys unless given.
    values: Option<Tensors>,
}

impl Memory {
    pub fn project(&self) -> Result<ProjectedMemory> {
        let layer = MultiHeadAttention::new(&read(&self.config)?, builder(&"seed".into(), dtype(&self.dtype))?)?;
        layer.project_memory(&self.keys, self.values.as_ref().unwrap_or(&self.keys))
    }
}

impl Call for Memory {
    fn call(self) -> Result<String> {
        self.project().map(accepted)
    }
}
