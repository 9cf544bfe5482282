//! Both forms of a call give the same.

use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{Config as Runs, RngSeed, TestRunner};

use super::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig as Config};
use crate::cache::{AttentionCache, AttentionCacheConfig};
use crate::layer::AttentionInput;
use crate::mask::AttentionMask;
use crate::position::{RopeConfig, RopeStyle};
use crate::sdpa::Backend;
use candle_attention_call::{KvCodeFormat, RequestedResults};

const CPU: Device = Device::Cpu;

/// Returns a layer whose parameters, with norms and biases, are all random.
fn layer(cfg: &Config, dtype: DType) -> Result<MultiHeadLatentAttention> {
    let variables = VarMap::new();
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_varmap(&variables, dtype, &CPU))?;
    let random = |(name, variable): (&String, &candle_core::Var)| {
        let width = variable.dim(D::Minus1)? as f64;
        let numbers = (Tensor::randn(0f32, 1.0, variable.shape(), &CPU)? * width.sqrt().recip())?;
        Ok((name.clone(), numbers.to_dtype(dtype)?))
    };
    let weights =
        variables.data().lock().expect("no panic before").iter().map(random).collect::<Result<HashMap<_, _>>>()?;
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(weights, dtype, &CPU))
}

#[derive(Debug, Clone)]
struct Case {
    cfg: Config,
    b: usize,
    /// T of each call, and for each of three sequences where its tokens begin and end, in tenths of T.
    calls: Vec<(usize, [(usize, usize); 3])>,
    mask: usize,
    /// How many positions are taken back before the last call.
    back: usize,
    codes: Option<KvCodeFormat>,
    dtype: DType,
    backend: Backend,
}

fn cases() -> impl Strategy<Value = Case> {
    let widths = (1..=4usize, 1..=20usize, 1..=9usize, 1..=4usize, 1..=9usize, prop::option::of(1..=7usize));
    let options = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    let call = (1..=7usize, prop::array::uniform3((0..=3usize, 5..=10usize)));
    let run = (1..=3usize, prop::collection::vec(call, 2..6), 0..6usize, 0..3usize);
    let how = (
        select(vec![None, None, Some(KvCodeFormat::Q8), Some(KvCodeFormat::E4M3)]),
        select(vec![DType::F32, DType::F64, DType::BF16]),
        select(vec![Backend::Auto, Backend::Reference]),
    );
    (widths, options, run, how).prop_map(
        |((h, rank, nope, pairs, value, q_rank), (bias, halves, ragged, rotates), (b, mut calls, mask, back), how)| {
            if !ragged {
                calls.iter_mut().for_each(|(_, tokens)| *tokens = [(0, 10); 3]);
            }
            let style = if halves { RopeStyle::RotateHalf } else { RopeStyle::Interleaved };
            let cfg = Config::new(6, h)
                .with_kv_lora_rank(rank)
                .with_nope_head_dim(nope)
                .with_rope_head_dim(2 * pairs)
                .with_value_head_dim(value)
                .with_bias(bias)
                .with_rotates(rotates)
                .with_rope(RopeConfig::new(50.0).with_style(style));
            let cfg = q_rank.map_or(cfg.clone(), |width| cfg.with_q_lora_rank(width));
            let (codes, dtype, backend) = how;
            Case { cfg, b, calls, mask, back, codes, dtype, backend }
        },
    )
}

fn mask_of(case: &Case, b: usize, t: usize, t_kv: usize) -> Result<AttentionMask> {
    let of_each = |lens: [usize; 3]| lens[..b].to_vec();
    Ok(match case.mask {
        0 | 1 => AttentionMask::none(),
        2 => AttentionMask::none().with_starts(of_each([1, 0, 2])),
        3 => AttentionMask::causal().with_window(3),
        4 => AttentionMask::none().with_bool_mask(&Tensor::randn(0f32, 1.0, (b, 1, t, t_kv), &CPU)?.ge(-0.5f32)?),
        _ => AttentionMask::none().with_bias(&Tensor::randn(0f32, 1.0, (1, case.cfg.num_heads(), t, t_kv), &CPU)?),
    })
}

/// Returns the largest difference, as a part of the largest number where that is above 1.
fn difference(found: &Tensor, expected: &Tensor) -> Result<f64> {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
    let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    let found = numbers(found)?;
    let expected = numbers(expected)?;
    let largest = expected.iter().fold(1.0, |most: f64, x| most.max(x.abs()));
    let errors = found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / largest);
    Ok(errors.map(|error| if error.is_nan() { f64::INFINITY } else { error }).fold(0.0, f64::max))
}

fn check(case: &Case) -> Result<()> {
    let layer = layer(&case.cfg, case.dtype)?;
    let config = AttentionCacheConfig::new().with_capacity(3).with_codes(case.codes);
    let mut caches = [AttentionCache::new(&config)?, AttentionCache::new(&config)?];
    let tolerance = match case.dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        _ => 4e-2,
    };
    for (n, (t, tokens)) in case.calls.iter().enumerate() {
        if n + 1 == case.calls.len() {
            for cache in &mut caches {
                let lens: Vec<_> = cache.lens().iter().map(|len| len.saturating_sub(case.back)).collect();
                cache.truncate_to(&lens)?;
            }
        }
        let at = |tenths: usize| t * tenths / 10;
        let starts: Vec<_> = tokens[..case.b].iter().map(|&(start, _)| at(start)).collect();
        let ends: Vec<_> = tokens[..case.b].iter().map(|&(start, end)| at(end).max(at(start))).collect();
        let before = if n == 0 { vec![0; case.b] } else { caches[0].lens() };
        let own = starts.iter().zip(&ends).map(|(start, end)| end - start);
        let t_kv = before.iter().zip(own).map(|(before, own)| before + own).max().unwrap_or(0);
        let mask = mask_of(case, case.b, *t, t_kv)?;
        let xs = Tensor::randn(0f32, 1.0, (case.b, *t, 6), &CPU)?.to_dtype(case.dtype)?;
        let mut outputs = Vec::new();
        for (absorbs, cache) in [false, true].into_iter().zip(&mut caches) {
            let input = AttentionInput::new(&xs).with_mask(&mask).with_backend(case.backend);
            let input = input.with_cache(&mut *cache).with_starts(&starts).with_valid_lens(&ends);
            let wanted = RequestedResults { weights: true, ..RequestedResults::default() };
            let with_weights = layer.prepare(&input, Some(absorbs))?.attend(wanted)?.output_and_weights()?.weights;
            let again = AttentionInput::new(&xs).with_mask(&mask).with_backend(case.backend);
            let again = again.with_cache(cache).with_starts(&starts).with_valid_lens(&ends);
            let ys = layer.prepare(&again, Some(absorbs))?.finish(again.cache, RequestedResults::default())?.output;
            outputs.push((ys, with_weights));
        }
        let [(expanded, expanded_weights), (absorbed, absorbed_weights)] = &outputs[..] else { unreachable!() };
        for (found, expected) in [(absorbed, expanded), (absorbed_weights, expanded_weights)] {
            let difference = difference(found, expected)?;
            assert!(difference <= tolerance, "call {n}: off by {difference:e}");
        }
    }
    assert_eq!(caches[0].lens(), caches[1].lens());
    Ok(())
}

#[test]
fn both_forms_give_the_same() {
    let config = Runs { cases: 150, rng_seed: RngSeed::Fixed(0x1a7e), failure_persistence: None, ..Runs::default() };
    let checked = |case: Case| check(&case).map_err(|error| TestCaseError::fail(error.to_string()));
    TestRunner::new(config).run(&cases(), checked).unwrap_or_else(|error| panic!("{error}"));
}

/// Checks one group of numbers, and several, of which the latents have the first.
#[test]
fn both_forms_give_the_same_with_a_cache_of_4_bits() -> Result<()> {
    for (rank, rope) in [(32, 32), (64, 32), (128, 64)] {
        for dtype in [DType::F32, DType::F64] {
            let cfg = Config::new(6, 3).with_kv_lora_rank(rank).with_nope_head_dim(4).with_rope_head_dim(rope);
            let cfg = cfg.with_value_head_dim(3).with_rope(RopeConfig::new(50.0));
            let calls = vec![(5, [(0, 10); 3]), (1, [(0, 10); 3]), (4, [(0, 10); 3])];
            let codes = Some(KvCodeFormat::Q4);
            check(&Case { cfg, b: 2, calls, mask: 0, back: 1, codes, dtype, backend: Backend::Auto })?;
        }
    }
    Ok(())
}

/// Gradients of what queries are made from, beside frozen latents.
#[test]
fn both_forms_give_the_same_gradients() -> Result<()> {
    let cfg = Config::new(6, 3).with_kv_lora_rank(5).with_nope_head_dim(4).with_rope_head_dim(2).with_value_head_dim(3);
    let vars = VarMap::new();
    MultiHeadLatentAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F64, &CPU))?;
    let vars = vars.data().lock().expect("one thread");
    let mut tensors: HashMap<_, _> = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    let q_proj = &vars["q_proj.weight"];
    tensors.insert("q_proj.weight".into(), q_proj.as_tensor().clone());
    let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::from_tensors(tensors, DType::F64, &CPU))?;
    let xs = Tensor::randn(0f64, 1.0, (2, 5, 6), &CPU)?;
    let mut found = Vec::new();
    for absorbs in [false, true] {
        let mut cache = AttentionCache::default();
        let input = AttentionInput::new(&xs).with_cache(&mut cache);
        let ys = layer.prepare(&input, Some(absorbs))?.finish(input.cache, RequestedResults::default())?.output;
        let gradient = ys.sqr()?.sum_all()?.backward()?.get(q_proj).expect("a variable").clone();
        found.push([ys, gradient]);
    }
    for (absorbed, expanded) in found[1].iter().zip(&found[0]) {
        let difference = difference(absorbed, expanded)?;
        assert!(difference <= 1e-12, "off by {difference:e}");
    }
    Ok(())
}

/// Compares the widths of DeepSeek: keys of 576, and values of 512 that are columns of them; and enough queries for
/// several threads.
#[test]
fn the_fused_kernel_attends_to_latents_of_full_width() -> Result<()> {
    let cfg = Config::new(16, 2).with_nope_head_dim(8).with_value_head_dim(8);
    assert_eq!((cfg.kv_lora_rank(), cfg.rope_head_dim()), (512, 64));
    for dtype in [DType::F32, DType::BF16] {
        let layer = layer(&cfg, dtype)?;
        let mut caches = [AttentionCache::default(), AttentionCache::default()];
        for t in [150, 1, 3] {
            let xs = Tensor::randn(0f32, 1.0, (2, t, 16), &CPU)?.to_dtype(dtype)?;
            let mut outputs = Vec::new();
            let ways = [(Backend::Fused, true), (Backend::Reference, false)];
            for ((backend, absorbs), cache) in ways.into_iter().zip(&mut caches) {
                let input = AttentionInput::new(&xs).with_backend(backend).with_cache(cache);
                let call = layer.prepare(&input, Some(absorbs))?;
                assert_eq!(call.q.dims(), [2, 2, t, if absorbs { 576 } else { 72 }]);
                outputs.push(call.finish(input.cache, RequestedResults::default())?.output);
            }
            let difference = difference(&outputs[0], &outputs[1])?;
            assert!(difference <= if dtype == DType::F32 { 1e-5 } else { 4e-2 }, "{dtype:?}: off by {difference:e}");
        }
    }
    Ok(())
}

#[test]
fn long_prompts_expand_and_short_calls_absorb() {
    let cfg = Config::new(2048, 16);
    for (t_q, t_kv, expected) in [
        (1, 2, true),
        (1, 100_000, true),
        (100, 4096, true),
        (170, 1_000_000, true),
        (171, 1_000_000, false),
        (200, 4096, false),
        (512, 512, false),
        (4096, 4096, false),
    ] {
        assert_eq!(cfg.absorbs(t_q, t_kv, None), expected, "{t_q} queries, {t_kv} keys");
    }
}
