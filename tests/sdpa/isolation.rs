//! What is not a number, and what is nearly too large for one, reaches the queries that see it and nobody else.

use candle_attention::{
    AttentionMask, EmptyRows, scaled_dot_product_attention_with_lse as with_lse,
    scaled_dot_product_attention_with_weights as with_weights,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::{Array, round};
use crate::check::{Arguments, Bounds, check, compare_context, compare_lse, reference};
use crate::common::values;
use crate::oracle::{Alignment, Case, Dims, Mask, Part};
use crate::recipe::{Chosen, Kind, Layout, Reach, Recipe, dtypes};

crate::on_each_device!(
    a_value_that_is_no_number_reaches_only_its_column_in_the_queries_that_see_it,
    a_key_that_is_no_number_reaches_only_the_queries_that_see_it,
    a_query_that_is_no_number_reaches_only_itself,
    a_uniform_row_is_the_mean_of_all_values_numbers_or_not,
    a_row_whose_scores_are_no_numbers_is_not_empty,
    scores_of_ten_thousand_do_not_overflow,
);

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 6, d: 3, d_v: 2 };

fn recipes(device: &Device) -> Vec<Recipe> {
    let masks: [&[Kind]; 9] = [
        &[],
        &[Kind::Causal],
        &[Kind::UpperLeft, Kind::Prefix],
        &[Kind::ValidLens],
        &[Kind::ValidLensPerQuery, Kind::Starts],
        &[Kind::Causal, Kind::Window],
        &[Kind::Band],
        &[Kind::Keep(Reach::Whole)],
        &[Kind::Keep(Reach::Keys), Kind::Causal],
    ];
    let recipe = |(seed, kinds): (usize, &[Kind])| Recipe {
        dims: DIMS,
        layouts: [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Contiguous],
        masks: vec![kinds.to_vec()],
        uniform_empty_rows: false,
        chosen: Chosen { alibi: seed % 2 == 0, sinks: seed % 3 == 0, ..Chosen::default() },
        dtype: DType::F32,
        seed: seed as u64,
    };
    let plain: Vec<_> = masks.into_iter().enumerate().map(recipe).collect();
    dtypes(device).iter().flat_map(|&dtype| plain.iter().map(move |r| Recipe { dtype, ..r.clone() })).collect()
}

/// Context, weights and log-sum-exp as the bits of their numbers, rows of one query each.
struct Bits {
    context: Vec<u64>,
    weights: Vec<u64>,
    lse: Vec<u64>,
    lse_tensor: Tensor,
    context_tensor: Tensor,
}

fn run(case: &Case, dtype: DType, device: &Device) -> Result<Bits> {
    let Arguments { q, k, v, mask, options } = Arguments::new(case, dtype, device)?;
    let output = with_weights(&q, &k, &v, &mask, &options)?;
    let (context, lse) = with_lse(&q, &k, &v, &mask, &options)?;
    let bits = |tensor: &Tensor| values(tensor).into_iter().map(f64::to_bits).collect::<Vec<_>>();
    assert_eq!(bits(&context), bits(&output.context), "the same context beside weights and beside lse");
    Ok(Bits {
        context: bits(&context),
        weights: bits(&output.weights),
        lse: bits(&lse),
        lse_tensor: lse,
        context_tensor: context,
    })
}

/// Every query as its row number and its index.
fn queries() -> impl Iterator<Item = (usize, [usize; 3])> {
    let index = |row| [row / (DIMS.t_q * DIMS.h), row / DIMS.t_q % DIMS.h, row % DIMS.t_q];
    (0..DIMS.b * DIMS.h * DIMS.t_q).map(move |row| (row, index(row)))
}

fn keys() -> impl Iterator<Item = [usize; 3]> {
    (0..DIMS.b * DIMS.h_kv * DIMS.t_kv).map(|n| [n / (DIMS.t_kv * DIMS.h_kv), n / DIMS.t_kv % DIMS.h_kv, n % DIMS.t_kv])
}

fn sees(case: &Case, [b, h, i]: [usize; 3], [key_b, key_h, j]: [usize; 3]) -> bool {
    b == key_b && case.kv_head(h) == key_h && case.sees([b, h, i, j])
}

fn row(bits: &[u64], row: usize) -> &[u64] {
    let width = bits.len() / (DIMS.b * DIMS.h * DIMS.t_q);
    &bits[row * width..(row + 1) * width]
}

fn a_value_that_is_no_number_reaches_only_its_column_in_the_queries_that_see_it(device: &Device) {
    let mut reached = 0;
    for recipe in recipes(device) {
        let case = recipe.case();
        let clean = run(&case, recipe.dtype, device).expect("the call runs");
        for (n, key) in keys().enumerate() {
            let (special, column) = (SPECIALS[n % 3], n % DIMS.d_v);
            let mut poisoned = case.clone();
            let place = poisoned.v.place([key[0], key[1], key[2], column]);
            poisoned.v.data[place] = special;
            let got = run(&poisoned, recipe.dtype, device).expect("the call runs");
            assert_eq!((&got.weights, &got.lse), (&clean.weights, &clean.lse), "no weight depends on a value");
            for (r, query) in queries() {
                for (d, (&got, &clean)) in row(&got.context, r).iter().zip(row(&clean.context, r)).enumerate() {
                    if sees(&case, query, key) && d == column {
                        reached += 1;
                        let got = f64::from_bits(got);
                        let same = got == special || (got.is_nan() && special.is_nan());
                        assert!(same, "{query:?} sees {special} at {key:?} and gets {got}\n{recipe:?}");
                    } else {
                        assert_eq!(got, clean, "{query:?} column {d} with {special} at {key:?} {column}\n{recipe:?}");
                    }
                }
            }
        }
    }
    assert!(reached > 1000, "{reached}");
}

fn a_key_that_is_no_number_reaches_only_the_queries_that_see_it(device: &Device) {
    let mut endings = [0; 2];
    for recipe in recipes(device) {
        let case = recipe.case();
        let clean = run(&case, recipe.dtype, device).expect("the call runs");
        for (n, key) in keys().enumerate() {
            let (special, column) = (SPECIALS[n % 3], n % DIMS.d);
            let mut poisoned = case.clone();
            let place = poisoned.k.place([key[0], key[1], key[2], column]);
            poisoned.k.data[place] = special;
            let got = run(&poisoned, recipe.dtype, device).expect("the call runs");

            // Where the score becomes -inf, the key is as good as hidden.
            let mut keep = Array::new(&[DIMS.b, DIMS.h, DIMS.t_q, DIMS.t_kv]).filled(|| 1.0);
            let score = |[b, h, i]: [usize; 3]| special * case.q.at([b, h, i, column]);
            for (_, query @ [b, h, i]) in queries().filter(|&(_, query)| sees(&case, query, key)) {
                if score(query) == f64::NEG_INFINITY {
                    let place = keep.place([b, h, i, key[2]]);
                    keep.data[place] = 0.0;
                }
            }
            let mut without = case.clone();
            without.masks.push(Mask { alignment: Alignment::Free, parts: vec![Part::Keep(keep)] });
            let mut expected = without.attend();
            for (r, query) in queries() {
                if !sees(&case, query, key) {
                    let rows = |bits: &Bits| {
                        (row(&bits.context, r).to_vec(), row(&bits.weights, r).to_vec(), row(&bits.lse, r).to_vec())
                    };
                    assert_eq!(rows(&got), rows(&clean), "{query:?} does not see {special} at {key:?}\n{recipe:?}");
                } else if score(query) != f64::NEG_INFINITY {
                    endings[0] += 1;
                    expected.lse[r] = f64::NAN;
                    expected.context[r * DIMS.d_v..(r + 1) * DIMS.d_v].fill(f64::NAN);
                    let seen = |j: &usize| case.sees([query[0], query[1], query[2], *j]);
                    let weights = row(&got.weights, r);
                    assert!((0..DIMS.t_kv).filter(seen).all(|j| f64::from_bits(weights[j]).is_nan()), "{recipe:?}");
                } else {
                    endings[1] += 1;
                }
            }
            let bounds = Bounds::new(&case, &expected, recipe.dtype);
            let (context, lse) = (&got.context_tensor, &got.lse_tensor);
            compare_context("context", context, &case, &expected, &bounds, recipe.dtype)
                .and_then(|()| compare_lse("lse", lse, &case, &expected, &bounds, recipe.dtype))
                .unwrap_or_else(|difference| panic!("{difference}: {special} at {key:?}\n{recipe:?}"));
        }
    }
    assert!(endings.iter().all(|&count| count > 200), "{endings:?}");
}

fn a_query_that_is_no_number_reaches_only_itself(device: &Device) {
    for recipe in recipes(device) {
        let case = recipe.case();
        let clean = run(&case, recipe.dtype, device).expect("the call runs");
        for (poisoned_row, [b, h, i]) in queries() {
            let mut poisoned = case.clone();
            let place = poisoned.q.place([b, h, i, 1]);
            poisoned.q.data[place] = f64::NAN;
            let got = run(&poisoned, recipe.dtype, device).expect("the call runs");
            let sees_any = (0..DIMS.t_kv).any(|j| case.sees([b, h, i, j]));
            for (r, query) in queries() {
                if r == poisoned_row && sees_any {
                    assert!(row(&got.context, r).iter().all(|&bits| f64::from_bits(bits).is_nan()), "{recipe:?}");
                } else {
                    let rows = |bits: &Bits| [row(&bits.context, r).to_vec(), row(&bits.weights, r).to_vec()];
                    assert_eq!(rows(&got), rows(&clean), "{query:?} with NaN in {:?}\n{recipe:?}", [b, h, i]);
                }
            }
        }
    }
}

/// d2l's row of length 0 mixes every value, so a NaN among them shows.
fn a_uniform_row_is_the_mean_of_all_values_numbers_or_not(device: &Device) {
    for &dtype in dtypes(device) {
        let test = || -> Result<()> {
            let q = Tensor::ones((1, 1, 2, 3), dtype, device)?;
            let mask = AttentionMask::none().with_valid_lens(vec![vec![0, 2]]).with_empty_rows(EmptyRows::Uniform);
            for special in SPECIALS {
                let v = Tensor::new(&[[[[1f32, 2.], [3., 4.], [5., special as f32]]]], &Device::Cpu)?;
                let v = v.to_dtype(dtype)?.to_device(device)?;
                let k = v.ones_like()?.narrow(3, 0, 1)?.broadcast_as((1, 1, 3, 3))?;
                let got = values(&with_weights(&q, &k, &v, &mask, &reference())?.context);
                let same = got[1] == special || (got[1].is_nan() && special.is_nan());
                assert!((got[0] - 3.0).abs() < 1e-2 && same, "the mean of 2, 4 and {special}: {got:?} in {dtype:?}");
                assert_eq!(got[2..], [2.0, 3.0], "a row of length 2 does not see {special}");
            }
            Ok(())
        };
        test().expect("the call runs");
    }
}

/// The only key that a query sees scores NaN: that is no row without keys, whatever an empty row would get.
fn a_row_whose_scores_are_no_numbers_is_not_empty(device: &Device) {
    let test = || -> Result<()> {
        let q = Tensor::ones((1, 1, 1, 1), DType::F32, device)?;
        let v = Tensor::new(&[[[[1f32], [2.], [3.]]]], device)?;
        for place in 0..3usize {
            let mut key = [1f32; 3];
            key[place] = f32::NAN;
            let k = Tensor::from_slice(&key, (1, 1, 3, 1), device)?;
            for empty_rows in [EmptyRows::Zero, EmptyRows::Uniform] {
                let mask = AttentionMask::none()
                    .with_valid_lens(vec![place + 1])
                    .with_starts(vec![place])
                    .with_empty_rows(empty_rows);
                let output = with_weights(&q, &k, &v, &mask, &reference())?;
                let (_, lse) = with_lse(&q, &k, &v, &mask, &reference())?;
                let got = [values(&output.context)[0], values(&output.weights)[place], values(&lse)[0]];
                assert!(got.iter().all(|x| x.is_nan()), "{got:?} with NaN at {place} under {empty_rows:?}");
            }
        }
        Ok(())
    };
    test().expect("the call runs");
}

/// Scores around ±10,000, and biases as large, in every dtype: the weights are those of exact arithmetic.
fn scores_of_ten_thousand_do_not_overflow(device: &Device) {
    for recipe in recipes(device) {
        for (size, scale) in [(100.0, 1.0), (100.0, -1.0), (1.0, 1e4), (1e-2, -1e8)] {
            for bias in [0.0, 1e4, -1e4] {
                let mut case = recipe.case();
                case.options.scale = Some(scale);
                for array in [&mut case.q, &mut case.k] {
                    array.data.iter_mut().for_each(|value| *value = round(value.signum() * size, recipe.dtype));
                }
                let biases = Array::new(&[DIMS.t_kv]).filled(|| bias);
                case.masks.push(Mask { alignment: Alignment::Free, parts: vec![Part::Bias(biases)] });
                if let Err(difference) = check(&case, recipe.dtype, device) {
                    panic!("{difference}: size {size}, scale {scale}, bias {bias}\n{recipe:?}");
                }
                assert!(case.attend().weights.iter().all(|weight| weight.is_finite()));
            }
        }
    }
}
