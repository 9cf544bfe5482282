//! What does not fit a cache, which stays as it was, a memory, or the cache of an earlier layer.

use candle_core::Var;

use crate::wrong::Fitting;
use crate::*;

fn base() -> Config {
    Config::new(8, 4).with_num_kv_heads(2)
}

fn config() -> Config {
    base().with_causal(true).with_context_length(9)
}

fn xs(b: usize, t: usize) -> Tensor {
    let data: Vec<f32> = (0..b * t * 8).map(|n| (n as f32 * 0.7).sin()).collect();
    Tensor::from_vec(data, (b, t, 8), &CPU).expect("as many numbers")
}

/// The call of a layer of this config over these positions.
fn call(cfg: Config, xs: &Tensor, cache: &mut AttentionCache) -> Result<Tensor> {
    layer(cfg)?.forward_with(AttentionInput::new(xs).with_cache(cache))
}

fn with<'a>(input: AttentionInput<'a>, cache: &'a mut AttentionCache) -> Result<Tensor> {
    layer(config())?.forward_with(input.with_cache(cache))
}

fn masked(mask: AttentionMask, cache: &mut AttentionCache) -> Result<Tensor> {
    layer(config())?.forward_with(AttentionInput::new(&xs(2, 2)).with_mask(&mask).with_cache(cache))
}

/// The error of a call with a cache of each of these capacities, which may grow or not, and which holds five positions
/// of two sequences; it leaves no trace.
fn rejected<T>(capacities: &[(usize, bool)], attempt: impl Fn(&mut AttentionCache) -> Result<T>) -> Result<()> {
    let mut errors = Vec::new();
    for &(capacity, growth) in capacities {
        let cfg = AttentionCacheConfig::new().with_capacity(capacity).with_growth(growth);
        let (mut cache, mut untouched) = (AttentionCache::new(&cfg)?, AttentionCache::new(&cfg)?);
        for cache in [&mut cache, &mut untouched] {
            call(config(), &xs(2, 5), cache)?;
        }
        let before = (cache.lens(), cache.capacity(), cache.memory());
        errors.push(attempt(&mut cache).map(drop).expect_err("the call does not fit"));
        assert_eq!((cache.lens(), cache.capacity(), cache.memory()), before);
        let [ys, expected] = [&mut cache, &mut untouched].map(|cache| call(config(), &xs(2, 1), cache));
        assert_eq!(ys?.to_vec3::<f32>()?, expected?.to_vec3::<f32>()?);
    }
    let last = errors.pop().expect("a capacity");
    assert!(errors.iter().all(|error| error.to_string() == last.to_string()));
    Err(last)
}

/// With a cache that has space for the call, and with one that would have to grow.
fn growing<T>(attempt: impl Fn(&mut AttentionCache) -> Result<T>) -> Result<()> {
    rejected(&[(10, true), (5, true)], attempt)
}

#[test]
fn calls_with_a_cache() {
    let none = AttentionMask::none;
    let keep = || Tensor::ones((2, 2), DType::U8, &CPU);
    let uniform = none().with_empty_rows(EmptyRows::Uniform);
    let (xs_of_two, other) = (xs(2, 2), xs(2, 3));
    let two = || AttentionInput::new(&xs_of_two);
    let calls = cases! {
        "another batch" => growing(|cache| call(config(), &xs(3, 1), cache)),
        "one sequence without a batch" => growing(|cache| call(config(), &xs(1, 1).squeeze(0)?, cache)),
        "a layer of another dtype" => growing(|cache| {
            let xs = xs(2, 1).to_dtype(DType::BF16)?;
            layer_in(DType::BF16, config())?.forward_with(AttentionInput::new(&xs).with_cache(cache))
        }),
        "a layer of other heads" => growing(|cache| call(config().with_num_kv_heads(1), &xs(2, 1), cache)),
        "a layer of wider values" => growing(|cache| call(config().with_value_head_dim(3), &xs(2, 1), cache)),
        "more than the context length" => growing(|cache| call(config(), &xs(2, 5), cache)),
        "more than the capacity" =>
            rejected(&[(10, false)], |cache| call(config().with_context_length(99), &xs(2, 6), cache)),
        "keys and values of another input" => growing(|cache| with(two().with_key_value(&other, &other), cache)),
        "a learned key" => growing(|cache| call(config().with_bias_kv(true), &xs(2, 1), cache)),
        "a key of zeros" => growing(|cache| call(config().with_add_zero_attn(true), &xs(2, 1), cache)),
        "a layer of variables" => growing(|cache| {
            let layer = MultiHeadAttention::new(&config(), variables())?;
            layer.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(cache))
        }),
        "an input that is tracked" => growing(|cache| call(config(), Var::from_tensor(&xs(2, 1))?.as_tensor(), cache)),
        "a start past the end" => growing(|cache| with(two().with_valid_lens(&[1, 1]).with_starts(&[0, 2]), cache)),
        "a mask of the new positions only" => growing(|cache| masked(none().with_keep(&keep()?), cache)),
        "a tokenizer's mask of another length" =>
            growing(|cache| masked(AttentionMask::from_attention_mask(&keep()?)?, cache)),
        "lengths of another batch" => growing(|cache| masked(none().with_valid_lens(vec![7]), cache)),
        "a window of nothing" => growing(|cache| masked(none().with_window(0), cache)),
        "a backend that cannot run the call" =>
            growing(|cache| with(two().with_mask(&uniform).with_backend(Backend::Fused), cache)),
        "uniform rows among padding" =>
            growing(|cache| with(two().with_mask(&uniform).with_valid_lens(&[2, 1]), cache)),
    };
    let lens = each("token lengths", [&[1, 2, 1][..], &[2, 3]], |lens| {
        growing(|cache| with(two().with_valid_lens(lens), cache))
    });
    let starts = each("token starts", [&[1][..]], |starts| growing(|cache| with(two().with_starts(starts), cache)));
    let padding = cases! {
        "lengths without a cache" =>
            layer(config())?.forward_with(two().with_valid_lens(&[2, 1])),
        "starts without a cache" => layer(config())?.forward_with(two().with_starts(&[0, 1])),
    };
    assert_reviewed("cache_calls", &[calls, lens, starts, padding]);
}

#[test]
fn edits_of_a_cache() {
    let edits = cases! {
        "longer than it is" => growing(|cache| cache.truncate(6)),
        "a sequence that it does not have" => growing(|cache| cache.reorder(&[0, 2])),
        "an empty cache, longer" => AttentionCache::default().truncate(1),
        "an empty cache, a length" => AttentionCache::default().truncate_to(&[0]),
        "an empty cache, a sequence" => AttentionCache::default().reorder(&[0]),
    };
    let lens = each("five positions, truncated to", [&[5, 6][..], &[5], &[1, 2, 3]], |lens| {
        growing(|cache| cache.truncate_to(lens))
    });
    assert_reviewed("cache_edits", &[edits, lens]);
}

#[test]
fn caches() {
    let new = AttentionCacheConfig::new;
    let configs = cases! {
        "no capacity" => AttentionCache::new(&new().with_capacity(0).with_growth(false)),
        "a capacity beyond counting" => AttentionCache::new(&new().with_capacity(usize::MAX)),
        "a window of nothing" => AttentionCache::new(&new().with_window(0)),
        "a window beyond counting" => AttentionCache::new(&new().with_window(1 << 40)),
        "a capacity below the window" =>
            AttentionCache::new(&new().with_window(9).with_capacity(8).with_growth(false)),
        "two dtypes" => AttentionCache::new(&new().with_dtype(DType::BF16).with_q8()),
        "integers" => AttentionCache::new(&new().with_dtype(DType::I64)),
        "a buffer that no memory holds" => {
            let mut cache = AttentionCache::new(&new().with_capacity(u32::MAX as usize))?;
            let outcome = call(Config::new(4096, 64).with_causal(true), &zeros((64, 1, 4096)), &mut cache);
            assert!(cache.is_empty() && cache.capacity() == 0);
            outcome
        },
    };
    assert_reviewed("cache_configs", &[configs]);
}

/// What a layer projects of seven positions of two sequences.
fn memory(cfg: Config, dtype: DType) -> Result<ProjectedMemory> {
    let encoded = of(dtype, (2, 7, 8));
    layer_in(dtype, cfg)?.project_memory(&encoded, &encoded)
}

/// Queries of this shape over the memory of another layer.
fn over(queries: &[usize], cfg: Config, dtype: DType) -> Result<Tensor> {
    layer(base())?.forward_with(AttentionInput::new(&zeros(queries)).with_memory(&memory(cfg, dtype)?))
}

#[test]
fn memories() {
    let dims: [Fitting; 2] = [("keys", DType::F32, "B S 8"), ("values", DType::F32, "B S 8")];
    let wrong = wrong::tensors("B 2 S 7", &dims, |tensors| {
        layer(base().with_context_length(7))?.project_memory(&tensors[0], &tensors[1])
    });
    let projections = cases! {
        "keys of one dimension" => layer(base())?.project_memory(&zeros(8), &zeros(8)),
        "the memory of a layer without keys of its own" => earlier()?.project_memory(&zeros((2, 5, 8)), &zeros((2, 5, 8))),
        "other values than keys, which are one" =>
            layer(base().with_kv_source(KvSource::KeysAsValues))?.project_memory(&zeros((2, 5, 8)), &zeros((2, 5, 8))),
    };
    let (queries, encoded) = (zeros((2, 3, 8)), zeros((2, 7, 8)));
    let calls = cases! {
        "a memory of more key heads" => over(&[2, 3, 8], base().with_num_kv_heads(4), DType::F32),
        "a memory of wider values" => over(&[2, 3, 8], base().with_value_head_dim(3), DType::F32),
        "a memory with a learned key" => over(&[2, 3, 8], base().with_bias_kv(true), DType::F32),
        "queries of another batch" => over(&[3, 3, 8], base(), DType::F32),
        "queries without a batch" => over(&[3, 8], base(), DType::F32),
        "a memory of another dtype" => over(&[2, 3, 8], base(), DType::F64),
        "keys and values too" => {
            let memory = memory(base(), DType::F32)?;
            let input = AttentionInput::new(&queries).with_memory(&memory).with_key_value(&encoded, &encoded);
            layer(base())?.forward_with(input)
        },
        "a cache too" => {
            let (memory, mut cache) = (memory(base(), DType::F32)?, AttentionCache::default());
            layer(base())?.forward_with(AttentionInput::new(&queries).with_memory(&memory).with_cache(&mut cache))
        },
        "key positions too" => {
            let cfg = Config::new(8, 2).with_rope(RopeConfig::new(100.0));
            let (memory, positions) = (memory(cfg.clone(), DType::F32)?, Tensor::arange(0u32, 7, &CPU)?);
            let input = AttentionInput::new(&queries).with_memory(&memory).with_key_positions(&positions);
            layer(cfg)?.forward_with(input)
        },
    };
    assert_reviewed("memories", &[wrong, projections, calls]);
}

/// A layer that reads the keys of an earlier one.
fn earlier() -> Result<MultiHeadAttention> {
    layer(base().with_causal(true).with_kv_source(KvSource::EarlierLayer))
}

/// The call of such a layer: five tokens of two sequences after `tokens` of the layer of `cfg`.
fn shared(cfg: Config, tokens: usize, dtype: DType) -> Result<Tensor> {
    let mut cache = AttentionCache::default();
    if tokens > 0 {
        layer_in(dtype, cfg)?.forward_with(AttentionInput::new(&of(dtype, (2, tokens, 8))).with_cache(&mut cache))?;
    }
    earlier()?.forward_with(AttentionInput::new(&zeros((2, 5, 8))).with_shared_cache(&cache))
}

#[test]
fn keys_of_an_earlier_layer() {
    let xs = zeros((2, 5, 8));
    let cases = cases! {
        "an empty cache" => shared(base(), 0, DType::F32),
        "fewer tokens than the call" => shared(base(), 4, DType::F32),
        "more key heads" => shared(base().with_num_kv_heads(4), 5, DType::F32),
        "wider values" => shared(base().with_value_head_dim(3), 5, DType::F32),
        "another dtype" => shared(base(), 5, DType::F64),
        "no cache" => earlier()?.forward(&xs),
        "a cache of its own" => {
            let mut cache = AttentionCache::default();
            earlier()?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))
        },
        "projections" => earlier()?.projections(),
        "a layer with keys of its own" => {
            let cache = AttentionCache::default();
            layer(base())?.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))
        },
        "two caches" => {
            let (mut cache, shared) = (AttentionCache::default(), AttentionCache::default());
            earlier()?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache).with_shared_cache(&shared))
        },
        "a long call of a sliding cache" => {
            let cfg = base().with_causal(true).with_window(2);
            let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
            let xs = zeros((2, 9, 8));
            call(cfg.clone(), &xs, &mut cache)?;
            let later = layer(cfg.with_kv_source(KvSource::EarlierLayer))?;
            later.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))
        },
    };
    assert_reviewed("shared_keys", &[cases]);
}
