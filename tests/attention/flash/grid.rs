//! Every size, mask and option, on every instruction set: at random, and each pair of sizes once.

use crate::*;

/// Compares the kernel alone, since the reference path takes long for large cases.
fn holds(recipe: &Recipe) -> Result<()> {
    check_on(&recipe.case(), recipe.dtype, &CPU, &Path::kernels())
}

#[track_caller]
fn assert_holds(recipe: &Recipe) {
    holds(recipe).unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
}

const DIMS: Dims = Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 1, d: 8, d_v: 8 };

/// Draws any calls; calls under masks that are ranges of keys, which a kernel turns into bounds of its loops; and calls
/// of a few queries and many keys, which a kernel may split.
#[test]
fn kernel_with_random_calls_matches_oracle() {
    let is_of_intervals = |recipe: &Recipe| recipe.masks.concat().iter().any(|kind| !kind.is_tensor());
    let intervals = kernel_recipes().prop_filter_map("a mask of intervals", move |mut recipe| {
        recipe.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !kind.is_tensor()));
        Some(recipe).filter(is_of_intervals)
    });
    let t_kv = select(&[511, 512, 513, 1023, 1025, 2047, 2049, 4099][..]);
    let long = (kernel_recipes(), t_kv, 1..=3usize).prop_map(|(recipe, t_kv, t_q)| {
        let Dims { b, h, h_kv: of_keys, d, d_v, .. } = recipe.dims;
        let b = b.min(2);
        let h_kv = of_keys.min(2);
        let d = d.min(96);
        let d_v = d_v.min(96);
        Recipe { dims: Dims { b, h: h_kv * (h / of_keys), h_kv, t_q, t_kv, d, d_v }, ..recipe }
    });
    let recipes = prop_oneof![4 => kernel_recipes(), 2 => intervals, 1 => long];
    for_all(448, recipes, |recipe| holds(&recipe));
}

/// The masks that share the pairs of lengths between them.
const MASKS_OF_LENGTHS: [&[Kind]; 4] = [&[], &[Kind::Causal], &[Kind::UpperLeft], &[Kind::Causal, Kind::Window]];

/// Checks the pairs of lengths of one mask. The largest lengths come with the smaller ones, and in squares.
fn check_lengths(mask: usize) {
    for (n, &t_q) in LENGTHS.iter().enumerate() {
        for (m, &t_kv) in LENGTHS.iter().enumerate().filter(|&(_, &t_kv)| t_q.min(t_kv) <= 129 || t_q == t_kv) {
            if (n / 3 + m) % MASKS_OF_LENGTHS.len() != mask {
                continue;
            }
            let dims = Dims { t_q, t_kv, d: WIDTHS[(n + m) % 9], d_v: WIDTHS[(n + 2 * m) % 9], ..DIMS };
            assert_holds(&Recipe::of_kernel(dims, MASKS_OF_LENGTHS[mask].to_vec(), DTYPES[(n + m) % 3]));
        }
    }
}

#[test]
fn no_mask_with_many_lengths_matches_oracle() {
    check_lengths(0);
}

#[test]
fn causal_mask_with_many_lengths_matches_oracle() {
    check_lengths(1);
}

#[test]
fn causal_upper_left_mask_with_many_lengths_matches_oracle() {
    check_lengths(2);
}

#[test]
fn causal_window_with_many_lengths_matches_oracle() {
    check_lengths(3);
}

#[test]
fn causal_mask_with_every_pair_of_head_dims_matches_oracle() {
    for (n, &d) in WIDTHS.iter().enumerate() {
        for (m, &d_v) in WIDTHS.iter().enumerate() {
            let dims = Dims { h: 2, t_q: 5, t_kv: 19, d, d_v, ..DIMS };
            assert_holds(&Recipe::of_kernel(dims, vec![Kind::Causal], DTYPES[(n + m) % 3]));
        }
    }
}

/// Checks numbers of queries for decoding and for a prompt.
#[test]
fn gqa_with_every_group_size_matches_oracle() {
    for (n, (h_kv, group)) in [1, 2, 3].into_iter().flat_map(|h_kv| (1..=8).map(move |group| (h_kv, group))).enumerate()
    {
        for (m, t_q) in [1, 2, 19].into_iter().enumerate() {
            let dims = Dims { b: 2, h: h_kv * group, h_kv, t_q, t_kv: 70, ..DIMS };
            assert_holds(&Recipe::of_kernel(dims, vec![Kind::Causal], DTYPES[(n + m) % 3]));
        }
    }
}

/// Checks each constraint that `is_first` selects together with itself and with every constraint that comes after it in
/// [`Kind::all`]. The other order is the same to the kernel.
fn check_constraints(is_first: fn(Kind) -> bool) {
    let kinds = Kind::all();
    for (n, &first) in kinds.iter().enumerate().filter(|&(_, &kind)| is_first(kind)) {
        for (m, &second) in kinds[n..].iter().enumerate() {
            let dims = Dims { b: 2, h: 2, t_q: 37, t_kv: 70, ..DIMS };
            let recipe = Recipe::of_kernel(dims, vec![first, second], DTYPES[(n + m) % 3]);
            assert_holds(&Recipe { masks_runs: n % 2 == 0, ..recipe });
        }
    }
}

#[test]
fn causal_with_other_constraints_matches_oracle() {
    check_constraints(|kind| matches!(kind, Kind::Causal | Kind::UpperLeft | Kind::Offset | Kind::Offsets));
}

#[test]
fn valid_lens_and_starts_with_other_constraints_match_oracle() {
    use Kind::{Starts, StartsPerQuery, ValidLens, ValidLensPerQuery};
    check_constraints(|kind| matches!(kind, ValidLens | ValidLensPerQuery | Starts | StartsPerQuery));
}

#[test]
fn window_with_other_constraints_matches_oracle() {
    check_constraints(|kind| matches!(kind, Kind::Window | Kind::LocalWindow | Kind::Chunk));
}

#[test]
fn prefix_with_other_constraints_matches_oracle() {
    check_constraints(|kind| matches!(kind, Kind::Prefix | Kind::PrefixPerQuery));
}

#[test]
fn bool_mask_with_other_constraints_matches_oracle() {
    check_constraints(|kind| matches!(kind, Kind::BoolMask(_)));
}

#[test]
fn bias_with_bias_matches_oracle() {
    check_constraints(|kind| matches!(kind, Kind::Bias(_)));
}

/// Masks the first keys of a block for all queries, as left padding does.
#[test]
fn left_padding_within_a_block_matches_oracle() {
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

/// Checks the sets of options that `is_checked` selects under every constraint.
fn check_options(is_checked: fn(&Chosen) -> bool) {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 18, t_kv: 35, ..DIMS };
    for (set, chosen) in Chosen::sets().into_iter().enumerate().filter(|(_, chosen)| is_checked(chosen)) {
        for (n, kind) in Kind::all().into_iter().enumerate() {
            let recipe = Recipe::of_kernel(dims, vec![kind], DTYPES[(n + set) % 3]);
            assert_holds(&Recipe { chosen, ..recipe });
        }
    }
}

#[test]
fn gqa_with_every_constraint_matches_oracle() {
    check_options(|chosen| *chosen == Chosen::default());
}

#[test]
fn scale_with_every_constraint_matches_oracle() {
    check_options(|chosen| *chosen == Chosen { scale: true, ..Chosen::default() });
}

/// Checks it alone and with a scale.
#[test]
fn softcap_with_every_constraint_matches_oracle() {
    check_options(|chosen| chosen.softcap && !chosen.alibi && !chosen.sinks && !chosen.relative_bias);
}

/// Combines it with every set of scale and softcap.
#[test]
fn alibi_with_every_constraint_matches_oracle() {
    check_options(|chosen| chosen.alibi && !chosen.sinks && !chosen.relative_bias);
}

/// Combines them with every set of scale, softcap and ALiBi.
#[test]
fn sinks_with_every_constraint_match_oracle() {
    check_options(|chosen| chosen.sinks && !chosen.relative_bias);
}

/// Combines it with every set of the other options.
#[test]
fn relative_bias_with_every_constraint_matches_oracle() {
    check_options(|chosen| chosen.relative_bias);
}
