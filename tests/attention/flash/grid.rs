//! Every size, mask and option, on every instruction set: at random, and each pair of sizes once.

use crate::*;

/// By the kernel alone, since the reference path takes long for large cases.
fn holds(recipe: &Recipe) -> Result<()> {
    check_on(&recipe.case(), recipe.dtype, &CPU, &Path::kernels())
}

#[track_caller]
fn assert_holds(recipe: &Recipe) {
    holds(recipe).unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
}

const DIMS: Dims = Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 1, d: 8, d_v: 8 };

/// As they come; under masks of intervals alone, which a kernel turns into bounds of its loops; and of a query or a few
/// against many keys, whose sums a kernel may split.
#[test]
fn random_calls_agree_with_the_oracle() {
    let is_of_intervals = |recipe: &Recipe| recipe.masks.concat().iter().any(|kind| !kind.is_tensor());
    let intervals = kernel_recipes().prop_filter_map("a mask of intervals", move |mut recipe| {
        recipe.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !kind.is_tensor()));
        Some(recipe).filter(is_of_intervals)
    });
    let t_kv = select(&[511, 512, 513, 1023, 1025, 2047, 2049, 4099][..]);
    let long = (kernel_recipes(), t_kv, 1..=3usize).prop_map(|(recipe, t_kv, t_q)| {
        let Dims { b, h, h_kv: of_keys, d, d_v, .. } = recipe.dims;
        let (b, h_kv, d, d_v) = (b.min(2), of_keys.min(2), d.min(96), d_v.min(96));
        Recipe { dims: Dims { b, h: h_kv * (h / of_keys), h_kv, t_q, t_kv, d, d_v }, ..recipe }
    });
    let recipes = prop_oneof![4 => kernel_recipes(), 2 => intervals, 1 => long];
    for_all(448, recipes, |recipe| holds(&recipe));
}

/// Of the largest lengths only those beside the smaller ones, and squares.
#[test]
fn every_pair_of_lengths() {
    let masks: [&[Kind]; 4] = [&[], &[Kind::Causal], &[Kind::UpperLeft], &[Kind::Causal, Kind::Window]];
    for (n, &t_q) in LENGTHS.iter().enumerate() {
        for (m, &t_kv) in LENGTHS.iter().enumerate().filter(|&(_, &t_kv)| t_q.min(t_kv) <= 129 || t_q == t_kv) {
            let dims = Dims { t_q, t_kv, d: WIDTHS[(n + m) % 9], d_v: WIDTHS[(n + 2 * m) % 9], ..DIMS };
            assert_holds(&Recipe::of_kernel(dims, masks[(n / 3 + m) % 4].to_vec(), DTYPES[(n + m) % 3]));
        }
    }
}

#[test]
fn every_pair_of_widths() {
    for (n, &d) in WIDTHS.iter().enumerate() {
        for (m, &d_v) in WIDTHS.iter().enumerate() {
            let dims = Dims { h: 2, t_q: 5, t_kv: 19, d, d_v, ..DIMS };
            assert_holds(&Recipe::of_kernel(dims, vec![Kind::Causal], DTYPES[(n + m) % 3]));
        }
    }
}

/// In one order: the other is a matter of the mask, not of the kernel.
#[test]
fn every_pair_of_constraints() {
    let kinds = Kind::all();
    for (n, &first) in kinds.iter().enumerate() {
        for (m, &second) in kinds[n..].iter().enumerate() {
            let dims = Dims { b: 2, h: 2, t_q: 37, t_kv: 70, ..DIMS };
            let recipe = Recipe::of_kernel(dims, vec![first, second], DTYPES[(n + m) % 3]);
            assert_holds(&Recipe { runs: n % 2 == 0, ..recipe });
        }
    }
}

/// Blocks of which the first keys are hidden from all queries, as by left padding.
#[test]
fn keys_that_begin_within_a_block() {
    for dtype in DTYPES {
        for t_kv in [31, 64, 127, 128, 200, 256, 300, 511] {
            for start in (1..72).step_by(5).chain([8, 16, 32, 48, 64, t_kv - 1]).filter(|&start| start < t_kv) {
                let mut case = Recipe::of_kernel(Dims { t_q: 17, t_kv, ..DIMS }, vec![], dtype).case();
                case.masks = vec![Mask::of(Part::Starts(Lens::PerSequence(vec![start])))];
                let outcome = check_on(&case, dtype, &CPU, &Path::kernels());
                outcome.unwrap_or_else(|error| panic!("{error}: {start}..{t_kv} in {dtype:?}"));
            }
        }
    }
}

#[test]
fn every_set_of_options_under_every_constraint() {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 18, t_kv: 35, ..DIMS };
    for (set, (n, kind)) in (0..Chosen::SETS).flat_map(|set| Kind::all().into_iter().enumerate().map(move |n| (set, n)))
    {
        let recipe = Recipe::of_kernel(dims, vec![kind], DTYPES[(n + set) % 3]);
        assert_holds(&Recipe { chosen: Chosen::set(set), ..recipe });
    }
}
