//! Nothing to attend to, or nobody to attend.

use crate::array::Array;
use crate::flash::fused::check;
use crate::oracle::{Alignment, Dims, Lens, Mask, Part};
use crate::recipe::{Chosen, DTYPES, Kind, Recipe};

/// Empty results, or zeros and -inf for no keys; the log-sum-exp does not depend on how wide the values are, be it nothing.
#[test]
fn sizes_of_zero_give_empty_results_or_zeros() {
    for dtype in DTYPES {
        for [b, t_q, t_kv, d_v] in [
            [0, 3, 4, 5],
            [2, 0, 4, 5],
            [2, 3, 0, 5],
            [2, 3, 4, 0],
            [2, 0, 0, 5],
            [2, 3, 0, 0],
            [0, 0, 0, 0],
            [1, 1, 0, 64],
            [1, 300, 0, 64],
            [2, 19, 40, 0],
        ] {
            for kinds in [vec![], vec![Kind::Causal], vec![Kind::Causal, Kind::Window]] {
                let recipe = Recipe::of_kernel(Dims { b, h: 4, h_kv: 2, t_q, t_kv, d: 6, d_v }, kinds, dtype);
                check(&recipe.case(), dtype).unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
            }
        }
    }
}

/// Rows that see nothing, by each way to hide, between rows that see something: zeros, and -inf or the sink alone.
#[test]
fn empty_rows_are_zeros() {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 35, t_kv: 66, d: 16, d_v: 24 };
    let every = |n: usize, other: usize| (0..dims.t_q).map(|i| if i % n == 0 { 0 } else { other }).collect::<Vec<_>>();
    let alternating = |hidden: f64, seen: f64| {
        let mut i = 0;
        Array::new(&[dims.t_q, 1]).filled(move || {
            i += 1;
            if i % 3 == 0 || i > 16 && i <= 33 { hidden } else { seen }
        })
    };
    let part = |part: Part| Mask { alignment: Alignment::Free, parts: vec![part] };
    let masks = [
        ("all of one sequence", part(Part::ValidLens(Lens::PerSequence(vec![0, 40])))),
        ("starts behind all keys", part(Part::Starts(Lens::PerSequence(vec![66, 3])))),
        ("lengths of queries", part(Part::ValidLens(Lens::PerQuery(vec![every(2, 66), every(1, 0)])))),
        ("a keep", part(Part::Keep(alternating(0.0, 1.0)))),
        ("a bias", part(Part::Bias(alternating(f64::NEG_INFINITY, -1.0)))),
        ("a keep of nothing", part(Part::Keep(Array::new(&[]).filled(|| 0.0)))),
        ("a bias of nothing", part(Part::Bias(Array::new(&[]).filled(|| f64::NEG_INFINITY)))),
        ("a bias of nothing, written out", {
            part(Part::Bias(Array::new(&[dims.t_q, dims.t_kv]).filled(|| f64::NEG_INFINITY)))
        }),
    ];
    for (what, mask) in masks {
        for dtype in DTYPES {
            for [sinks, alibi] in [[false, false], [true, false], [true, true]] {
                let mut draw = Recipe::of_kernel(dims, vec![], dtype);
                draw.chosen = Chosen { sinks, alibi, ..Chosen::default() };
                let mut case = draw.case();
                case.masks.push(mask.clone());
                let expected = case.attend();
                let empty = expected.lse.iter().filter(|&&lse| lse == f64::NEG_INFINITY).count();
                assert!(sinks || empty > 10, "{what} leaves rows empty");
                check(&case, dtype).unwrap_or_else(|difference| panic!("{what}, {dtype:?}, {sinks}: {difference}"));
            }
        }
    }
}

/// More queries than keys under the causal mask: the first queries see nothing.
#[test]
fn queries_before_the_first_key_are_empty() {
    for (t_q, t_kv) in [(5, 1), (70, 3), (129, 64), (300, 17)] {
        for dtype in DTYPES {
            let dims = Dims { b: 1, h: 2, h_kv: 2, t_q, t_kv, d: 32, d_v: 32 };
            for kinds in [vec![Kind::Causal], vec![Kind::Band]] {
                let draw = Recipe::of_kernel(dims, kinds, dtype);
                check(&draw.case(), dtype).unwrap_or_else(|difference| panic!("{difference}\n{draw:?}"));
            }
        }
    }
}
