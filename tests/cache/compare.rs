//! A layer with a cache against the same layer without one.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, MultiHeadAttention,
    MultiHeadAttentionConfig, MultiHeadLatentAttention,
};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::VarBuilder;

use crate::array::Random;
use crate::by_hand::{parameters, tensors};
use crate::common::{max_error, values};
use crate::plan::Plan;

/// A layer of random weights that are plain tensors.
pub fn layer(cfg: &MultiHeadAttentionConfig, dtype: DType, device: &Device) -> Result<MultiHeadAttention> {
    let weights = tensors(&parameters(cfg, 3), dtype, device)?;
    MultiHeadAttention::new(cfg, VarBuilder::from_tensors(weights, dtype, device))
}

/// Either kind of layer.
pub trait Layer {
    fn run(&self, input: AttentionInput) -> Result<Tensor>;
}

impl Layer for MultiHeadAttention {
    fn run(&self, input: AttentionInput) -> Result<Tensor> {
        self.forward_with(input)
    }
}

impl Layer for MultiHeadLatentAttention {
    fn run(&self, input: AttentionInput) -> Result<Tensor> {
        self.forward_with(input)
    }
}

/// Random tokens (T, width), uniform on [-1, 1).
pub fn tokens(random: &mut Random, (t, width): (usize, usize), dtype: DType, device: &Device) -> Result<Tensor> {
    let data: Vec<f32> = (0..t * width).map(|_| random.between(-1.0, 1.0) as f32).collect();
    Tensor::from_vec(data, (t, width), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The mask of call `n`, and that of sequence `b` as a whole.
pub struct Masks<'a> {
    pub of_call: &'a dyn Fn(usize) -> Result<AttentionMask>,
    pub of_sequence: &'a dyn Fn(usize) -> Result<AttentionMask>,
}

/// The tokens of each sequence, through a layer and its cache.
pub struct Run<'a> {
    pub layer: &'a dyn Layer,
    pub plan: &'a Plan,
    /// (T, E) for each sequence.
    pub tokens: &'a [Tensor],
    pub masks: Masks<'a>,
    pub backend: Backend,
}

impl Run<'_> {
    /// What padding holds: nothing that it touches stays a number.
    fn padding(&self, t: usize) -> Result<Tensor> {
        let like = &self.tokens[0];
        (Tensor::zeros((t, like.dim(1)?), like.dtype(), like.device())? + f64::NAN)?.to_dtype(like.dtype())
    }

    /// The outputs (T, out_dim) of each sequence, call by call.
    pub fn cached(&self, cache: &mut AttentionCache) -> Result<Vec<Tensor>> {
        let mut outputs = vec![Vec::new(); self.plan.b];
        for (n, (call, before)) in self.plan.calls.iter().zip(self.plan.before()).enumerate() {
            assert_eq!(cache.lens(), if n == 0 { vec![] } else { before.clone() }, "call {n}");
            let rows = self.tokens.iter().zip(&call.tokens).zip(&before).map(|((xs, own), &before)| {
                let (left, right) = (self.padding(own.start)?, self.padding(call.t - own.end)?);
                Tensor::cat(&[&left, &xs.narrow(0, before, own.len())?, &right], 0)
            });
            let xs = Tensor::stack(&rows.collect::<Result<Vec<_>>>()?, 0)?;
            let mask = (self.masks.of_call)(n)?;
            let lens: Vec<_> = call.tokens.iter().map(|own| own.end).collect();
            let starts: Vec<_> = call.tokens.iter().map(|own| own.start).collect();
            let mut input = AttentionInput::new(&xs).with_mask(&mask).with_backend(self.backend).with_cache(cache);
            if lens.iter().any(|&len| len < call.t) {
                input = input.with_valid_lens(&lens);
            }
            if starts.iter().any(|&start| start > 0) {
                input = input.with_starts(&starts);
            }
            let ys = self.layer.run(input)?;
            for (b, own) in call.tokens.iter().enumerate() {
                outputs[b].push(ys.i(b)?.narrow(0, own.start, own.len())?.contiguous()?);
                for i in (0..call.t).filter(|i| !own.contains(i)) {
                    assert!(values(&ys.i((b, i))?).iter().all(|y| y.is_finite()), "call {n}, padding {i} of {b}");
                }
            }
        }
        outputs.into_iter().map(|parts| Tensor::cat(&parts, 0)).collect()
    }

    /// The outputs of each sequence by itself, in one call of the reference path without a cache.
    pub fn uncached(&self) -> Result<Vec<Tensor>> {
        let whole = |(b, xs): (usize, &Tensor)| {
            let mask = (self.masks.of_sequence)(b)?;
            self.layer.run(AttentionInput::new(xs).with_mask(&mask).with_backend(Backend::Reference))
        };
        self.tokens.iter().enumerate().map(whole).collect()
    }

    /// The largest difference, relative to the largest output where that is above 1.
    pub fn difference(&self, cache: &mut AttentionCache) -> Result<f64> {
        let (found, expected) = (self.cached(cache)?, self.uncached()?);
        Ok(found.iter().zip(&expected).map(|(found, expected)| difference(found, expected)).fold(0.0, f64::max))
    }
}

/// The largest difference, relative to the largest number that is expected where that is above 1.
pub fn difference(found: &Tensor, expected: &Tensor) -> f64 {
    max_error(found, expected) / values(expected).into_iter().map(f64::abs).fold(1.0, f64::max)
}

/// How far a dtype may be off.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    }
}

/// How far a layer in a dtype may be off with a cache.
pub fn tolerance_of(dtype: DType, cache: &AttentionCacheConfig) -> f64 {
    let kept = match cache.q8() {
        true => 3e-2,
        false => tolerance(cache.dtype().unwrap_or(dtype)),
    };
    kept.max(tolerance(dtype))
}
