//! Caches of codes: what the codes of rows are, and attention to them.

use candle_core::{DType, Device, Result, Tensor};

use super::{B, stage};
use crate::cache::quantize::{QuantizedRows, quantize};
use crate::cache::rotation::{Hadamard, rotated};
use crate::cache::staged::CachedCall;
use crate::cache::{AttentionCache, AttentionCacheConfig, Padding};
use crate::mask::{AttentionMask, FullyMaskedRows};
use crate::sdpa::{Attended, Backend, SdpaOptions, decoded, scaled_dot_product_attention};
use candle_attention_call::{KvCodeFormat, RequestedResults};
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::init::TorchSeed;

fn round_trip(rows: &Tensor) -> Result<Vec<Vec<f32>>> {
    round_trip_of(KvCodeFormat::Q8, rows)
}

/// Returns rows as codes have them, without a rotation.
fn round_trip_of(format: KvCodeFormat, rows: &Tensor) -> Result<Vec<Vec<f32>>> {
    let QuantizedRows { codes, scales } = quantize(rows, format)?;
    assert_eq!((codes.dtype(), scales.dtype()), (DType::U8, DType::F32));
    decoded(&codes, &scales, format, DType::F32)?.to_vec2()
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

#[test]
fn e4m3_numbers_are_those_of_candles_type() -> Result<()> {
    for factor in [1.0, 1e-20, 1e20] {
        let rows = (TorchSeed::new(6).randn((300, 48))? * factor)?;
        // Numbers far below the largest of their row are subnormal.
        let small = (rows.narrow(1, 0, 16)? * 3e-5)?;
        let rows = Tensor::cat(&[&small, &rows.narrow(1, 16, 32)?], 1)?;
        let scales = (rows.abs()?.max_keepdim(1)? / 448.0)?;
        let expected = rows.broadcast_div(&scales)?.to_dtype(DType::F8E4M3)?.to_dtype(DType::F32)?;
        let expected = expected.broadcast_mul(&scales)?.to_vec2::<f32>()?;
        for (row, after) in expected.iter().zip(round_trip_of(KvCodeFormat::E4M3, &rows)?) {
            assert_eq!(row, &after);
        }
    }
    Ok(())
}

#[test]
fn q4_error_is_at_most_a_15th_of_the_largest_number_of_a_group() -> Result<()> {
    for (width, group, factor) in [(32, 32, 1.0), (64, 64, 1e-34), (96, 96, 1e-3), (128, 64, 1e37), (192, 64, 100.0)] {
        let rows = (TorchSeed::new(7).randn((300, width))? * factor)?;
        let mut worst = 0f64;
        for (row, after) in rows.to_vec2::<f32>()?.iter().zip(round_trip_of(KvCodeFormat::Q4, &rows)?) {
            for (numbers, found) in row.chunks(group).zip(after.chunks(group)) {
                let largest = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
                for (x, y) in numbers.iter().zip(found) {
                    worst = worst.max(f64::from(x - y).abs() / f64::from(largest));
                }
            }
        }
        // The bound is reached.
        assert!(worst <= 1.0001 / 15.0 && worst > 0.98 / 15.0, "{width}: {worst}");
    }
    Ok(())
}

#[test]
fn codes_of_rows_that_are_not_finite_are_nan_and_of_tiny_numbers_zero() -> Result<()> {
    let mut rows = vec![1f32; 4 * 128];
    rows[5] = f32::NAN;
    rows[128 + 70] = f32::INFINITY;
    rows[2 * 128..].fill(1e-40);
    rows[3 * 128..].fill(0.0);
    let rows = Tensor::from_vec(rows, (4, 128), &Device::Cpu)?;
    for format in KvCodeFormat::ALL {
        let found = round_trip_of(format, &rows)?;
        let group = format.group(128);
        // The numbers of a row, or of a group, have one scale.
        for (row, special) in [(0, 5), (1, 70)] {
            let nan = special / group * group..(special / group + 1) * group;
            for (n, x) in found[row].iter().enumerate() {
                assert_eq!(x.is_nan(), nan.contains(&n), "{format}, row {row}, number {n}: {x}");
            }
        }
        assert!(found[2..].iter().flatten().all(|&x| x == 0.0), "{format}");
    }
    Ok(())
}

#[test]
fn cache_of_4_bits_has_at_most_0_55_of_the_bytes_of_8_bits() -> Result<()> {
    for d in [64, 128] {
        let rows = random((B, 2, 100, d))?;
        let memory = |cfg: &AttentionCacheConfig| -> Result<usize> {
            Ok(stage(&AttentionCache::new(cfg)?, &rows, &rows, Padding::default())?.cache.memory())
        };
        let fixed = AttentionCacheConfig::new().with_capacity(100);
        let of_8_bits = memory(&fixed.clone().with_q8())?;
        assert_eq!(memory(&fixed.clone().with_e4m3())?, of_8_bits);
        let of_4_bits = memory(&fixed.with_q4())?;
        assert!(of_4_bits * 100 <= of_8_bits * 55, "{of_4_bits} bytes, {of_8_bits} with 8 bits");
    }
    Ok(())
}

#[test]
fn widths_that_4_bits_do_not_fit_are_refused() -> Result<()> {
    let cache = AttentionCache::new(&AttentionCacheConfig::new().with_q4())?;
    let staged = |d: usize, d_v: usize| {
        stage(&cache, &random((B, 2, 3, d))?, &random((B, 2, 3, d_v))?, Padding::default()).map(|_| ())
    };
    // Of latents, the values are the first columns.
    let new = cache.new_tokens((1, 3), Padding::default())?;
    let latents = |d: usize, d_v: usize| cache.stage(&new, &random((1, 1, 3, d))?, None, d_v).map(|_| ());
    latents(96, 64)?;
    let beside = AttentionCacheConfig::new().with_q4().with_dtype(DType::BF16);
    for (result, expected) in [
        (staged(40, 32), "[attention_cache] keys have 40 numbers in each head, expected a multiple of 32 for 4 bits"),
        (staged(64, 80), "[attention_cache] values have 80 numbers in each head, expected a multiple of 32 for 4 bits"),
        (
            latents(128, 96),
            "[attention_cache] the latents of a token have 96 of 128 numbers, expected a multiple of 64 for 4 bits",
        ),
        (
            AttentionCache::new(&beside).map(|_| ()),
            "[attention_cache] dtype is BF16 beside q4, expected one of the two",
        ),
    ] {
        let error = result.expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
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
    assert_within(2e-6, found, expected, what)
}

fn assert_within(tolerance: f32, found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
    assert_eq!(found.dims(), expected.dims(), "{what}");
    let found = found.flatten_all()?.to_vec1::<f32>()?;
    let expected = expected.flatten_all()?.to_vec1::<f32>()?;
    for (number, exact) in found.into_iter().zip(expected) {
        assert!((number - exact).abs() <= tolerance * exact.abs().max(1.0), "{what}: {number}, not {exact}");
    }
    Ok(())
}

/// Returns rows as a cache of codes rounds them.
fn rounded(format: KvCodeFormat, rows: &Tensor) -> Result<Tensor> {
    let rotation = Hadamard::of(format, &[rows.dim(3)?]);
    let QuantizedRows { codes, scales } = quantize(&rotated(rows, rotation)?, format)?;
    rotated(&decoded(&codes, &scales, format, DType::F32)?, rotation)
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
    let expected = scaled_dot_product_attention(
        &q,
        &rounded(KvCodeFormat::Q8, &k)?,
        &rounded(KvCodeFormat::Q8, &v)?,
        &mask,
        &options,
    )?;
    assert_close(&staged.attend(&q, &mask, &options, RequestedResults::default())?.output, &expected, "uniform rows")
}

#[test]
fn q8_matches_attention_to_the_rounded_floats() -> Result<()> {
    check_codes(KvCodeFormat::Q8, Widths { d: 6, d_v: 5 }, 2e-6)
}

#[test]
fn e4m3_matches_attention_to_the_rounded_floats() -> Result<()> {
    check_codes(KvCodeFormat::E4M3, Widths { d: 6, d_v: 5 }, 2e-6)
}

#[test]
fn q4_with_one_group_and_with_several_matches_attention_to_the_rounded_floats() -> Result<()> {
    // The sums of rotated queries and keys are rounded elsewhere.
    check_codes(KvCodeFormat::Q4, Widths { d: 32, d_v: 128 }, 2e-5)?;
    check_codes(KvCodeFormat::Q4, Widths { d: 128, d_v: 64 }, 2e-5)
}

/// The widths of keys and values.
struct Widths {
    d: usize,
    d_v: usize,
}

/// Compares a cache of codes with a cache of f32 whose keys and values were rounded before.
fn check_codes(format: KvCodeFormat, widths: Widths, tolerance: f32) -> Result<()> {
    let growing = AttentionCacheConfig::new().with_capacity(2);
    for (cfg, slides) in [(growing.clone(), false), (growing.with_window(4), true)] {
        let mut small = AttentionCache::new(&cfg.clone().with_codes(format))?;
        let mut plain = AttentionCache::new(&cfg)?;
        for (n, CallTokens { t, starts, lens }) in CALLS.into_iter().enumerate() {
            let k = random((B, 2, t, widths.d))?;
            let v = random((B, 2, t, widths.d_v))?;
            let padding = Padding { valid_lens: Some(&lens), starts: Some(&starts) };
            let staged_codes = stage(&small, &k, &v, padding)?;
            let staged = stage(&plain, &rounded(format, &k)?, &rounded(format, &v)?, padding)?;
            if n == 2 {
                let q = random((B, H, T, widths.d))?;
                compare(&q, [&staged_codes.call, &staged.call], slides, tolerance)?;
            }
            small = staged_codes.cache;
            plain = staged.cache;
        }
        assert_eq!(small.lens(), LENS);
    }
    Ok(())
}

fn compare(q: &Tensor, [small, plain]: [&CachedCall; 2], slides: bool, tolerance: f32) -> Result<()> {
    let window = AttentionMask::causal().with_window(3);
    for (n, mask) in masks()?.into_iter().enumerate() {
        let mask = if slides { mask.and(&window) } else { mask };
        for base in options()? {
            let with_weights = RequestedResults { weights: true, ..RequestedResults::default() };
            let expected = match plain.attend(q, &mask, &base, with_weights).and_then(Attended::output_and_weights) {
                // Joined masks whose queries are at different positions are an error with ALiBi.
                Err(error) if slides && error.to_string().contains("ALiBi counts") => continue,
                expected => expected?,
            };
            let seeded = |options: &SdpaOptions| match options.dropout_seed {
                // Each call draws on.
                Some(_) => options.clone().with_dropout_seed(&TorchSeed::new(5)),
                None => options.clone(),
            };
            let found = small.attend(q, &mask, &seeded(&base), with_weights)?.output_and_weights()?;
            assert_within(tolerance, &found.output, &expected.output, &format!("mask {n}, {base:?}"))?;
            assert_within(tolerance, &found.weights, &expected.weights, &format!("weights of mask {n}, {base:?}"))?;
            let of_instruction_sets = InstructionSet::available()
                .into_iter()
                .map(|instruction_set| base.clone().with_instruction_set(instruction_set));
            for options in of_instruction_sets.chain([base.clone().with_backend(Backend::Reference)]) {
                let what = format!("mask {n}, {options:?}");
                let options = seeded(&options);
                assert_within(
                    tolerance,
                    &small.attend(q, &mask, &options, RequestedResults::default())?.output,
                    &expected.output,
                    &what,
                )?;
                let plan = small.plan(q, &mask, &options)?;
                let backend = if options.backend == Backend::Auto { Backend::Fused } else { Backend::Reference };
                assert_eq!(plan.backend, backend, "{what}: {plan}");
            }
        }
    }
    Ok(())
}
