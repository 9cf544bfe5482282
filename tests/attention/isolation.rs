//! NaN and infinities reach the queries that attend to them and no others: on the reference path, and in the fused
//! kernel at the edges of its tiles too.

use crate::gradients::{Attention, Function};
use crate::*;

crate::on_each_device!(nan_reaches_only_queries_that_attend_to_it);

const SPECIALS: [f64; 3] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// The edges of the kernel's tiles of 8, 16, 32 and 64 keys.
const EDGES: [usize; 13] = [0, 7, 8, 15, 16, 31, 32, 33, 47, 48, 63, 64, 66];

/// The entries that become NaN or infinite: one to three, or everything to which no query attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Poisoned {
    Queries,
    Keys,
    Values,
    Bias,
    Sinks,
    Unseen,
}

/// A call with NaN or infinities.
#[derive(Debug, Clone)]
struct Poison {
    recipe: Recipe,
    of: Poisoned,
}

fn poisons(dims: Dims, dtypes: &'static [DType], of_kernel: bool) -> impl Strategy<Value = Poison> {
    use Poisoned::*;
    let of = select(&[Queries, Keys, Keys, Values, Values, Bias, Sinks, Unseen][..]);
    (of, recipes(dtypes), any::<bool>()).prop_map(move |(of, mut recipe, masks_runs)| {
        let layouts = [Layout::HeadsTransposed, Layout::CacheMiddle, Layout::Packed];
        let softcap = of_kernel && recipe.chosen.softcap;
        let sinks = of == Sinks || recipe.chosen.sinks;
        let chosen = Chosen { scale: false, softcap, sinks, ..recipe.chosen };
        recipe.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !matches!(kind, Kind::Bias(_))));
        // A fully masked row is no row of NaN, with any sink, nor a row of numbers.
        let masks = if of == Sinks { vec![vec![Kind::Causal]] } else { recipe.masks };
        let uniform_fully_masked_rows = !of_kernel && recipe.uniform_fully_masked_rows;
        Poison { recipe: Recipe { dims, layouts, masks, chosen, masks_runs, uniform_fully_masked_rows, ..recipe }, of }
    })
}

/// Lists every (b, h, t) of an array of vectors.
pub fn vectors(b: usize, h: usize, t: usize) -> impl Iterator<Item = [usize; 3]> {
    (0..b * h * t).map(move |n| [n / (t * h), n / t % h, n % t])
}

impl Poison {
    /// Returns the case without and with NaN or infinities.
    fn cases(&self) -> [Case; 2] {
        let mut clean = self.recipe.case();
        let Dims { b, h, t_q, t_kv, .. } = clean.dims;
        let mut random = Random::new(self.recipe.seed);
        if self.of == Poisoned::Bias {
            let shapes: [&[usize]; 6] =
                [&[t_kv], &[t_q, t_kv], &[b, 1, 1, t_kv], &[h, t_q, t_kv], &[b, h, t_q, t_kv], &[t_q, 1]];
            clean.masks.push(Mask::of(Part::Bias(Array::new(shapes[random.up_to(5)]).filled(|| 0.25))));
        }
        let mut poisoned = clean.clone();
        match self.of {
            Poisoned::Unseen => fill_unseen(&mut poisoned, SPECIALS[random.up_to(2)]),
            _ => self.poison(&mut poisoned, &mut random),
        }
        [clean, poisoned]
    }

    /// Changes up to three entries of one head, in one column: infinities of both signs add up to NaN.
    fn poison(&self, case: &mut Case, random: &mut Random) {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = case.dims;
        let mut at = |t: usize| match EDGES[random.up_to(12)] {
            edge if edge < t => edge,
            _ => random.up_to(t - 1),
        };
        let b = at(b);
        let h = at(h);
        let column = at(d.max(d_v));
        for n in 0..1 + self.recipe.seed as usize % 3 {
            let special = SPECIALS[(self.recipe.seed as usize / 3 + n) % 3];
            let (array, place) = match self.of {
                Poisoned::Queries => (&mut case.q, [b, h, at(t_q), column % d]),
                Poisoned::Keys => (&mut case.k, [b, h % h_kv, at(t_kv), column % d]),
                Poisoned::Values => (&mut case.v, [b, h % h_kv, at(t_kv), column % d_v]),
                Poisoned::Bias => match case.masks.last_mut().map(|mask| &mut mask.parts[0]) {
                    Some(Part::Bias(bias)) => (bias, [b, h, at(t_q), at(t_kv)]),
                    other => panic!("{other:?} is no bias"),
                },
                Poisoned::Sinks | Poisoned::Unseen => {
                    case.options.sinks.as_mut().expect("sinks")[h] = special;
                    continue;
                }
            };
            let place = array.place(place);
            array.data[place] = special;
        }
    }

    /// Checks results exactly next to infinities and NaN, where bounds have no slack.
    fn check(&self, device: &Device, paths: &[Path]) -> Result<()> {
        let [clean, spoilt] = self.cases();
        let dtype = self.recipe.dtype;
        let expected = Expected::new(&spoilt, dtype);
        let [clean, spoilt] = [clean, spoilt].map(|case| Attention::on(device, case, Function::All));
        let ways: Vec<_> = paths.iter().map(|&path| (dtype, path)).collect();
        isolates([&clean, &spoilt], &ways, |(_, path), results| expected.on(*path).check(results))
    }
}

/// Fills padding, which may contain anything: every key to which no query of its sequence and group attends.
pub fn fill_unseen(case: &mut Case, special: f64) {
    let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = case.dims;
    let group = h / h_kv;
    for [sequence, key_head, j] in vectors(b, h_kv, t_kv) {
        let mut heads = key_head * group..(key_head + 1) * group;
        if heads.any(|head| (0..t_q).any(|i| case.sees([sequence, head, i, j]))) {
            continue;
        }
        for (array, width) in [(&mut case.k, d), (&mut case.v, d_v)] {
            for place in (0..width).map(|n| array.place([sequence, key_head, j, n])).collect::<Vec<_>>() {
                array.data[place] = special;
            }
        }
    }
}

fn nan_reaches_only_queries_that_attend_to_it(device: &Device) {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 5, t_kv: 6, d: 3, d_v: 2 };
    for_all(600, poisons(dims, dtypes(device), false), |poison| poison.check(device, &[Path::REFERENCE]));
}

#[test]
fn nan_in_kernel_reaches_only_queries_that_attend_to_it() {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 21, t_kv: 67, d: 9, d_v: 18 };
    for_all(200, poisons(dims, &DTYPES, true), |poison| poison.check(&Device::Cpu, &Path::kernels()));
}
