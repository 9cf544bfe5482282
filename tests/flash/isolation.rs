//! What is not a number reaches the queries that see it and nobody else, at the edges of tiles too.

use candle_attention::cpu::Tier;
use candle_core::DType;

use crate::array::Array;
use crate::check::{Bounds, Outcome, compare_context, compare_lse};
use crate::draw::Draw;
use crate::fused::{Call, DTYPES, bits};
use crate::oracle::{Alignment, Case, Dims, Mask, Part};
use crate::recipe::{Chosen, Kind, Layout, Reach};

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 21, t_kv: 67, d: 9, d_v: 18 };

/// The edges of tiles of 8, 16, 32 and 64 keys.
const KEYS: [usize; 13] = [0, 7, 8, 15, 16, 31, 32, 33, 47, 48, 63, 64, 66];

fn draws() -> Vec<Draw> {
    let masks: [&[Kind]; 14] = [
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
    let draw = |(n, kinds): (usize, &[Kind])| {
        let mut draw = Draw::plain(DIMS, kinds.to_vec(), DTYPES[n % 3]);
        draw.recipe.layouts = [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Packed];
        draw.recipe.chosen = Chosen { alibi: n % 2 == 0, sinks: n % 3 == 0, softcap: n % 5 == 4, scale: false };
        draw.recipe.seed = n as u64;
        draw
    };
    masks.into_iter().enumerate().map(draw).collect()
}

/// Every mask in every dtype.
fn in_each_dtype(test: impl Fn(&Draw, DType)) {
    for draw in draws() {
        for dtype in DTYPES {
            let mut draw = draw.clone();
            draw.recipe.dtype = dtype;
            test(&draw, dtype);
        }
    }
}

/// Every query as its row number and its index.
fn queries() -> impl Iterator<Item = (usize, [usize; 3])> {
    let index = |row| [row / (DIMS.t_q * DIMS.h), row / DIMS.t_q % DIMS.h, row % DIMS.t_q];
    (0..DIMS.b * DIMS.h * DIMS.t_q).map(move |row| (row, index(row)))
}

fn sees(case: &Case, [b, h, i]: [usize; 3], [key_b, key_h, j]: [usize; 3]) -> bool {
    b == key_b && case.kv_head(h) == key_h && case.sees([b, h, i, j])
}

/// The bits of context and log-sum-exp on a tier, rows of one query each.
struct Rows {
    context: Vec<u64>,
    lse: Vec<u64>,
}

impl Rows {
    fn of(case: &Case, dtype: DType, tier: Tier) -> Self {
        let (context, lse) = Call::new(case, dtype)
            .and_then(|call| call.on_tier(tier).with_lse())
            .unwrap_or_else(|error| panic!("{tier}: {error}"));
        Self { context: bits(&context), lse: bits(&lse) }
    }

    fn row(&self, row: usize) -> (&[u64], u64) {
        (&self.context[row * DIMS.d_v..(row + 1) * DIMS.d_v], self.lse[row])
    }
}

/// The oracle's numbers on every tier: the bound leaves no room around what is infinite or NaN.
fn agrees(case: &Case, dtype: DType) -> Outcome {
    let expected = case.attend();
    let bounds = Bounds::fused(case, &expected, dtype);
    let call = Call::new(case, dtype).map_err(|error| error.to_string())?;
    for tier in Tier::available() {
        let (context, lse) = call.on_tier(tier).with_lse().map_err(|error| format!("{tier}: {error}"))?;
        compare_context("context", &context, case, &expected, &bounds, dtype)
            .and_then(|()| compare_lse("lse", &lse, case, &expected, &bounds, dtype))
            .map_err(|difference| format!("{tier}: {difference}"))?;
    }
    Ok(())
}

/// Puts `special` into one key or value, and holds the rows that do not see it to the bits that they had.
fn poison_one(draw: &Draw, dtype: DType, which: fn(&mut Case) -> &mut Array, width: usize) {
    let case = draw.case();
    let clean: Vec<_> = Tier::available().into_iter().map(|tier| (tier, Rows::of(&case, dtype, tier))).collect();
    for (n, j) in KEYS.into_iter().enumerate() {
        let key = [n / 2 % 2, n % 2, j];
        let special = SPECIALS[n % 3];
        let mut poisoned = case.clone();
        let array = which(&mut poisoned);
        let place = array.place([key[0], key[1], j, n % width]);
        array.data[place] = special;
        agrees(&poisoned, dtype).unwrap_or_else(|difference| panic!("{difference}: {special} at {key:?}\n{draw:?}"));
        for (tier, clean) in &clean {
            let got = Rows::of(&poisoned, dtype, *tier);
            for (row, query) in queries().filter(|&(_, query)| !sees(&case, query, key)) {
                let same = got.row(row) == clean.row(row);
                assert!(same, "{tier}: {query:?} does not see {special} at {key:?} and changes\n{draw:?}");
            }
        }
    }
}

#[test]
fn a_value_that_is_no_number_reaches_only_the_queries_that_see_it() {
    in_each_dtype(|draw, dtype| poison_one(draw, dtype, |case| &mut case.v, DIMS.d_v));
}

#[test]
fn a_key_that_is_no_number_reaches_only_the_queries_that_see_it() {
    in_each_dtype(|draw, dtype| poison_one(draw, dtype, |case| &mut case.k, DIMS.d));
}

/// Two values of one column: infinities of both signs make a NaN, of one sign an infinity.
#[test]
fn infinite_values_add_up() {
    in_each_dtype(|draw, dtype| {
        for (first, second) in [(f64::INFINITY, f64::NEG_INFINITY), (f64::INFINITY, f64::INFINITY)] {
            let mut case = draw.case();
            for (j, special) in [(3, first), (64, second)] {
                let place = case.v.place([1, 1, j, 17]);
                case.v.data[place] = special;
            }
            agrees(&case, dtype).unwrap_or_else(|difference| panic!("{difference}\n{draw:?}"));
        }
    });
}

/// Padding may hold anything: every key that no query of its sequence and group sees.
#[test]
fn what_nobody_sees_may_be_anything() {
    let hidden_keys = |case: &Case| {
        let keys = (0..DIMS.b * DIMS.h_kv * DIMS.t_kv)
            .map(|n| [n / (DIMS.t_kv * DIMS.h_kv), n / DIMS.t_kv % DIMS.h_kv, n % DIMS.t_kv]);
        keys.filter(|&key| !queries().any(|(_, query)| sees(case, query, key))).collect::<Vec<_>>()
    };
    let mut hidden = 0;
    for draw in draws() {
        for dtype in DTYPES {
            let mut draw = draw.clone();
            draw.recipe.dtype = dtype;
            let case = draw.case();
            for special in SPECIALS {
                let mut poisoned = case.clone();
                for [b, h, j] in hidden_keys(&case) {
                    hidden += 1;
                    for (array, width) in [(&mut poisoned.k, DIMS.d), (&mut poisoned.v, DIMS.d_v)] {
                        let places: Vec<_> = (0..width).map(|d| array.place([b, h, j, d])).collect();
                        places.into_iter().for_each(|place| array.data[place] = special);
                    }
                }
                for tier in Tier::available() {
                    let (got, clean) = (Rows::of(&poisoned, dtype, tier), Rows::of(&case, dtype, tier));
                    assert!(got.context == clean.context && got.lse == clean.lse, "{tier}: {special}\n{draw:?}");
                }
            }
        }
    }
    assert!(hidden > 500, "{hidden}");
}

#[test]
fn a_query_that_is_no_number_reaches_only_itself() {
    in_each_dtype(|draw, dtype| {
        let case = draw.case();
        for (n, i) in [0, 7, 8, 15, 16, 20].into_iter().enumerate() {
            let [b, h] = [n % 2, n % 4];
            let mut poisoned = case.clone();
            let place = poisoned.q.place([b, h, i, n % DIMS.d]);
            poisoned.q.data[place] = SPECIALS[n % 3];
            agrees(&poisoned, dtype).unwrap_or_else(|difference| panic!("{difference}: query {i}\n{draw:?}"));
            for tier in Tier::available() {
                let (got, clean) = (Rows::of(&poisoned, dtype, tier), Rows::of(&case, dtype, tier));
                for (row, _) in queries().filter(|&(_, query)| query != [b, h, i]) {
                    assert!(got.row(row) == clean.row(row), "{tier}: row {row} with query {i} poisoned\n{draw:?}");
                }
            }
        }
    });
}

/// In a bias of every shape: where the key is hidden nothing happens, -inf hides, +inf and NaN make a row of NaN.
#[test]
fn a_bias_that_is_no_number_reaches_only_the_queries_that_see_it() {
    let reaches = [Reach::Keys, Reach::Square, Reach::Sequence, Reach::Head, Reach::Whole, Reach::Queries];
    in_each_dtype(|draw, dtype| {
        for (n, reach) in reaches.into_iter().enumerate() {
            let mut case = draw.case();
            let Dims { b, h, t_q, t_kv, .. } = DIMS;
            let shape: &[usize] = match reach {
                Reach::Keys => &[t_kv],
                Reach::Square => &[t_q, t_kv],
                Reach::Sequence => &[b, 1, 1, t_kv],
                Reach::Head => &[h, t_q, t_kv],
                Reach::Queries => &[t_q, 1],
                _ => &[b, h, t_q, t_kv],
            };
            let mut bias = Array::new(shape).filled(|| 0.25);
            for (m, j) in KEYS.into_iter().enumerate().filter(|(m, _)| m % 4 == n % 4) {
                let place = bias.place([m % b, m % h, (5 * m) % t_q, j]);
                bias.data[place] = SPECIALS[(m / 4 + n) % 3];
            }
            case.masks.push(Mask { alignment: Alignment::Free, parts: vec![Part::Bias(bias)] });
            agrees(&case, dtype).unwrap_or_else(|difference| panic!("{difference}: a bias for {reach:?}\n{draw:?}"));
        }
    });
}

/// NaN where the reference path has it, and nowhere else, with several specials at once: among values that a bias of
/// -inf suppresses too, which are seen.
#[test]
fn nan_appears_where_the_reference_path_has_it() {
    in_each_dtype(|draw, dtype| {
        for special in [f64::NAN, f64::INFINITY] {
            let mut case = draw.case();
            let suppressed = Array::new(&[DIMS.t_q, 1]).filled({
                let mut i = 0;
                move || {
                    i += 1;
                    if i % 5 == 0 { f64::NEG_INFINITY } else { 0.0 }
                }
            });
            case.masks.push(Mask { alignment: Alignment::Free, parts: vec![Part::Bias(suppressed)] });
            for (b, h, j, d) in [(0, 0, 2, 0), (0, 1, 40, 17), (1, 1, 66, 3)] {
                let place = case.v.place([b, h, j, d]);
                case.v.data[place] = special;
                let place = case.k.place([b, h, j / 2, d % DIMS.d]);
                case.k.data[place] = f64::NAN;
            }
            let call = Call::new(&case, dtype).expect("tensors");
            let nan = |(context, lse): &(candle_core::Tensor, candle_core::Tensor)| {
                [context, lse].map(|x| bits(x).into_iter().map(|x| f64::from_bits(x).is_nan()).collect::<Vec<_>>())
            };
            let expected = nan(&call.on_reference().with_lse().expect("the reference path runs"));
            for tier in Tier::available() {
                let got = nan(&call.on_tier(tier).with_lse().unwrap_or_else(|error| panic!("{tier}: {error}")));
                // An infinite value of weight zero is NaN to some and infinite to others: both reach the query.
                if special.is_nan() {
                    assert!(got == expected, "{tier}: NaN elsewhere\n{draw:?}");
                } else {
                    assert!(got[1] == expected[1], "{tier}: NaN elsewhere in the log-sum-exp\n{draw:?}");
                }
            }
        }
    });
}
