//! Random and enumerated calls of the three functions: context, weights and log-sum-exp against the oracle.

use std::cell::RefCell;
use std::collections::BTreeSet;

use candle_attention::{AttentionMask, SdpaOptions, scaled_dot_product_attention_with_lse as with_lse};
use candle_core::{DType, Device, Result, Tensor};

use crate::call::{Call, check};
use crate::common::assert_close;
use crate::oracle::{Case, Dims, Options};
use crate::recipe::{Chosen, Kind, Layout, Recipe, dtypes, for_all, recipes};

crate::on_each_device!(
    random_calls_give_the_oracles_numbers,
    every_pair_of_layouts_gives_the_oracles_numbers,
    every_set_of_empty_sizes_gives_the_oracles_numbers,
    a_sink_of_minus_infinity_is_none,
    additions_to_scores_come_in_any_float_dtype,
);

/// Each constraint in each dtype, before and after each other and itself, and each set of options in each dtype are
/// among the draws.
fn random_calls_give_the_oracles_numbers(device: &Device) {
    let drawn = RefCell::new(BTreeSet::new());
    for_all(6_000, recipes(dtypes(device)), |recipe| {
        let (kinds, mut drawn) = (recipe.masks.concat(), drawn.borrow_mut());
        drawn.insert(format!("{:?}, {:?}", recipe.chosen, recipe.dtype));
        for (n, first) in kinds.iter().enumerate() {
            drawn.insert(format!("{first:?}, {:?}, {}", recipe.dtype, recipe.uniform_empty_rows));
            drawn.extend(kinds[n + 1..].iter().map(|second| format!("{first:?} before {second:?}")));
        }
        check(&recipe.case(), recipe.dtype, device)
    });
    let (kinds, dtypes) = (Kind::all().len(), dtypes(device).len());
    let expected = kinds * kinds + 2 * dtypes * kinds + 16 * dtypes;
    let found = drawn.take().len();
    assert!(found == expected || std::env::var_os("PROPTEST_CASES").is_some(), "{found} of {expected} are drawn");
}

/// T_q below, at and above T_kv.
const LENGTHS: [(usize, usize); 3] = [(3, 6), (4, 4), (6, 3)];

fn recipe(lengths: (usize, usize), masks: Vec<Vec<Kind>>, seed: u64) -> Recipe {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: lengths.0, t_kv: lengths.1, d: 3, d_v: 2 };
    let layouts = [Layout::HeadsTransposed, Layout::CacheHead, Layout::CacheMiddle];
    Recipe { layouts, seed, ..Recipe::plain(dims, masks, DType::F32) }
}

#[track_caller]
fn checked(recipe: &Recipe, device: &Device) {
    if let Err(difference) = check(&recipe.case(), recipe.dtype, device) {
        panic!("{difference}\n{recipe:?}");
    }
}

fn every_pair_of_layouts_gives_the_oracles_numbers(device: &Device) {
    for layouts in Layout::triples() {
        checked(&Recipe { layouts, ..recipe((3, 5), vec![vec![Kind::Causal]], 3) }, device);
    }
}

/// Under each constraint, with another set of options and another dtype each time.
fn every_set_of_empty_sizes_gives_the_oracles_numbers(device: &Device) {
    let dtypes = dtypes(device);
    for bits in 0..16 {
        let size = |bit: usize, size: usize| if bits & bit > 0 { 0 } else { size };
        for (n, masks) in
            std::iter::once(vec![]).chain(Kind::all().into_iter().map(|kind| vec![vec![kind]])).enumerate()
        {
            let plain = recipe((3, 4), masks, 5);
            let dims = Dims { b: size(1, 2), t_q: size(2, 3), t_kv: size(4, 4), d_v: size(8, 2), ..plain.dims };
            let (chosen, dtype) = (Chosen::set((bits + n) % 16), dtypes[n % dtypes.len()]);
            checked(&Recipe { dims, chosen, dtype, uniform_empty_rows: bits % 3 == 0, ..plain }, device);
        }
    }
}

fn a_sink_of_minus_infinity_is_none(device: &Device) {
    for lengths in LENGTHS {
        for masks in [vec![], vec![vec![Kind::Causal, Kind::ValidLens]]] {
            let sinks = Chosen { sinks: true, ..Chosen::default() };
            let mut case = Recipe { chosen: sinks, ..recipe(lengths, masks, 7) }.case();
            // Beside one that takes nearly all weight, and one that takes next to none.
            case.options.sinks = Some(vec![f64::NEG_INFINITY, 0.0, 1e4, -1e4]);
            check(&case, DType::F32, device).unwrap_or_else(|difference| panic!("{difference}"));
            let run = |case: &Case| -> Result<_> {
                let Call { q, k, v, mask, options } = Call::new(case, DType::F32, device)?;
                with_lse(&q, &k, &v, &mask, &options)
            };
            let without = Case { options: Options::default(), ..case.clone() };
            let ((context, lse), (expected, expected_lse)) = (run(&case).expect("runs"), run(&without).expect("runs"));
            let head = |tensor: &Tensor| tensor.narrow(1, 0, 1).expect("a head");
            assert_close(&head(&context), &head(&expected), 0.0, "context");
            assert_close(&head(&lse), &head(&expected_lse), 0.0, "lse");
        }
    }
}

/// The numbers are exact in each of them, so the results are the same to the bit.
fn additions_to_scores_come_in_any_float_dtype(device: &Device) -> Result<()> {
    for &dtype in dtypes(device) {
        let x = Tensor::randn(0f32, 1., (2, 4, 3, 2), device)?.to_dtype(dtype)?;
        let numbers = Tensor::new(&[[0.5f32, -0.25, 1.0], [0.0, 2.0, f32::NEG_INFINITY], [-3.0, 0.125, 1.5]], device)?;
        let heads = Tensor::new(&[0.5f32, 0.25, 0.0, 2.0], device)?;
        let run = |other: DType| -> Result<_> {
            let (numbers, heads) = (numbers.to_dtype(other)?, heads.to_dtype(other)?);
            let mask = AttentionMask::causal().with_bias(&numbers);
            with_lse(&x, &x, &x, &mask, &SdpaOptions::default().with_alibi_slopes(&heads).with_sinks(&heads))
        };
        let (context, lse) = run(DType::F32)?;
        for &other in dtypes(device) {
            let (same, same_lse) = run(other)?;
            assert_close(&same, &context, 0.0, &format!("{other:?} beside {dtype:?}"));
            assert_close(&same_lse, &lse, 0.0, &format!("{other:?} beside {dtype:?}"));
        }
    }
    Ok(())
}
