//! Calls that do not fit a cache, which stays as it was, and configs of caches that hold nothing or too much.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, EmptyRows, MultiHeadAttention,
    MultiHeadAttentionConfig as Config,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::{CPU, Case};

fn config() -> Config {
    Config::new(8, 4).with_num_kv_heads(2).with_causal(true).with_context_length(9)
}

fn weights(dtype: DType) -> VarBuilder<'static> {
    TorchSeed::new(3).var_builder(dtype, &CPU)
}

fn layer(cfg: &Config) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(cfg, weights(DType::F32))
}

fn own() -> Result<MultiHeadAttention> {
    layer(&config())
}

fn xs(b: usize, t: usize) -> Tensor {
    let data: Vec<f32> = (0..b * t * 8).map(|n| (n as f32 * 0.7).sin()).collect();
    Tensor::from_vec(data, (b, t, 8), &CPU).expect("as many numbers")
}

/// A layer's call over these positions.
fn call(layer: Result<MultiHeadAttention>, xs: &Tensor, cache: &mut AttentionCache) -> Result<()> {
    layer?.forward_with(AttentionInput::new(xs).with_cache(cache)).map(drop)
}

/// The layer's call of two positions under a mask.
fn masked(mask: &AttentionMask, cache: &mut AttentionCache) -> Result<()> {
    own()?.forward_with(AttentionInput::new(&xs(2, 2)).with_mask(mask).with_cache(cache)).map(drop)
}

/// The layer's call of two positions, of which these are tokens.
fn tokens(lens: Option<&[usize]>, starts: Option<&[usize]>, cache: &mut AttentionCache) -> Result<()> {
    let xs = xs(2, 2);
    let mut input = AttentionInput::new(&xs).with_cache(cache);
    if let Some(lens) = lens {
        input = input.with_valid_lens(lens);
    }
    if let Some(starts) = starts {
        input = input.with_starts(starts);
    }
    own()?.forward_with(input).map(drop)
}

/// The error of a call with a cache of each of these capacities, which may grow or not, and which holds five positions
/// of two sequences; it leaves no trace.
fn rejected<T>(capacities: &[(usize, bool)], attempt: fn(&mut AttentionCache) -> Result<T>) -> Result<()> {
    let mut errors = Vec::new();
    for &(capacity, growth) in capacities {
        let cfg = AttentionCacheConfig::new().with_capacity(capacity).with_growth(growth);
        let own = own()?;
        let (mut cache, mut untouched) = (AttentionCache::new(&cfg)?, AttentionCache::new(&cfg)?);
        for cache in [&mut cache, &mut untouched] {
            own.forward_with(AttentionInput::new(&xs(2, 5)).with_cache(cache))?;
        }
        let before = (cache.lens(), cache.capacity(), cache.memory());
        errors.push(attempt(&mut cache).map(drop).expect_err("the call does not fit"));
        assert_eq!((cache.lens(), cache.capacity(), cache.memory()), before);
        let ys = own.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))?;
        let expected = own.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut untouched))?;
        assert_eq!(ys.to_vec3::<f32>()?, expected.to_vec3::<f32>()?);
    }
    let last = errors.pop().expect("a capacity");
    assert!(errors.iter().all(|error| error.to_string() == last.to_string()));
    Err(last)
}

/// With a cache that has space for the call, and with one that would have to grow.
fn growing<T>(attempt: fn(&mut AttentionCache) -> Result<T>) -> Result<()> {
    rejected(&[(10, true), (5, true)], attempt)
}

pub const CALLS: &[Case] = cases! {
    "another batch" => growing(|cache| call(own(), &xs(3, 1), cache)),
    "one sequence without a batch" => growing(|cache| call(own(), &xs(1, 1).squeeze(0)?, cache)),
    "a layer of another dtype" => {
        growing(|cache| {
            call(MultiHeadAttention::new(&config(), weights(DType::BF16)), &xs(2, 1).to_dtype(DType::BF16)?, cache)
        })
    },
    "a layer of other heads" => growing(|cache| call(layer(&config().with_num_kv_heads(1)), &xs(2, 1), cache)),
    "a layer of wider values" => growing(|cache| call(layer(&config().with_value_head_dim(3)), &xs(2, 1), cache)),
    "more than the context length" => growing(|cache| call(own(), &xs(2, 5), cache)),
    "more than the capacity" =>
        rejected(&[(10, false)], |cache| call(layer(&config().with_context_length(99)), &xs(2, 6), cache)),
    "keys and values of another input" => {
        growing(|cache| {
            let (xs, other) = (xs(2, 1), xs(2, 3));
            own()?.forward_with(AttentionInput::new(&xs).with_key_value(&other, &other).with_cache(cache))
        })
    },
    "a learned key" => growing(|cache| call(layer(&config().with_bias_kv(true)), &xs(2, 1), cache)),
    "a key of zeros" => growing(|cache| call(layer(&config().with_add_zero_attn(true)), &xs(2, 1), cache)),
    "a layer of variables" => {
        growing(|cache| {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            call(MultiHeadAttention::new(&config(), vb), &xs(2, 1), cache)
        })
    },
    "an input that is tracked" => growing(|cache| call(own(), Var::from_tensor(&xs(2, 1))?.as_tensor(), cache)),
    "token lengths of another batch" => growing(|cache| tokens(Some(&[1, 2, 1]), None, cache)),
    "token starts of another batch" => growing(|cache| tokens(None, Some(&[1]), cache)),
    "more tokens than positions" => growing(|cache| tokens(Some(&[2, 3]), None, cache)),
    "a start past the end" => growing(|cache| tokens(Some(&[1, 1]), Some(&[0, 2]), cache)),
    "a mask of the new positions only" =>
        growing(|cache| masked(&AttentionMask::none().with_keep(&Tensor::ones((2, 2), DType::U8, &CPU)?), cache)),
    "a tokenizer's mask of another length" =>
        growing(|cache| masked(&AttentionMask::from_attention_mask(&Tensor::ones((2, 2), DType::U8, &CPU)?)?, cache)),
    "lengths of another batch" => growing(|cache| masked(&AttentionMask::none().with_valid_lens(vec![7]), cache)),
    "a window of nothing" => growing(|cache| masked(&AttentionMask::none().with_window(0), cache)),
    "a backend that cannot run the call" => {
        growing(|cache| {
            let mask = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
            let xs = xs(2, 1);
            let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(Backend::Fused);
            own()?.forward_with(input.with_cache(cache))
        })
    },
    "uniform rows among padding" => {
        growing(|cache| {
            let mask = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
            let xs = xs(2, 2);
            let input = AttentionInput::new(&xs).with_mask(&mask).with_valid_lens(&[2, 1]);
            own()?.forward_with(input.with_cache(cache))
        })
    },
};

/// Padding of a call has no meaning without a cache.
pub const WITHOUT: &[Case] = cases! {
    "lengths" => own()?.forward_with(AttentionInput::new(&xs(2, 2)).with_valid_lens(&[2, 1])),
    "starts" => own()?.forward_with(AttentionInput::new(&xs(2, 2)).with_starts(&[0, 1])),
};

pub const EDITS: &[Case] = cases! {
    "longer than it is" => growing(|cache| cache.truncate(6)),
    "one sequence longer than it is" => growing(|cache| cache.truncate_to(&[5, 6])),
    "too few lengths" => growing(|cache| cache.truncate_to(&[5])),
    "too many lengths" => growing(|cache| cache.truncate_to(&[1, 2, 3])),
    "a sequence that it does not have" => growing(|cache| cache.reorder(&[0, 2])),
    "an empty cache, longer" => AttentionCache::default().truncate(1),
    "an empty cache, a length" => AttentionCache::default().truncate_to(&[0]),
    "an empty cache, a sequence" => AttentionCache::default().reorder(&[0]),
};

fn new(cfg: AttentionCacheConfig) -> Result<()> {
    AttentionCache::new(&cfg).map(drop)
}

pub const CONFIGS: &[Case] = cases! {
    "no capacity" => new(AttentionCacheConfig::new().with_capacity(0).with_growth(false)),
    "a capacity beyond counting" => new(AttentionCacheConfig::new().with_capacity(usize::MAX)),
    "a window of nothing" => new(AttentionCacheConfig::new().with_window(0)),
    "a window beyond counting" => new(AttentionCacheConfig::new().with_window(1 << 40)),
    "a capacity below the window" =>
        new(AttentionCacheConfig::new().with_window(9).with_capacity(8).with_growth(false)),
    "two dtypes" => new(AttentionCacheConfig::new().with_dtype(DType::BF16).with_q8()),
    "integers" => new(AttentionCacheConfig::new().with_dtype(DType::I64)),
    "a buffer that no memory holds" => {
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(u32::MAX as usize))?;
        let wide = layer(&Config::new(4096, 64).with_causal(true));
        let outcome = call(wide, &Tensor::zeros((64, 1, 4096), DType::F32, &CPU)?, &mut cache);
        assert!(cache.is_empty() && cache.capacity() == 0);
        outcome
    },
};
