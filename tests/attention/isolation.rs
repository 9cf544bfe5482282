//! What is not a number, and what is nearly too large for one, reaches the queries that see it and nobody else: on the
//! reference path, and in the fused kernel at the edges of its tiles too.

use candle_attention::cpu::Tier;
use candle_attention::{AttentionMask, Backend, EmptyRows};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::{Array, round};
use crate::call::{Call, Expected, Outcome, check};
use crate::common::{bits, values};
use crate::oracle::{Attended, Case, Dims, Mask, Part};
use crate::recipe::{Chosen, DTYPES, Kind, Layout, Reach, Recipe, dtypes};

crate::on_each_device!(
    what_is_no_number_reaches_only_what_sees_it,
    a_uniform_row_is_the_mean_of_all_values_numbers_or_not,
    a_row_whose_scores_are_no_numbers_is_not_empty,
    scores_of_ten_thousand_do_not_overflow,
);

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// The edges of the kernel's tiles of 8, 16, 32 and 64 keys.
const EDGES: [usize; 13] = [0, 7, 8, 15, 16, 31, 32, 33, 47, 48, 63, 64, 66];

const MASKS: [&[Kind]; 14] = [
    &[],
    &[Kind::Causal],
    &[Kind::UpperLeft, Kind::Prefix],
    &[Kind::Offset],
    &[Kind::ValidLens],
    &[Kind::ValidLensPerQuery, Kind::Starts],
    &[Kind::StartsPerQuery],
    &[Kind::Causal, Kind::Window],
    &[Kind::Band],
    &[Kind::UpperLeft, Kind::PrefixPerQuery],
    &[Kind::Keep(Reach::Keys), Kind::Causal],
    &[Kind::Keep(Reach::Whole)],
    &[Kind::Keep(Reach::Queries)],
    &[Kind::Keep(Reach::Head), Kind::ValidLens],
];

/// One call, and every way to run it that has to agree with the oracle.
struct Subject {
    recipe: Recipe,
    device: Device,
    /// The kernel's tier, or the reference path.
    tier: Option<Tier>,
}

/// Context, log-sum-exp and, where the path has them, weights; and their bits.
struct Results {
    tensors: Vec<Tensor>,
    bits: Vec<Vec<u64>>,
}

impl Subject {
    fn of_reference(device: &Device) -> Vec<Self> {
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 6, d: 3, d_v: 2 };
        let all =
            MASKS.iter().enumerate().flat_map(|(n, kinds)| dtypes(device).iter().map(move |&dtype| (n, kinds, dtype)));
        let subject = |(n, kinds, dtype): (usize, &&[Kind], DType)| {
            let recipe = Recipe {
                layouts: [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Contiguous],
                chosen: Chosen { alibi: n % 2 == 0, sinks: n % 3 == 0, ..Chosen::default() },
                seed: n as u64,
                ..Recipe::plain(dims, vec![kinds.to_vec()], dtype)
            };
            Self { recipe, device: device.clone(), tier: None }
        };
        all.map(subject).collect()
    }

    fn of_kernel() -> Vec<Self> {
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 21, t_kv: 67, d: 9, d_v: 18 };
        let mut subjects = Vec::new();
        for (n, kinds) in MASKS.into_iter().enumerate() {
            for dtype in DTYPES {
                for tier in Tier::available() {
                    let recipe = Recipe {
                        layouts: [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Packed],
                        chosen: Chosen { alibi: n % 2 == 0, sinks: n % 3 == 0, softcap: n % 5 == 4, scale: false },
                        seed: n as u64,
                        ..Recipe::of_kernel(dims, kinds.to_vec(), dtype)
                    };
                    subjects.push(Self { recipe, device: Device::Cpu, tier: Some(tier) });
                }
            }
        }
        subjects
    }

    fn run(&self, case: &Case) -> Results {
        let run = || -> Result<_> {
            let call = Call::new(case, self.recipe.dtype, &self.device)?;
            let call = self.tier.map_or(call.clone(), |tier| call.on(Backend::Fused).on_tier(tier));
            let (context, lse) = call.with_lse()?;
            if self.tier.is_some() {
                return Ok(vec![context, lse]);
            }
            let output = call.with_weights()?;
            assert_eq!(bits(&context), bits(&output.context), "the same context beside weights and beside lse");
            Ok(vec![context, lse, output.weights])
        };
        let tensors = run().unwrap_or_else(|error| panic!("{error}: {}", self.name()));
        Results { bits: tensors.iter().map(bits).collect(), tensors }
    }

    fn name(&self) -> String {
        format!("{:?}, {:?}", self.tier, self.recipe)
    }

    /// The results, held to the oracle's numbers: the bound leaves no room around what is infinite or NaN.
    #[track_caller]
    fn checked(&self, case: &Case, what: &str) -> Results {
        let (results, dtype) = (self.run(case), self.recipe.dtype);
        let mut expected = if self.tier.is_some() { Expected::fused(case, dtype) } else { Expected::new(case, dtype) };
        let mut compare = || -> Outcome {
            expected.context("context", &results.tensors[0])?;
            expected.lse("lse", &results.tensors[1])?;
            let Some(weights) = results.tensors.get(2) else { return Ok(()) };
            // What a hidden key weighs in a row of NaN is nobody's business.
            let Attended { weights: of_oracle, lse, .. } = &mut expected.attended;
            for (n, (expected, got)) in of_oracle.iter_mut().zip(values(weights)).enumerate() {
                if lse[n / self.recipe.dims.t_kv].is_nan() && !expected.is_nan() {
                    *expected = got;
                }
            }
            expected.weights("weights", weights)
        };
        compare().unwrap_or_else(|difference| panic!("{difference}: {what}, {}", self.name()));
        results
    }

    /// Keys and queries at the edges of tiles, or all of them.
    fn keys(&self) -> Vec<[usize; 3]> {
        let Dims { b, h_kv, t_kv, .. } = self.recipe.dims;
        match self.tier {
            Some(_) => EDGES.iter().enumerate().map(|(n, &j)| [n / 2 % b, n % h_kv, j]).collect(),
            None => (0..b * h_kv * t_kv).map(|n| [n / (t_kv * h_kv), n / t_kv % h_kv, n % t_kv]).collect(),
        }
    }

    fn poisoned_queries(&self) -> Vec<[usize; 3]> {
        match self.tier {
            Some(_) => [0, 7, 8, 15, 16, 20].iter().enumerate().map(|(n, &i)| [n % 2, n % 4, i]).collect(),
            None => queries(&self.recipe.dims).map(|(_, query)| query).collect(),
        }
    }
}

impl Results {
    fn row(&self, row: usize, dims: &Dims) -> Vec<&[u64]> {
        let width = |bits: &[u64]| bits.len() / (dims.b * dims.h * dims.t_q);
        self.bits.iter().map(|bits| &bits[row * width(bits)..(row + 1) * width(bits)]).collect()
    }
}

/// Every query as its row number and its index.
fn queries(dims: &Dims) -> impl Iterator<Item = (usize, [usize; 3])> {
    let Dims { b, h, t_q, .. } = *dims;
    (0..b * h * t_q).map(move |row| (row, [row / (t_q * h), row / t_q % h, row % t_q]))
}

fn sees(case: &Case, [b, h, i]: [usize; 3], [key_b, key_h, j]: [usize; 3]) -> bool {
    b == key_b && case.kv_head(h) == key_h && case.sees([b, h, i, j])
}

/// Puts a special number into each key, value and query in turn; the results agree with the oracle, and the rows that do not
/// see it keep their bits.
fn poison_each(subject: &Subject) {
    let (case, dims) = (subject.recipe.case(), subject.recipe.dims);
    let clean = subject.run(&case);
    type Which = (fn(&mut Case) -> &mut Array, usize);
    let arrays: [Which; 2] = [(|case| &mut case.k, dims.d), (|case| &mut case.v, dims.d_v)];
    for (n, key) in subject.keys().into_iter().enumerate() {
        for (which, width) in arrays {
            let special = SPECIALS[n % 3];
            let mut poisoned = case.clone();
            let array = which(&mut poisoned);
            let place = array.place([key[0], key[1], key[2], n % width]);
            array.data[place] = special;
            let what = format!("{special} at {key:?}");
            let got = subject.checked(&poisoned, &what);
            let of_values = std::ptr::fn_addr_eq(which, arrays[1].0);
            assert!(!of_values || got.bits[1..] == clean.bits[1..], "no weight depends on a value: {what}");
            for (row, query) in queries(&dims).filter(|&(_, query)| !sees(&case, query, key)) {
                assert!(got.row(row, &dims) == clean.row(row, &dims), "{query:?} changes: {what}, {}", subject.name());
            }
        }
    }
    for (n, [b, h, i]) in subject.poisoned_queries().into_iter().enumerate() {
        let mut poisoned = case.clone();
        let place = poisoned.q.place([b, h, i, n % dims.d]);
        poisoned.q.data[place] = SPECIALS[n % 3];
        let got = subject.checked(&poisoned, &format!("query {i}"));
        for (row, _) in queries(&dims).filter(|&(_, query)| query != [b, h, i]) {
            assert!(got.row(row, &dims) == clean.row(row, &dims), "row {row} with query {i}: {}", subject.name());
        }
    }
}

fn what_is_no_number_reaches_only_what_sees_it(device: &Device) {
    Subject::of_reference(device).iter().for_each(poison_each);
}

#[test]
fn what_is_no_number_reaches_only_what_sees_it_in_the_kernel() {
    Subject::of_kernel().iter().for_each(poison_each);
}

/// Two values of one column: infinities of both signs make a NaN, of one sign an infinity.
#[test]
fn infinite_values_add_up() {
    for subject in Subject::of_kernel() {
        for (first, second) in [(f64::INFINITY, f64::NEG_INFINITY), (f64::INFINITY, f64::INFINITY)] {
            let mut case = subject.recipe.case();
            for (j, special) in [(3, first), (64, second)] {
                let place = case.v.place([1, 1, j, 17]);
                case.v.data[place] = special;
            }
            subject.checked(&case, "two infinities");
        }
    }
}

/// Padding may hold anything: every key that no query of its sequence and group sees.
#[test]
fn what_nobody_sees_may_be_anything() {
    let mut hidden = 0;
    for subject in Subject::of_kernel() {
        let (case, Dims { b, h_kv, t_kv, d, d_v, .. }) = (subject.recipe.case(), subject.recipe.dims);
        let clean = subject.run(&case);
        let keys = (0..b * h_kv * t_kv).map(|n| [n / (t_kv * h_kv), n / t_kv % h_kv, n % t_kv]);
        let seen = |key| queries(&subject.recipe.dims).any(|(_, query)| sees(&case, query, key));
        let unseen: Vec<_> = keys.filter(|&key| !seen(key)).collect();
        hidden += unseen.len();
        for special in SPECIALS {
            let mut poisoned = case.clone();
            for &[b, h, j] in &unseen {
                for (array, width) in [(&mut poisoned.k, d), (&mut poisoned.v, d_v)] {
                    let places: Vec<_> = (0..width).map(|d| array.place([b, h, j, d])).collect();
                    places.into_iter().for_each(|place| array.data[place] = special);
                }
            }
            assert!(subject.run(&poisoned).bits == clean.bits, "{special}: {}", subject.name());
        }
    }
    assert!(hidden > 500, "{hidden}");
}

/// In a bias of every shape: where the key is hidden nothing happens, -inf hides, +inf and NaN make a row of NaN.
#[test]
fn a_bias_that_is_no_number_reaches_only_the_queries_that_see_it() {
    for subject in Subject::of_kernel() {
        let Dims { b, h, t_q, t_kv, .. } = subject.recipe.dims;
        let shapes: [&[usize]; 6] =
            [&[t_kv], &[t_q, t_kv], &[b, 1, 1, t_kv], &[h, t_q, t_kv], &[b, h, t_q, t_kv], &[t_q, 1]];
        for (n, shape) in shapes.into_iter().enumerate() {
            let mut case = subject.recipe.case();
            let mut bias = Array::new(shape).filled(|| 0.25);
            for (m, j) in EDGES.into_iter().enumerate().filter(|(m, _)| m % 4 == n % 4) {
                let place = bias.place([m % b, m % h, (5 * m) % t_q, j]);
                bias.data[place] = SPECIALS[(m / 4 + n) % 3];
            }
            case.masks.push(Mask::of(Part::Bias(bias)));
            subject.checked(&case, &format!("a bias {shape:?}"));
        }
    }
}

/// NaN where the reference path has it, and nowhere else, with several specials at once: among values that a bias of
/// -inf suppresses too, which are seen.
#[test]
fn nan_appears_where_the_reference_path_has_it() -> Result<()> {
    for subject in Subject::of_kernel() {
        for special in [f64::NAN, f64::INFINITY] {
            let mut case = subject.recipe.case();
            let mut rows = 1..;
            let suppressed = || if rows.next().is_some_and(|i| i % 5 == 0) { f64::NEG_INFINITY } else { 0.0 };
            case.masks.push(Mask::of(Part::Bias(Array::new(&[subject.recipe.dims.t_q, 1]).filled(suppressed))));
            for (b, h, j, d) in [(0, 0, 2, 0), (0, 1, 40, 17), (1, 1, 66, 3)] {
                let place = case.v.place([b, h, j, d]);
                case.v.data[place] = special;
                let place = case.k.place([b, h, j / 2, d % subject.recipe.dims.d]);
                case.k.data[place] = f64::NAN;
            }
            let nan = |tensor: &Tensor| values(tensor).into_iter().map(f64::is_nan).collect::<Vec<_>>();
            let (context, lse) = Call::new(&case, subject.recipe.dtype, &Device::Cpu)?.with_lse()?;
            let Results { tensors, .. } = subject.run(&case);
            assert!(nan(&tensors[1]) == nan(&lse), "NaN elsewhere in the log-sum-exp: {}", subject.name());
            // An infinite value of weight zero is NaN to some and infinite to others: both reach the query.
            assert!(!special.is_nan() || nan(&tensors[0]) == nan(&context), "NaN elsewhere: {}", subject.name());
        }
    }
    Ok(())
}

/// d2l's row of length 0 mixes every value, so a NaN among them shows.
fn a_uniform_row_is_the_mean_of_all_values_numbers_or_not(device: &Device) -> Result<()> {
    for &dtype in dtypes(device) {
        let q = Tensor::ones((1, 1, 2, 3), dtype, device)?;
        let mask = AttentionMask::none().with_valid_lens(vec![vec![0, 2]]).with_empty_rows(EmptyRows::Uniform);
        for special in SPECIALS {
            let v = Tensor::new(&[[[[1f32, 2.], [3., 4.], [5., special as f32]]]], &Device::Cpu)?;
            let v = v.to_dtype(dtype)?.to_device(device)?;
            let k = v.ones_like()?.narrow(3, 0, 1)?.broadcast_as((1, 1, 3, 3))?;
            let got = values(&Call::plain(&q, &k, &v, &mask).on_reference().with_weights()?.context);
            let same = got[1] == special || (got[1].is_nan() && special.is_nan());
            assert!((got[0] - 3.0).abs() < 1e-2 && same, "the mean of 2, 4 and {special}: {got:?} in {dtype:?}");
            assert_eq!(got[2..], [2.0, 3.0], "a row of length 2 does not see {special}");
        }
    }
    Ok(())
}

/// The only key that a query sees scores NaN: that is no row without keys, whatever an empty row would get.
fn a_row_whose_scores_are_no_numbers_is_not_empty(device: &Device) -> Result<()> {
    let q = Tensor::ones((1, 1, 1, 1), DType::F32, device)?;
    let v = Tensor::new(&[[[[1f32], [2.], [3.]]]], device)?;
    for place in 0..3usize {
        let mut key = [1f32; 3];
        key[place] = f32::NAN;
        let k = Tensor::from_slice(&key, (1, 1, 3, 1), device)?;
        for empty_rows in [EmptyRows::Zero, EmptyRows::Uniform] {
            let mask = AttentionMask::none().with_valid_lens(vec![place + 1]).with_starts(vec![place]);
            let call = Call::plain(&q, &k, &v, &mask.with_empty_rows(empty_rows)).on_reference();
            let (output, (_, lse)) = (call.with_weights()?, call.with_lse()?);
            let got = [values(&output.context)[0], values(&output.weights)[place], values(&lse)[0]];
            assert!(got.iter().all(|x| x.is_nan()), "{got:?} with NaN at {place} under {empty_rows:?}");
        }
    }
    Ok(())
}

/// Scores around ±10,000, and biases as large, in every dtype: the weights are those of exact arithmetic.
fn scores_of_ten_thousand_do_not_overflow(device: &Device) {
    for Subject { recipe, .. } in Subject::of_reference(device) {
        for (size, scale) in [(100.0, 1.0), (100.0, -1.0), (1.0, 1e4), (1e-2, -1e8)] {
            for bias in [0.0, 1e4, -1e4] {
                let mut case = recipe.case();
                case.options.scale = Some(scale);
                for array in [&mut case.q, &mut case.k] {
                    array.data.iter_mut().for_each(|value| *value = round(value.signum() * size, recipe.dtype));
                }
                case.masks.push(Mask::of(Part::Bias(Array::new(&[recipe.dims.t_kv]).filled(|| bias))));
                if let Err(difference) = check(&case, recipe.dtype, device) {
                    panic!("{difference}: size {size}, scale {scale}, bias {bias}\n{recipe:?}");
                }
                assert!(case.attend().weights.iter().all(|weight| weight.is_finite()));
            }
        }
    }
}
