//! Random and enumerated calls of small sizes, on the reference path and in the kernel, against the oracle.

use std::cell::RefCell;
use std::collections::BTreeSet;

use candle_attention::scaled_dot_product_attention_with_lse as with_lse;

use crate::*;

crate::on_each_device!(
    sdpa_with_random_masks_and_options_matches_oracle,
    sdpa_with_empty_sizes_matches_oracle,
    alibi_sinks_and_bias_in_any_float_dtype_give_equal_output,
);

/// Checks that the draws have each constraint in each dtype, before and after each other and itself, and each set of
/// options in each dtype.
fn sdpa_with_random_masks_and_options_matches_oracle(device: &Device) {
    let drawn = RefCell::new(BTreeSet::new());
    for_all(4_500, recipes(dtypes(device)), |recipe| {
        let kinds = recipe.masks.concat();
        let mut drawn = drawn.borrow_mut();
        drawn.insert(format!("{:?}, {:?}", recipe.chosen, recipe.dtype));
        for (n, first) in kinds.iter().enumerate() {
            drawn.insert(format!("{first:?}, {:?}, {}", recipe.dtype, recipe.uniform_fully_masked_rows));
            drawn.extend(kinds[n + 1..].iter().map(|second| format!("{first:?} before {second:?}")));
        }
        let case = recipe.case();
        let mut paths = Path::of(&case, recipe.dtype, device);
        // The reference path, and another instruction set each time.
        let others = paths.len() - 1;
        paths[1..].rotate_left(recipe.seed as usize % others.max(1));
        paths.truncate(2);
        check_on(&case, recipe.dtype, device, &paths)
    });
    let kinds = Kind::all().len();
    let dtypes = dtypes(device).len();
    let expected = kinds * kinds + 2 * dtypes * kinds + Chosen::sets().len() * dtypes;
    let found = drawn.take().len();
    assert!(found == expected || std::env::var_os("PROPTEST_CASES").is_some(), "{found} of {expected} are drawn");
}

/// Combines each constraint with another set of options and another dtype.
fn sdpa_with_empty_sizes_matches_oracle(device: &Device) {
    let dtypes = dtypes(device);
    let sets = Chosen::sets();
    let lists: Vec<_> = std::iter::once(vec![]).chain(Kind::all().into_iter().map(|kind| vec![vec![kind]])).collect();
    for (bits, (n, masks)) in (0..16).flat_map(|bits| lists.iter().enumerate().map(move |masks| (bits, masks))) {
        let size = |bit: usize, size: usize| if bits & bit > 0 { 0 } else { size };
        let dims = Dims { b: size(1, 2), h: 4, h_kv: 2, t_q: size(2, 19), t_kv: size(4, 40), d: 3, d_v: size(8, 18) };
        let chosen = sets[(bits + n) % sets.len()];
        let dtype = dtypes[n % dtypes.len()];
        let layouts = [Layout::HeadsTransposed, Layout::CacheHead, Layout::CacheMiddle];
        let recipe = Recipe { chosen, layouts, seed: 5, ..Recipe::plain(dims, masks.clone(), dtype) };
        let recipe = Recipe { uniform_fully_masked_rows: bits % 3 == 0, ..recipe };
        check(&recipe.case(), dtype, device).unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
    }
}

/// Compares bits: the numbers are exact in each dtype.
fn alibi_sinks_and_bias_in_any_float_dtype_give_equal_output(device: &Device) -> Result<()> {
    for &dtype in dtypes(device) {
        let x = Tensor::randn(0f32, 1., (2, 4, 3, 2), device)?.to_dtype(dtype)?;
        let numbers = Tensor::new(&[[0.5f32, -0.25, 1.0], [0.0, 2.0, f32::NEG_INFINITY], [-3.0, 0.125, 1.5]], device)?;
        let heads = Tensor::new(&[0.5f32, 0.25, 0.0, 2.0], device)?;
        let run = |other: DType| -> Result<_> {
            let numbers = numbers.to_dtype(other)?;
            let heads = heads.to_dtype(other)?;
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

#[test]
fn relative_bias_of_wrong_shape_or_dtype_is_rejected() -> Result<()> {
    let x = Tensor::zeros((2, 3, 4, 8), DType::F32, &Device::Cpu)?;
    for (shape, dtype, expected) in [
        ([3, 8], DType::F32, "relative_bias has shape [3, 8], expected (H = 3, T_q + T_kv - 1 = 7)"),
        ([3, 7], DType::U32, "relative_bias has dtype U32, expected F32, F16, BF16 or F64"),
    ] {
        let biases = Tensor::zeros(&shape, dtype, &Device::Cpu)?;
        let options = SdpaOptions::default().with_relative_bias(&biases);
        let found = error_text(with_lse(&x, &x, &x, &AttentionMask::none(), &options));
        assert!(found.contains(expected), "{found}");
    }
    Ok(())
}
