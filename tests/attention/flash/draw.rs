//! Random calls of a kernel's sizes: lengths and widths at the edges of tiles and vectors.

use candle_core::DType;
use proptest::prelude::*;
use proptest::sample::select;

use crate::array::{Array, Random};
use crate::flash::fused::DTYPES;
use crate::oracle::{Case, Dims, Part};
use crate::recipe::{Kind, Layout, Recipe, chosen};

/// Lengths around multiples of 16, and primes.
pub const LENGTHS: [usize; 34] = [
    1, 2, 3, 5, 7, 8, 11, 13, 15, 16, 17, 29, 31, 32, 33, 47, 48, 49, 53, 63, 64, 65, 97, 101, 127, 128, 129, 191, 211,
    255, 256, 257, 300, 307,
];

pub const WIDTHS: [usize; 17] = [1, 3, 7, 8, 16, 17, 32, 40, 64, 72, 80, 96, 128, 192, 256, 257, 512];

/// How the factor on the scores is drawn.
#[derive(Debug, Clone, Copy)]
pub enum Scale {
    Default,
    Given(f64),
}

/// A recipe, and what it leaves open.
#[derive(Debug, Clone)]
pub struct Draw {
    pub recipe: Recipe,
    pub scale: Scale,
    /// Hidden entries of `keep`, and -inf of `bias`, lie in runs that cover whole tiles.
    pub runs: bool,
}

impl Draw {
    pub fn plain(dims: Dims, masks: Vec<Kind>, dtype: DType) -> Self {
        let seed = (dims.t_q * 1000 + dims.t_kv * 100 + dims.d * 10 + dims.d_v) as u64;
        let recipe = Recipe { seed, ..Recipe::plain(dims, vec![masks], dtype) };
        Self { recipe, scale: Scale::Default, runs: true }
    }

    pub fn dtype(&self) -> DType {
        self.recipe.dtype
    }

    pub fn case(&self) -> Case {
        let mut case = self.recipe.case();
        if let Scale::Given(scale) = self.scale {
            case.options.scale = Some(scale);
        }
        if self.runs {
            let mut random = Random::new(self.recipe.seed);
            for part in case.masks.iter_mut().flat_map(|mask| &mut mask.parts) {
                match part {
                    Part::Keep(keep) => hide_runs(keep, 0.0, &mut random),
                    Part::Bias(bias) => hide_runs(bias, f64::NEG_INFINITY, &mut random),
                    _ => {}
                }
            }
        }
        case
    }
}

/// Runs of up to 400 entries, every other one of them of `hidden`.
fn hide_runs(array: &mut Array, hidden: f64, random: &mut Random) {
    let mut rest = array.data.as_mut_slice();
    while !rest.is_empty() {
        let longest = [40, 400][random.up_to(1)];
        let (shown, tail) = rest.split_at_mut(random.up_to(longest).min(rest.len()));
        if random.chance(0.5) {
            shown.fill(if hidden == 0.0 { 1.0 } else { 0.5 });
        }
        let (run, tail) = tail.split_at_mut((1 + random.up_to(longest)).min(tail.len()));
        run.fill(hidden);
        rest = tail;
    }
}

/// Which sizes give way first where a case is too much work.
#[derive(Debug, Clone, Copy)]
enum Give {
    Heads,
    Lengths,
    Widths,
}

/// Multiplications of the oracle, with something for its questions about each query and key.
fn work(dims: &Dims) -> usize {
    dims.b * dims.h * dims.t_q * dims.t_kv * (dims.d + dims.d_v + 64)
}

fn lower(list: &[usize], value: &mut usize) -> bool {
    let below = list.iter().rev().find(|&&other| other < *value);
    below.inspect(|&&below| *value = below).is_some()
}

fn reduce(dims: &mut Dims, give: Give) -> bool {
    match give {
        Give::Heads if dims.b > 1 => dims.b -= 1,
        Give::Heads if dims.h_kv > 1 => {
            let group = dims.h / dims.h_kv;
            dims.h_kv -= 1;
            dims.h = dims.h_kv * group;
        }
        Give::Heads => return lower(&[1, 2, 3, 8], &mut dims.h),
        Give::Lengths if dims.t_q > dims.t_kv => return lower(&LENGTHS, &mut dims.t_q),
        Give::Lengths => return lower(&LENGTHS, &mut dims.t_kv),
        Give::Widths if dims.d > dims.d_v => return lower(&WIDTHS, &mut dims.d),
        Give::Widths => return lower(&WIDTHS, &mut dims.d_v),
    }
    true
}

fn within(mut dims: Dims, most: usize, order: [Give; 3]) -> Dims {
    while work(&dims) > most && order.into_iter().any(|give| reduce(&mut dims, give)) {}
    dims
}

pub fn dims() -> impl Strategy<Value = Dims> {
    use Give::{Heads, Lengths, Widths};
    let length = || select(&LENGTHS[..]);
    let width = || select(&WIDTHS[..]);
    let most = prop_oneof![24 => Just(1_000_000), 1 => Just(12_000_000)];
    let orders =
        [[Heads, Lengths, Widths], [Heads, Widths, Lengths], [Lengths, Widths, Heads], [Widths, Heads, Lengths]];
    let heads = (1..=3usize, 1..=3usize, select(&[1, 2, 3, 8][..]));
    // Single queries are what decoding asks.
    let queries = prop_oneof![1 => 1..=3usize, 4 => length()];
    (heads, queries, length(), width(), width(), most, select(orders.to_vec())).prop_map(
        |((b, h_kv, group), t_q, t_kv, d, d_v, most, order)| {
            within(Dims { b, h: h_kv * group, h_kv, t_q, t_kv, d, d_v }, most, order)
        },
    )
}

fn scale() -> impl Strategy<Value = Scale> {
    prop_oneof![
        12 => Just(Scale::Default),
        1 => Just(Scale::Given(0.0)),
        1 => Just(Scale::Given(-0.3)),
        1 => Just(Scale::Given(12.0)),
        1 => Just(Scale::Given(-300.0)),
    ]
}

pub fn draws() -> impl Strategy<Value = Draw> {
    let kinds = proptest::collection::vec(select(&Kind::ALL[..]), 0..=3);
    let layout = || select(&Layout::ALL[..]);
    (
        dims(),
        [layout(), layout(), layout()],
        proptest::collection::vec(kinds, 0..=2),
        (chosen(), scale(), any::<bool>()),
        select(&DTYPES[..]),
        any::<u64>().no_shrink(),
    )
        .prop_map(|(dims, layouts, masks, (chosen, scale, runs), dtype, seed)| {
            let recipe = Recipe { dims, layouts, masks, uniform_empty_rows: false, chosen, dtype, seed };
            Draw { recipe, scale, runs }
        })
}
