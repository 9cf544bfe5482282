//! What does not fit a cache is an error that says so, and the cache stays as it was.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, EmptyRows, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, TorchSeed,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::compare::layer;

const CPU: Device = Device::Cpu;

fn config() -> Config {
    Config::new(8, 4).with_num_kv_heads(2).with_causal(true).with_context_length(9)
}

fn own() -> Result<MultiHeadAttention> {
    layer(&config(), DType::F32, &CPU)
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

/// What is done with a cache that holds five positions of two sequences, and the error.
type Attempt = (&'static str, fn(&mut AttentionCache) -> Result<()>, &'static str);

const ATTEMPTS: &[Attempt] = &[
    (
        "another batch",
        |cache| call(own(), &xs(3, 1), cache),
        "[attention_cache] the call has 3 sequences, expected the 2 that the cache holds",
    ),
    (
        "one sequence without a batch",
        |cache| call(own(), &xs(1, 1).squeeze(0)?, cache),
        "[attention_cache] the call has 1 sequences, expected the 2 that the cache holds",
    ),
    (
        "a layer of another dtype",
        |cache| call(layer(&config(), DType::BF16, &CPU), &xs(2, 1).to_dtype(DType::BF16)?, cache),
        "[attention_cache] keys have dtype BF16, expected F32 as in the calls before",
    ),
    (
        "a layer of other heads",
        |cache| call(layer(&config().with_num_kv_heads(1), DType::F32, &CPU), &xs(2, 1), cache),
        "[attention_cache] keys (2, 1, T, 2) on Cpu and values (2, 1, T, 2) on Cpu do not fit those of the calls before, (2, 2, T, 2) on Cpu and (2, 2, T, 2) on Cpu",
    ),
    (
        "a layer of wider values",
        |cache| call(layer(&config().with_value_head_dim(3), DType::F32, &CPU), &xs(2, 1), cache),
        "[attention_cache] keys (2, 2, T, 2) on Cpu and values (2, 2, T, 3) on Cpu do not fit those of the calls before, (2, 2, T, 2) on Cpu and (2, 2, T, 2) on Cpu",
    ),
    (
        "more than the context length",
        |cache| call(own(), &xs(2, 5), cache),
        "[attention_cache] 10 positions with those of the calls before are more than the context length 9",
    ),
    (
        "more than the capacity",
        |cache| call(layer(&config().with_context_length(99), DType::F32, &CPU), &xs(2, 6), cache),
        "[attention_cache] sequence 0 holds 5 positions, and 6 more exceed the capacity of 10",
    ),
    (
        "keys and values of another input",
        |cache| {
            let (xs, other) = (xs(2, 1), xs(2, 3));
            own()?.forward_with(AttentionInput::new(&xs).with_key_value(&other, &other).with_cache(cache)).map(drop)
        },
        "[multi_head_attention] keys and values were given beside a cache, expected self-attention",
    ),
    (
        "a learned key",
        |cache| call(layer(&config().with_bias_kv(true), DType::F32, &CPU), &xs(2, 1), cache),
        "[multi_head_attention] the layer has a learned key (bias_kv), which stands behind the last of a call, not in a cache",
    ),
    (
        "a key of zeros",
        |cache| call(layer(&config().with_add_zero_attn(true), DType::F32, &CPU), &xs(2, 1), cache),
        "[multi_head_attention] the layer has a key of zeros (add_zero_attn), which stands behind the last of a call, not in a cache",
    ),
    (
        "a layer of variables",
        |cache| {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            call(MultiHeadAttention::new(&config(), vb), &xs(2, 1), cache)
        },
        "[attention_cache] keys or values are tracked for gradients, which a cache would lose; expected weights that are plain tensors, or a cache made `with_detached(true)`",
    ),
    (
        "an input that is tracked",
        |cache| call(own(), Var::from_tensor(&xs(2, 1))?.as_tensor(), cache),
        "[attention_cache] keys or values are tracked for gradients, which a cache would lose; expected weights that are plain tensors, or a cache made `with_detached(true)`",
    ),
    (
        "token lengths of another batch",
        |cache| tokens(Some(&[1, 2, 1]), None, cache),
        "[attention_cache] valid_lens has 3 entries, expected one for each of 2 sequences",
    ),
    (
        "token starts of another batch",
        |cache| tokens(None, Some(&[1]), cache),
        "[attention_cache] starts has 1 entries, expected one for each of 2 sequences",
    ),
    (
        "more tokens than positions",
        |cache| tokens(Some(&[2, 3]), None, cache),
        "[attention_cache] valid_lens has 3 for sequence 1, expected at most the call's 2",
    ),
    (
        "a start past the end",
        |cache| tokens(Some(&[1, 1]), Some(&[0, 2]), cache),
        "[attention_cache] the tokens of sequence 1 start at 2, after their end at 1",
    ),
    (
        "a mask of the new positions only",
        |cache| masked(&AttentionMask::none().with_keep(&Tensor::ones((2, 2), DType::U8, &CPU)?), cache),
        "[attention_mask] keep has shape [2, 2], which does not broadcast to (B, H, T_q, T_kv) = [2, 4, 2, 7]",
    ),
    (
        "a tokenizer's mask of another length",
        |cache| masked(&AttentionMask::from_attention_mask(&Tensor::ones((2, 2), DType::U8, &CPU)?)?, cache),
        "[attention_mask] the attention mask has 2 columns, expected one for each of 7 keys",
    ),
    (
        "lengths of another batch",
        |cache| masked(&AttentionMask::none().with_valid_lens(vec![7]), cache),
        "[attention_mask] valid_lens has 1 entries, expected one for each of 2 sequences",
    ),
    (
        "a window of nothing",
        |cache| masked(&AttentionMask::none().with_window(0), cache),
        "[attention_mask] window is 0, expected at least 1 (the query's own key)",
    ),
    (
        "a backend that cannot run the call",
        |cache| {
            let mask = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
            let xs = xs(2, 1);
            let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(Backend::Fused);
            own()?.forward_with(input.with_cache(cache)).map(drop)
        },
        "[scaled_dot_product_attention] no fused path: queries that see nothing are to weigh all keys alike, and fused kernels skip hidden keys",
    ),
    (
        "uniform rows among padding",
        |cache| {
            let mask = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
            let xs = xs(2, 2);
            let input = AttentionInput::new(&xs).with_mask(&mask).with_valid_lens(&[2, 1]);
            own()?.forward_with(input.with_cache(cache)).map(drop)
        },
        "[attention_mask] uniform empty rows weigh all keys alike, expected every sequence to hold all of its keys",
    ),
];

/// A failing call between two others leaves no trace, whether the cache has room, or would have to grow.
#[test]
fn a_call_that_fails_leaves_the_cache_as_it_was() -> Result<()> {
    for capacity in [10, 5] {
        let cfg = AttentionCacheConfig::new().with_capacity(capacity);
        for (what, attempt, expected) in ATTEMPTS {
            let fixed = *what == "more than the capacity";
            if fixed && capacity < 10 {
                continue;
            }
            let cfg = cfg.clone().with_growth(!fixed);
            let own = own()?;
            let (mut cache, mut untouched) = (AttentionCache::new(&cfg)?, AttentionCache::new(&cfg)?);
            for cache in [&mut cache, &mut untouched] {
                own.forward_with(AttentionInput::new(&xs(2, 5)).with_cache(cache))?;
            }
            let before = (cache.lens(), cache.capacity(), cache.memory());
            assert_eq!(error_text(attempt(&mut cache)), *expected, "{what}");
            assert_eq!((cache.lens(), cache.capacity(), cache.memory()), before, "{what}");
            let ys = own.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))?;
            let expected = own.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut untouched))?;
            assert_close(&ys, &expected, 0.0, what);
        }
    }
    Ok(())
}

/// A sliding cache under a layer that sees further is found out once there is something that it would miss.
#[test]
fn a_key_that_was_dropped_and_is_seen_is_an_error() -> Result<()> {
    for (cfg, window) in [(config(), 3), (config().with_window(4), 3)] {
        let layer = layer(&cfg, DType::F32, &CPU)?;
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(window))?;
        for _ in 0..6 {
            layer.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))?;
        }
        let first = if cfg.window().is_some() { 3 } else { 0 };
        let held = 4;
        assert_eq!(
            error_text(layer.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))),
            format!(
                "[attention_cache] a query of sequence 0 sees the key at position {first}, but the cache holds those from \
                 {held} on; expected a shorter window in the mask, or a longer one in the cache"
            )
        );
        assert_eq!(cache.lens(), [6, 6]);
    }
    Ok(())
}

#[test]
fn numbers_of_a_config_that_do_not_fit_are_named() {
    let new = AttentionCacheConfig::new;
    for (cfg, expected) in [
        (new().with_capacity(0).with_growth(false), "capacity is 0 without growth, expected at least 1"),
        (new().with_capacity(usize::MAX), "capacity is 18446744073709551615, expected at most 4294967295"),
        (new().with_window(0), "window is 0, expected at least 1 (the query's own key)"),
        (new().with_window(1 << 40), "window is 1099511627776, expected at most 4294967295"),
        (
            new().with_window(9).with_capacity(8).with_growth(false),
            "capacity is 8 without growth, expected at least the window 9",
        ),
        (new().with_dtype(DType::BF16).with_q8(), "dtype is BF16 beside q8, expected one of the two"),
        (new().with_dtype(DType::I64), "dtype is I64, expected F32, F16, BF16 or F64"),
    ] {
        assert_eq!(error_text(AttentionCache::new(&cfg)), format!("[attention_cache] {expected}"));
    }
}

/// From the first call on, and not once there are several parts.
#[test]
fn what_8_bits_have_no_parts_for_is_an_error() -> Result<()> {
    let uniform = AttentionMask::none().with_empty_rows(EmptyRows::Uniform);
    let seed = TorchSeed::new(1);
    let dropping = layer(&config().with_dropout(0.5), DType::F32, &CPU)?;
    let xs = xs(2, 2);
    let input = || AttentionInput::new(&xs);
    for (input, expected) in [
        (
            input().with_mask(&uniform),
            "uniform empty rows weigh all keys at once, which a cache of 8 bits does not; expected empty rows of zeros",
        ),
        (
            input().with_train(true).with_dropout_seed(&seed),
            "a dropout seed draws for all keys at once, which a cache of 8 bits does not; expected dropout without a seed",
        ),
    ] {
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_q8())?;
        assert_eq!(
            error_text(dropping.forward_with(input.with_cache(&mut cache))),
            format!("[attention_cache] {expected}")
        );
        assert!(cache.is_empty());
        dropping.forward_with(AttentionInput::new(&xs).with_train(true).with_cache(&mut cache))?;
        dropping.forward_with(AttentionInput::new(&xs).with_dropout_seed(&seed).with_cache(&mut cache))?;
    }
    Ok(())
}

#[test]
fn a_buffer_that_no_memory_holds_is_an_error() -> Result<()> {
    let cfg = AttentionCacheConfig::new().with_capacity(u32::MAX as usize);
    let large = layer(&Config::new(4096, 64).with_causal(true), DType::F32, &CPU)?;
    let mut cache = AttentionCache::new(&cfg)?;
    let xs = Tensor::zeros((64, 1, 4096), DType::F32, &CPU)?;
    assert_eq!(
        error_text(large.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))),
        "[attention_cache] a buffer of [64, 64, 4294967295, 64] does not fit in memory"
    );
    assert!(cache.is_empty() && cache.capacity() == 0);
    Ok(())
}

#[test]
fn padding_is_said_only_beside_a_cache() -> Result<()> {
    let xs = xs(2, 2);
    let expected = "[multi_head_attention] valid_lens or starts were given to a call without a cache; expected padding in the mask";
    assert_eq!(error_text(own()?.forward_with(AttentionInput::new(&xs).with_valid_lens(&[2, 1]))), expected);
    assert_eq!(error_text(own()?.forward_with(AttentionInput::new(&xs).with_starts(&[0, 1]))), expected);
    Ok(())
}

/// Generation with a model in training: the numbers of plain weights, and no gradient but that of the output projection.
#[test]
fn a_detached_cache_takes_variables() -> Result<()> {
    let vars = VarMap::new();
    let trained = MultiHeadAttention::new(&config(), VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let tensors = vars.data().lock().expect("one thread").clone();
    let plain = tensors.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    let plain = MultiHeadAttention::new(&config(), VarBuilder::from_tensors(plain, DType::F32, &CPU))?;
    let mut detached = AttentionCache::new(&AttentionCacheConfig::new().with_detached(true))?;
    let mut cache = AttentionCache::default();
    for t in [4, 1] {
        let ys = trained.forward_with(AttentionInput::new(&xs(2, t)).with_cache(&mut detached))?;
        let expected = plain.forward_with(AttentionInput::new(&xs(2, t)).with_cache(&mut cache))?;
        assert_close(&ys, &expected, 1e-6, "the numbers of plain weights");
        let gradients = ys.sum_all()?.backward()?;
        let tracked: Vec<_> = tensors.iter().filter(|(_, var)| gradients.get(var).is_some()).collect();
        assert_eq!(tracked.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["o_proj.weight"]);
        assert!(values(&ys).iter().any(|&y| y != 0.0));
    }
    Ok(())
}

/// Gradients that nothing loses stay: of a bias that is added to the scores, and of the query projection.
#[test]
fn gradients_that_pass_no_cached_key_stay() -> Result<()> {
    let mut weights = crate::by_hand::tensors(&crate::by_hand::parameters(&config(), 3), DType::F32, &CPU)?;
    let q_proj = Var::from_tensor(&weights["q_proj.weight"])?;
    weights.insert("q_proj.weight".into(), q_proj.as_tensor().clone());
    let layer = MultiHeadAttention::new(&config(), VarBuilder::from_tensors(weights, DType::F32, &CPU))?;
    let mut cache = AttentionCache::default();
    layer.forward_with(AttentionInput::new(&xs(2, 3)).with_cache(&mut cache))?;
    let bias = Var::zeros((4, 2, 5), DType::F32, &CPU)?;
    let mask = AttentionMask::none().with_bias(bias.as_tensor());
    let ys = layer.forward_with(AttentionInput::new(&xs(2, 2)).with_mask(&mask).with_cache(&mut cache))?;
    let gradients = ys.sqr()?.sum_all()?.backward()?;
    for var in [&q_proj, &bias] {
        let gradient = gradients.get(var).expect("a gradient");
        assert!(values(gradient).iter().any(|&entry| entry != 0.0));
    }
    Ok(())
}

/// A graph keeps the keys of its own call, whatever is done with the cache before `backward`.
#[test]
fn gradients_are_those_of_the_call_when_its_cache_is_used_again() -> Result<()> {
    type Use = fn(&MultiHeadAttention, &mut AttentionCache) -> Result<()>;
    fn append(layer: &MultiHeadAttention, cache: &mut AttentionCache, t: usize) -> Result<()> {
        layer.forward_with(AttentionInput::new(&(xs(1, t) * -3.0)?).with_cache(cache)).map(drop)
    }
    let uses: [(&str, Use); 3] = [
        ("reset", |layer, cache| {
            cache.reset();
            append(layer, cache, 4)
        }),
        ("truncated", |layer, cache| {
            cache.truncate(1)?;
            append(layer, cache, 3)
        }),
        ("appended to", |layer, cache| append(layer, cache, 3)),
    ];
    for kv_heads in [1, 2] {
        let cfg = config().with_num_kv_heads(kv_heads);
        let mut weights = crate::by_hand::tensors(&crate::by_hand::parameters(&cfg, 3), DType::F32, &CPU)?;
        let q_proj = Var::from_tensor(&weights["q_proj.weight"])?;
        weights.insert("q_proj.weight".into(), q_proj.as_tensor().clone());
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(weights, DType::F32, &CPU))?;
        let gradient = |again: Option<Use>| -> Result<Tensor> {
            let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(16))?;
            let ys = layer.forward_with(AttentionInput::new(&xs(1, 4)).with_cache(&mut cache))?;
            again.map_or(Ok(()), |again| again(&layer, &mut cache))?;
            Ok(ys.sqr()?.sum_all()?.backward()?.get(&q_proj).expect("a gradient").clone())
        };
        let expected = gradient(None)?;
        for (what, again) in uses {
            assert_close(&gradient(Some(again))?, &expected, 0.0, &format!("{kv_heads} key heads, {what}"));
        }
    }
    Ok(())
}
