//! What is not a number, and what is nearly too large for one, reaches the queries that see it and nobody else: on the
//! reference path, and in the fused kernel at the edges of its tiles too.

use candle_attention::cpu::Tier;
use candle_attention::{AttentionMask, Backend, EmptyRows};
use candle_core::{DType, Device, Result, Tensor};

use crate::array::Array;
use crate::call::{Call, Expected, Outcome};
use crate::common::{bits, values};
use crate::oracle::{Attended, Case, Dims, Mask, Part};
use crate::recipe::{Chosen, DTYPES, Kind, Layout, Reach, Recipe, dtypes};

crate::on_each_device!(
    what_is_no_number_reaches_only_what_sees_it,
    a_uniform_row_is_the_mean_of_all_values_numbers_or_not,
    a_row_whose_scores_are_no_numbers_is_not_empty,
);

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// The edges of the kernel's tiles of 8, 16, 32 and 64 keys.
const EDGES: [usize; 13] = [0, 7, 8, 15, 16, 31, 32, 33, 47, 48, 63, 64, 66];

const MASKS: [&[Kind]; 15] = [
    &[],
    &[Kind::Causal],
    &[Kind::UpperLeft, Kind::Prefix],
    &[Kind::Offset],
    &[Kind::ValidLens],
    &[Kind::ValidLensPerQuery, Kind::Starts],
    &[Kind::StartsPerQuery],
    &[Kind::Causal, Kind::Window],
    &[Kind::Band],
    &[Kind::Causal, Kind::Chunk],
    &[Kind::UpperLeft, Kind::PrefixPerQuery],
    &[Kind::Keep(Reach::Keys), Kind::Causal],
    &[Kind::Keep(Reach::Whole)],
    &[Kind::Keep(Reach::Queries)],
    &[Kind::Keep(Reach::Head), Kind::ValidLens],
];

/// One call, and the paths on which it runs.
struct Subject {
    recipe: Recipe,
    device: Device,
    /// The kernel's tiers, or the reference path alone.
    tiers: Vec<Option<Tier>>,
}

/// Context, log-sum-exp and, where the path has them, weights; and their bits.
struct Results {
    tensors: Vec<Tensor>,
    bits: Vec<Vec<u64>>,
}

impl Subject {
    /// Each mask in each dtype, with a number of its own.
    fn all(dims: Dims, dtypes: &[DType], device: &Device, tiers: &[Option<Tier>]) -> Vec<Self> {
        let mut subjects = Vec::new();
        for (n, kinds) in MASKS.into_iter().enumerate() {
            for &dtype in dtypes {
                let of_kernel = tiers[0].is_some();
                let chosen =
                    Chosen { alibi: n % 2 == 0, sinks: n % 3 == 0, softcap: of_kernel && n % 5 == 4, scale: false };
                let layouts = [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Packed];
                let recipe = Recipe::plain(dims, vec![kinds.to_vec()], dtype);
                let recipe = Recipe { layouts, chosen, runs: of_kernel, seed: n as u64, ..recipe };
                subjects.push(Self { recipe, device: device.clone(), tiers: tiers.to_vec() });
            }
        }
        subjects
    }

    fn of_reference(device: &Device) -> Vec<Self> {
        Self::all(Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 6, d: 3, d_v: 2 }, dtypes(device), device, &[None])
    }

    fn of_kernel() -> Vec<Self> {
        let tiers: Vec<_> = Tier::available().into_iter().map(Some).collect();
        Self::all(Dims { b: 2, h: 4, h_kv: 2, t_q: 21, t_kv: 67, d: 9, d_v: 18 }, &DTYPES, &Device::Cpu, &tiers)
    }

    /// On each path.
    fn run(&self, case: &Case) -> Vec<Results> {
        let run = |tier: Option<Tier>| -> Result<_> {
            let call = Call::new(case, self.recipe.dtype, &self.device)?;
            let call = tier.map_or(call.clone(), |tier| call.on(Backend::Fused).on_tier(tier));
            let (context, lse) = call.with_lse()?;
            let mut tensors = vec![context, lse];
            if tier.is_none() {
                let output = call.with_weights()?;
                assert_eq!(bits(&tensors[0]), bits(&output.context), "the same context beside weights and beside lse");
                tensors.push(output.weights);
            }
            Ok(Results { bits: tensors.iter().map(bits).collect(), tensors })
        };
        let run =
            |&tier: &Option<Tier>| run(tier).unwrap_or_else(|error| panic!("{error}: {tier:?}, {:?}", self.recipe));
        self.tiers.iter().map(run).collect()
    }

    /// The results, held to the oracle's numbers: the bound leaves no room around what is infinite or NaN.
    #[track_caller]
    fn checked(&self, case: &Case, what: &str) -> Vec<Results> {
        let dtype = self.recipe.dtype;
        let of_kernel = self.tiers[0].is_some();
        let mut expected = if of_kernel { Expected::fused(case, dtype) } else { Expected::new(case, dtype) };
        let all = self.run(case);
        for (tier, Results { tensors, .. }) in self.tiers.iter().zip(&all) {
            let mut compare = || -> Outcome {
                expected.context("context", &tensors[0])?;
                expected.lse("lse", &tensors[1])?;
                let Some(weights) = tensors.get(2) else { return Ok(()) };
                // What a hidden key weighs in a row of NaN is nobody's business.
                let Attended { weights: of_oracle, lse, .. } = &mut expected.attended;
                for (n, (expected, got)) in of_oracle.iter_mut().zip(values(weights)).enumerate() {
                    if lse[n / self.recipe.dims.t_kv].is_nan() && !expected.is_nan() {
                        *expected = got;
                    }
                }
                expected.weights("weights", weights)
            };
            compare().unwrap_or_else(|difference| panic!("{difference}: {what}, {tier:?}, {:?}", self.recipe));
        }
        all
    }

    fn keys(&self) -> Vec<[usize; 3]> {
        let Dims { b, h_kv, t_kv, .. } = self.recipe.dims;
        (0..b * h_kv * t_kv).map(|n| [n / (t_kv * h_kv), n / t_kv % h_kv, n % t_kv]).collect()
    }

    /// Some of so many numbers, which are others in the next dtype.
    fn some<T>(&self, all: Vec<T>) -> impl Iterator<Item = (usize, T)> {
        let dtype = DTYPES.iter().position(|&dtype| dtype == self.recipe.dtype).unwrap_or_default();
        let own = dtype + self.recipe.seed as usize;
        all.into_iter().enumerate().filter(move |(n, _)| (n + own).is_multiple_of(3))
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

/// Puts a special number into keys, values and queries in turn, all of them or those at the edges of tiles; the results
/// agree with the oracle, and the rows that do not see it keep their bits.
fn poison_each(subject: &Subject) {
    let (case, dims) = (subject.recipe.case(), subject.recipe.dims);
    let clean = subject.run(&case);
    let poison = |what: &str, poisoned: &Case, is_reached: &dyn Fn([usize; 3]) -> bool, reaches_weights: bool| {
        for (got, clean) in subject.checked(poisoned, what).iter().zip(&clean) {
            assert!(reaches_weights || got.bits[1..] == clean.bits[1..], "no weight depends on a value: {what}");
            for (row, query) in queries(&dims).filter(|&(_, query)| !is_reached(query)) {
                let same = got.row(row, &dims) == clean.row(row, &dims);
                assert!(same, "{query:?} changes: {what}, {:?}", subject.recipe);
            }
        }
    };
    let at_edges = dims.t_kv > EDGES[12];
    let keys = subject.keys().into_iter().filter(|[b, h, j]| match EDGES.iter().position(|edge| edge == j) {
        Some(n) => !at_edges || [n / 2 % dims.b, n % dims.h_kv] == [*b, *h],
        None => !at_edges,
    });
    for (n, key @ [b, h, j]) in subject.some(keys.collect()) {
        for of_values in [false, true] {
            let (special, mut poisoned) = (SPECIALS[n / 3 % 3], case.clone());
            let (array, width) = if of_values { (&mut poisoned.v, dims.d_v) } else { (&mut poisoned.k, dims.d) };
            let place = array.place([b, h, j, n % width]);
            array.data[place] = special;
            let what = format!("{special} at {key:?} of v {of_values}");
            poison(&what, &poisoned, &|query| sees(&case, query, key), !of_values);
        }
    }
    let edges = [0, 7, 8, 15, 16, 20];
    let all: Vec<_> = queries(&dims).map(|(_, query)| query).collect();
    let at_edge =
        |&[b, h, i]: &[usize; 3]| edges.iter().position(|&edge| edge == i).is_some_and(|n| [n % 2, n % 4] == [b, h]);
    let all = if at_edges { all.into_iter().filter(at_edge).collect() } else { all };
    for (n, poisoned_query @ [b, h, i]) in subject.some(all) {
        let mut poisoned = case.clone();
        let place = poisoned.q.place([b, h, i, n % dims.d]);
        poisoned.q.data[place] = SPECIALS[n / 3 % 3];
        poison(&format!("query {poisoned_query:?}"), &poisoned, &|query| query == poisoned_query, true);
    }
}

fn what_is_no_number_reaches_only_what_sees_it(device: &Device) {
    Subject::of_reference(device).iter().for_each(poison_each);
}

#[test]
fn what_is_no_number_reaches_only_what_sees_it_in_the_kernel() {
    Subject::of_kernel().iter().for_each(poison_each);
}

/// Infinities of both signs in one column make a NaN, of one sign an infinity; NaN in several keys and values, some of
/// which a bias of -inf suppresses, which are seen all the same.
#[test]
fn several_that_are_no_numbers_add_up() {
    let infinity = f64::INFINITY;
    for subject in Subject::of_kernel() {
        for second in [-infinity, infinity] {
            let mut case = subject.recipe.case();
            for (j, special) in [(3, infinity), (64, second)] {
                let place = case.v.place([1, 1, j, 17]);
                case.v.data[place] = special;
            }
            subject.checked(&case, "two infinities");
        }
        let mut case = subject.recipe.case();
        let mut rows = 1..;
        let suppressed = || if rows.next().is_some_and(|i| i % 5 == 0) { -infinity } else { 0.0 };
        case.masks.push(Mask::of(Part::Bias(Array::new(&[subject.recipe.dims.t_q, 1]).filled(suppressed))));
        for (b, h, j, d) in [(0, 0, 2, 0), (0, 1, 40, 17), (1, 1, 66, 3)] {
            let (value, key) = (case.v.place([b, h, j, d]), case.k.place([b, h, j / 2, d % 9]));
            (case.v.data[value], case.k.data[key]) = (f64::NAN, f64::NAN);
        }
        subject.checked(&case, "NaN among suppressed values");
    }
}

/// Padding may hold anything: every key that no query of its sequence and group sees.
#[test]
fn what_nobody_sees_may_be_anything() {
    let mut hidden = 0;
    for subject in Subject::of_kernel() {
        let (case, Dims { d, d_v, .. }) = (subject.recipe.case(), subject.recipe.dims);
        let clean = subject.run(&case);
        let seen = |key| queries(&subject.recipe.dims).any(|(_, query)| sees(&case, query, key));
        let unseen: Vec<_> = subject.keys().into_iter().filter(|&key| !seen(key)).collect();
        hidden += unseen.len();
        for special in SPECIALS {
            let mut poisoned = case.clone();
            for &[b, h, j] in &unseen {
                for (array, width) in [(&mut poisoned.k, d), (&mut poisoned.v, d_v)] {
                    let places: Vec<_> = (0..width).map(|d| array.place([b, h, j, d])).collect();
                    places.into_iter().for_each(|place| array.data[place] = special);
                }
            }
            let same = subject.run(&poisoned).iter().zip(&clean).all(|(got, clean)| got.bits == clean.bits);
            assert!(same, "{special}: {:?}", subject.recipe);
        }
    }
    assert!(hidden > 200, "{hidden}");
}

/// In a bias of every shape: where the key is hidden nothing happens, -inf hides, +inf and NaN make a row of NaN.
#[test]
fn a_bias_that_is_no_number_reaches_only_the_queries_that_see_it() {
    for subject in Subject::of_kernel() {
        let Dims { b, h, t_q, t_kv, .. } = subject.recipe.dims;
        let shapes: [&[usize]; 6] =
            [&[t_kv], &[t_q, t_kv], &[b, 1, 1, t_kv], &[h, t_q, t_kv], &[b, h, t_q, t_kv], &[t_q, 1]];
        for (n, shape) in subject.some(shapes.to_vec()) {
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
