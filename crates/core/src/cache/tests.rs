//! Tests of the buffers of a cache and of attention to 8 bits.

use candle_core::{DType, Device, Result, Storage, Tensor};

use super::quantize::{QuantizedRows, quantize};
use super::staged::{CachedCall, StagedCall};
use super::storage::KvFloats;
use super::{AttentionCache, AttentionCacheConfig, Padding};
use crate::mask::{AttentionMask, FullyMaskedRows};
use crate::sdpa::{Attended, Backend, SdpaOptions, decoded, scaled_dot_product_attention};
use candle_attention_call::RequestedResults;
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::init::TorchSeed;

const B: usize = 2;
const H_KV: usize = 3;
const D: usize = 4;
const D_V: usize = 5;

/// Returns keys and values of `t` positions, all of whose numbers differ.
fn keys_and_values(t: usize, first: usize) -> Result<KvFloats> {
    let numbers = |width: usize| {
        let end = (B * H_KV * t * width) as f32;
        let numbers = (Tensor::arange(0f32, end, &Device::Cpu)? + 1000.0 * first as f64)?;
        // As a layer projects them: heads second in memory.
        numbers.reshape((B, t, H_KV, width))?.transpose(1, 2)
    };
    Ok(KvFloats { k: numbers(D)?, v: numbers(D_V)? })
}

/// The address of a view's buffer, and the view's strides.
#[derive(Debug, Clone, PartialEq)]
struct Location {
    address: usize,
    strides: Vec<usize>,
}

impl Location {
    fn of(tensor: &Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { panic!("a CPU tensor") };
        assert_eq!(layout.start_offset(), 0);
        let address = storage.as_slice::<f32>().expect("f32").as_ptr() as usize;
        Self { address, strides: layout.stride().to_vec() }
    }
}

/// Stages a call, without committing it.
fn stage(cache: &AttentionCache, k: &Tensor, v: &Tensor, padding: Padding) -> Result<StagedCall<'static>> {
    let new = cache.new_tokens((B, k.dim(2)?), padding)?;
    cache.stage(&new, k, Some(v), v.dim(3)?)
}

/// Returns the keys and values that a call attends to, after it was committed.
fn append(cache: &mut AttentionCache, t: usize, first: usize, padding: Padding) -> Result<KvFloats> {
    let KvFloats { k, v } = keys_and_values(t, first)?;
    let staged = stage(cache, &k, &v, padding)?;
    // A mask that allows no key that a sliding cache has dropped.
    let mask = AttentionMask::causal().with_window(1);
    let rows = staged.call.all_rows(&k, &mask, &SdpaOptions::default())?;
    let attended = staged.call.read(&rows.buffers)?;
    *cache = staged.cache;
    Ok(attended)
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

#[test]
fn cache_appends_keys_and_values_in_one_buffer() -> Result<()> {
    let cfg = AttentionCacheConfig::new().with_capacity(8);
    let mut cache = AttentionCache::new(&cfg)?;
    let mut appended_keys = Vec::new();
    let mut appended_values = Vec::new();
    let mut key_location = None;
    let mut value_location = None;
    for (n, t) in [3, 1, 0, 2, 1, 1].into_iter().enumerate() {
        let new = keys_and_values(t, n)?;
        if t > 0 {
            appended_keys.push(new.k);
            appended_values.push(new.v);
        }
        let KvFloats { k, v } = append(&mut cache, t, n, Padding::default())?;
        assert_eq!(k.dims(), [B, H_KV, cache.len(), D]);
        assert_eq!(v.dims(), [B, H_KV, cache.len(), D_V]);
        assert_eq!(numbers(&k)?, numbers(&Tensor::cat(&appended_keys, 2)?)?);
        assert_eq!(numbers(&v)?, numbers(&Tensor::cat(&appended_values, 2)?)?);
        assert_eq!(Location::of(&k).strides, [H_KV * 8 * D, 8 * D, D, 1]);
        assert_eq!(Location::of(&v).strides, [H_KV * 8 * D_V, 8 * D_V, D_V, 1]);
        assert_eq!(*key_location.get_or_insert(Location::of(&k)), Location::of(&k), "keys are not moved");
        assert_eq!(*value_location.get_or_insert(Location::of(&v)), Location::of(&v), "values are not moved");
    }
    let before = key_location.expect("calls");
    let memory = cache.memory();
    let KvFloats { k, .. } = append(&mut cache, 1, 6, Padding::default())?;
    assert_ne!(Location::of(&k).address, before.address);
    assert_eq!((cache.capacity(), cache.memory()), (16, 2 * memory), "doubled");
    assert_eq!(memory, B * H_KV * 8 * (D + D_V) * 4);
    Ok(())
}

/// Checks that a buffer is allocated once every `capacity - window` positions, and that keys are in the order of their
/// positions.
#[test]
fn sliding_cache_allocates_a_buffer_once_in_capacity_less_window_positions() -> Result<()> {
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(4))?;
    let mut moves = 0;
    let mut address = 0;
    for n in 0..41 {
        let KvFloats { k, .. } = append(&mut cache, 1, n, Padding::default())?;
        assert!(cache.capacity() <= 8 && k.dim(2)? >= 4.min(n + 1), "{:?}", k.dims());
        // The first number of each position is that of its call.
        let firsts = numbers(&k.narrow(0, 0, 1)?.narrow(1, 0, 1)?.narrow(3, 0, 1)?)?;
        let expected: Vec<_> = (n + 1 - k.dim(2)?..=n).map(|n| 1000.0 * n as f32).collect();
        assert_eq!(firsts, expected, "call {n}");
        let current = Location::of(&k).address;
        moves += usize::from(current != address);
        address = current;
    }
    assert!(moves <= 10, "{moves} buffers in 41 calls");
    assert_eq!((cache.len(), cache.capacity()), (41, 8));
    Ok(())
}

#[test]
fn cache_is_unchanged_by_a_call_that_was_not_committed() -> Result<()> {
    for cfg in [
        AttentionCacheConfig::new().with_capacity(16),
        AttentionCacheConfig::new().with_capacity(3),
        AttentionCacheConfig::new().with_window(2),
    ] {
        let mut cache = AttentionCache::new(&cfg)?;
        append(&mut cache, 3, 0, Padding::default())?;
        let stored_numbers = |source: &AttentionCache| -> Result<Vec<f32>> {
            let rows = source.buffers.as_ref().expect("buffers").rows(&(0..source.stored[0].len()))?;
            let KvFloats { k, v } = rows.floats(DType::F32)?;
            Ok([numbers(&k)?, numbers(&v)?].concat())
        };
        let before = stored_numbers(&cache)?;
        let capacity = cache.capacity();
        let memory = cache.memory();
        for t in [1, 2, 9] {
            let KvFloats { k, v } = keys_and_values(t, 1)?;
            drop(stage(&cache, &k, &v, Padding::default())?);
            assert_eq!((cache.lens(), cache.capacity(), cache.memory()), (vec![3, 3], capacity, memory));
            assert_eq!(stored_numbers(&cache)?, before);
        }
    }
    Ok(())
}

fn round_trip(rows: &Tensor) -> Result<Vec<Vec<f32>>> {
    let QuantizedRows { codes, scales } = quantize(rows)?;
    assert_eq!((codes.dtype(), scales.dtype()), (DType::U8, DType::F32));
    decoded(&codes, &scales, DType::F32)?.to_vec2()
}

#[test]
fn q8_error_is_at_most_a_254th_of_the_largest_number_of_a_row() -> Result<()> {
    for (width, factor) in [(1, 1.0), (7, 1e-3), (64, 1.0), (64, 1e-34), (128, 1e37), (256, 100.0)] {
        let rows = (Tensor::randn(0f32, 1.0, (500, width), &Device::Cpu)? * factor)?;
        let mut worst = 0f64;
        for (row, after) in rows.to_vec2::<f32>()?.iter().zip(round_trip(&rows)?) {
            let largest = row.iter().fold(0f32, |most, x| most.max(x.abs()));
            for (x, found) in row.iter().zip(after) {
                let error = f64::from(x - found).abs() / f64::from(largest);
                assert!(error <= 1.0001 / 254.0, "{x} of at most {largest} became {found}");
                worst = worst.max(error);
            }
        }
        // The bound is reached, except by a row of one number.
        assert!(width == 1 || worst > 0.9 / 254.0, "{width}: {worst}");
    }
    Ok(())
}

#[test]
fn q8_zeros_and_extremes_round_trip() -> Result<()> {
    let rows =
        Tensor::new(&[[0f32, -0.0, 0.0], [1.27, -1.27, 0.0], [127.0, -126.0, 1.0], [0.0, -3e38, 3e38]], &Device::Cpu)?;
    let all = round_trip(&rows)?;
    for (row, after) in rows.to_vec2::<f32>()?.iter().zip(all) {
        for (x, found) in row.iter().zip(after) {
            assert!((x - found).abs() <= x.abs() * 1e-6, "{x} became {found}");
        }
    }
    Ok(())
}

#[test]
fn q8_row_that_is_not_finite_is_nan_and_row_of_tiny_numbers_is_zero() -> Result<()> {
    let rows = Tensor::new(
        &[[1f32, f32::NAN], [f32::INFINITY, 0.0], [1.0, f32::NEG_INFINITY], [1e-40, -1e-37]],
        &Device::Cpu,
    )?;
    let found = round_trip(&rows)?;
    assert!(found[..3].iter().flatten().all(|x| x.is_nan()), "{found:?}");
    assert_eq!(found[3], [0.0, 0.0]);
    let wide = Tensor::new(&[[1e300f64, 1.0]], &Device::Cpu)?;
    assert!(round_trip(&wide)?.iter().flatten().all(|x| x.is_nan()));
    Ok(())
}

/// Query heads, and new positions of a call.
const H: usize = 4;
const T: usize = 3;
const LENS: [usize; B] = [8, 5];

fn random(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
}

/// The tokens of a call of `t` positions: `starts[b]..lens[b]` of sequence b.
struct CallTokens {
    t: usize,
    starts: [usize; B],
    lens: [usize; B],
}

/// Calls that have eight tokens of the first sequence and five of the second.
const CALLS: [CallTokens; 3] = [
    CallTokens { t: 4, starts: [0, 0], lens: [4, 3] },
    CallTokens { t: 1, starts: [0, 1], lens: [1, 1] },
    CallTokens { t: T, starts: [0, 1], lens: [3, 3] },
];

fn masks() -> Result<Vec<AttentionMask>> {
    let none = AttentionMask::none;
    let causal = AttentionMask::causal;
    let t_kv = LENS[0];
    let bool_mask = random((B, 1, T, t_kv))?.ge(-0.3f32)?;
    let bias = random((1, H, T, t_kv))?;
    let hidden = (random((B, H, 1, t_kv))?.ge(0.3f32)?.to_dtype(DType::F32)? * -1e30)?;
    Ok(vec![
        none(),
        causal(),
        causal().with_window(2),
        none().with_local_window(1, 1),
        causal().with_prefix(vec![3, 7]),
        AttentionMask::causal_upper_left(),
        AttentionMask::causal_with_offset(4),
        none().with_starts(vec![3, 0]),
        none().with_valid_lens(vec![2, 4]),
        none().with_valid_lens(vec![vec![0, 1, 8], vec![5, 0, 2]]),
        causal().with_bool_mask(&bool_mask),
        causal().with_bias(&bias).with_starts(vec![1, 1]),
        none().with_bias(&(hidden * 1e30)?),
    ])
}

fn options() -> Result<Vec<SdpaOptions>> {
    let by_head = |of: [f32; H]| Tensor::new(&of, &Device::Cpu);
    Ok(vec![
        SdpaOptions::default(),
        SdpaOptions::default().with_softcap(1.5).with_scale(0.7),
        SdpaOptions::default().with_sinks(&by_head([0.0, 1.0, -1.0, 2.0])?),
        SdpaOptions::default().with_alibi_slopes(&by_head([0.5, 0.25, 0.1, 1.0])?),
        SdpaOptions::default().with_dropout(0.3, true).with_dropout_seed(&TorchSeed::new(5)),
    ])
}

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let found = found.flatten_all()?.to_vec1::<f32>()?;
    let expected = expected.flatten_all()?.to_vec1::<f32>()?;
    for (number, exact) in found.into_iter().zip(expected) {
        assert!((number - exact).abs() <= 2e-6 * exact.abs().max(1.0), "{what}: {number}, not {exact}");
    }
    Ok(())
}

/// Returns rows as a cache of 8 bits rounds them.
fn rounded(rows: &Tensor) -> Result<Tensor> {
    let QuantizedRows { codes, scales } = quantize(rows)?;
    decoded(&codes, &scales, DType::F32)
}

#[test]
fn q8_with_uniform_fully_masked_rows_matches_floats() -> Result<()> {
    let k = random((B, 2, 5, 6))?;
    let v = random((B, 2, 5, 5))?;
    let cache = AttentionCache::new(&AttentionCacheConfig::new().with_q8())?;
    let staged = stage(&cache, &k, &v, Padding::default())?.call;
    let mask = AttentionMask::none().with_valid_lens(vec![3, 0]).with_fully_masked_rows(FullyMaskedRows::Uniform);
    let q = random((B, H, 5, 6))?;
    let options = SdpaOptions::default();
    let expected = scaled_dot_product_attention(&q, &rounded(&k)?, &rounded(&v)?, &mask, &options)?;
    assert_close(&staged.attend(&q, &mask, &options, RequestedResults::default())?.output, &expected, "uniform rows")
}

/// Compares with a cache of f32 whose keys and values were rounded to 8 bits before.
#[test]
fn q8_matches_attention_to_the_rounded_floats() -> Result<()> {
    let growing = AttentionCacheConfig::new().with_capacity(2);
    for (cfg, slides) in [(growing.clone(), false), (growing.with_window(4), true)] {
        let mut small = AttentionCache::new(&cfg.clone().with_q8())?;
        let mut plain = AttentionCache::new(&cfg)?;
        for (n, CallTokens { t, starts, lens }) in CALLS.into_iter().enumerate() {
            let k = random((B, 2, t, 6))?;
            let v = random((B, 2, t, 5))?;
            let padding = Padding { valid_lens: Some(&lens), starts: Some(&starts) };
            let staged_q8 = stage(&small, &k, &v, padding)?;
            let staged = stage(&plain, &rounded(&k)?, &rounded(&v)?, padding)?;
            if n == 2 {
                compare(&staged_q8.call, &staged.call, slides)?;
            }
            small = staged_q8.cache;
            plain = staged.cache;
        }
        assert_eq!(small.lens(), LENS);
    }
    Ok(())
}

fn compare(small: &CachedCall, plain: &CachedCall, slides: bool) -> Result<()> {
    let q = random((B, H, T, 6))?;
    let window = AttentionMask::causal().with_window(3);
    for (n, mask) in masks()?.into_iter().enumerate() {
        let mask = if slides { mask.and(&window) } else { mask };
        for base in options()? {
            let with_weights = RequestedResults { weights: true, ..RequestedResults::default() };
            let expected = match plain.attend(&q, &mask, &base, with_weights).and_then(Attended::output_and_weights) {
                // Joined masks whose queries are at different positions are an error with ALiBi.
                Err(error) if slides && error.to_string().contains("ALiBi counts") => continue,
                expected => expected?,
            };
            let seeded = |options: &SdpaOptions| match options.dropout_seed {
                // Each call draws on.
                Some(_) => options.clone().with_dropout_seed(&TorchSeed::new(5)),
                None => options.clone(),
            };
            let found = small.attend(&q, &mask, &seeded(&base), with_weights)?.output_and_weights()?;
            assert_close(&found.output, &expected.output, &format!("mask {n}, {base:?}"))?;
            assert_close(&found.weights, &expected.weights, &format!("weights of mask {n}, {base:?}"))?;
            let of_instruction_sets = InstructionSet::available()
                .into_iter()
                .map(|instruction_set| base.clone().with_instruction_set(instruction_set));
            for options in of_instruction_sets.chain([base.clone().with_backend(Backend::Reference)]) {
                let what = format!("mask {n}, {options:?}");
                let options = seeded(&options);
                assert_close(
                    &small.attend(&q, &mask, &options, RequestedResults::default())?.output,
                    &expected.output,
                    &what,
                )?;
                let plan = small.plan(&q, &mask, &options)?;
                let backend = if options.backend == Backend::Auto { Backend::Fused } else { Backend::Reference };
                assert_eq!(plan.backend, backend, "{what}: {plan}");
            }
        }
    }
    Ok(())
}
