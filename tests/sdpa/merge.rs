//! Keys cut into parts, each attended alone, merge to what all keys together give.

use candle_attention::{
    AttentionMask, EmptyRows, SdpaOptions, merge_attention, scaled_dot_product_attention_with_lse as attend,
};
use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;

use crate::check::{Arguments, Bounds, compare, compare_lse, reference};
use crate::common::assert_close;
use crate::oracle::{Case, Dims};
use crate::recipe::{Recipe, dtypes, for_all, recipes, wide};

crate::on_each_device!(
    random_parts_merge_to_the_whole,
    parts_that_see_nothing_merge_to_nothing,
    one_part_merges_to_itself,
);

/// A call, and the part that each key goes to.
#[derive(Debug, Clone)]
struct Split {
    recipe: Recipe,
    parts: usize,
    sinks_in: usize,
    /// Whether the keys of a part lie side by side.
    in_order: bool,
    assigned: Vec<usize>,
}

fn splits(dtypes: &'static [DType]) -> impl Strategy<Value = Split> {
    (recipes(dtypes), 1..=5usize).prop_flat_map(|(recipe, parts)| {
        let assigned = proptest::collection::vec(0..parts, recipe.dims.t_kv);
        (Just(recipe), Just(parts), 0..parts, any::<bool>(), assigned).prop_map(
            |(recipe, parts, sinks_in, in_order, mut assigned)| {
                if in_order {
                    assigned.sort_unstable();
                }
                Split { recipe, parts, sinks_in, in_order, assigned }
            },
        )
    })
}

/// The columns `keys` of the mask.
pub fn keep_columns(case: &Case, keys: &[usize], device: &Device) -> Result<Tensor> {
    let entries = columns(case, keys, |index| u8::from(case.sees(index)));
    Tensor::from_vec(entries, (case.dims.b, case.dims.h, case.dims.t_q, keys.len()), device)
}

/// The same columns of all that is added to scores. ALiBi is among it: its distances are those of the whole.
fn bias_columns(case: &Case, keys: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    let entries = columns(case, keys, |index| case.bias(index));
    let shape = (case.dims.b, case.dims.h, case.dims.t_q, keys.len());
    Tensor::from_vec(entries, shape, &Device::Cpu)?.to_dtype(wide(dtype))?.to_device(device)
}

fn columns<T>(case: &Case, keys: &[usize], entry: impl Fn([usize; 4]) -> T) -> Vec<T> {
    let Dims { b, h, t_q, .. } = case.dims;
    let rows = (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..t_q).map(move |i| [b, h, i])));
    rows.flat_map(|[b, h, i]| keys.iter().map(move |&j| [b, h, i, j])).map(entry).collect()
}

/// Scale and softcap, which belong to every part.
pub fn options(case: &Case) -> SdpaOptions {
    let mut options = reference();
    if let Some(scale) = case.options.scale {
        options = options.with_scale(scale);
    }
    if let Some(softcap) = case.options.softcap {
        options = options.with_softcap(softcap);
    }
    options
}

fn parts(split: &Split, case: &Case, device: &Device) -> Result<Vec<(Tensor, Tensor)>> {
    let dtype = split.recipe.dtype;
    let whole = Arguments::new(case, dtype, device)?;
    let part = |part: usize| {
        let keys: Vec<usize> = (0..case.dims.t_kv).filter(|&j| split.assigned[j] == part).collect();
        let take = |tensor: &Tensor| match keys.first() {
            Some(&first) if split.in_order => tensor.narrow(2, first, keys.len()),
            // Candle copies no view of an empty buffer that begins past its end.
            Some(_) if tensor.elem_count() == 0 => {
                let (b, h, _, d) = tensor.dims4()?;
                Tensor::zeros((b, h, keys.len(), d), dtype, device)
            }
            Some(_) => {
                let index: Vec<u32> = keys.iter().map(|&j| j as u32).collect();
                tensor.contiguous()?.index_select(&Tensor::new(index, device)?, 2)
            }
            None => tensor.narrow(2, 0, 0),
        };
        let mut options = options(case);
        if let Some(sinks) = case.options.sinks.as_ref().filter(|_| part == split.sinks_in) {
            options = options
                .with_sinks(&Tensor::new(sinks.as_slice(), &Device::Cpu)?.to_dtype(wide(dtype))?.to_device(device)?);
        }
        let mut mask = AttentionMask::none()
            .with_keep(&keep_columns(case, &keys, device)?)
            .with_bias(&bias_columns(case, &keys, dtype, device)?);
        // The mean of a part's keys must not enter the whole's; with a sink it would, which no merge can tell.
        if split.recipe.uniform_empty_rows && case.options.sinks.is_none() {
            mask = mask.with_empty_rows(EmptyRows::Uniform);
        }
        attend(&whole.q, &take(&whole.k)?, &take(&whole.v)?, &mask, &options)
    };
    (0..split.parts).map(part).collect()
}

fn random_parts_merge_to_the_whole(device: &Device) {
    for_all(4_000, splits(dtypes(device)), |split| {
        let mut case = split.recipe.case();
        let dtype = split.recipe.dtype;
        let merged = || -> Result<_> {
            let parts = parts(&split, &case, device)?;
            let at_once = merge_attention(&parts)?;
            // Two stages, as a tree of machines would do it.
            let (front, back) = parts.split_at(split.sinks_in);
            let halves = [front, back].into_iter().filter(|half| !half.is_empty());
            let in_stages = merge_attention(&halves.map(merge_attention).collect::<Result<Vec<_>>>()?)?;
            Ok([at_once, in_stages])
        };
        let merged = merged().map_err(|error| error.to_string())?;
        case.uniform_empty_rows = false;
        let expected = case.attend();
        let bounds = Bounds::new(&case, &expected, dtype);
        let dims = case.dims;
        for (what, (context, lse)) in ["at once", "in stages"].into_iter().zip(&merged) {
            compare(what, context, (&[dims.b, dims.h, dims.t_q, dims.d_v], dtype), &expected.context, |n| {
                2.0 * bounds.merged_context(n, &expected.lse)
            })?;
            compare_lse(&format!("lse {what}"), lse, &case, &expected, &bounds, dtype)?;
        }
        Ok(())
    });
}

fn parts_that_see_nothing_merge_to_nothing(device: &Device) {
    let test = || -> Result<()> {
        let x = Tensor::ones((1, 2, 3, 4), DType::F32, device)?;
        let hidden = AttentionMask::none().with_valid_lens(vec![0]);
        let nothing = attend(&x, &x, &x, &hidden, &reference())?;
        let no_keys = x.narrow(2, 0, 0)?;
        let without_keys = attend(&x, &no_keys, &no_keys, &AttentionMask::none(), &reference())?;
        let (context, lse) = merge_attention(&[nothing, without_keys])?;
        assert_close(&context, &x.zeros_like()?, 0.0, "context");
        let lowest = Tensor::full(f32::NEG_INFINITY, (1, 2, 3), device)?;
        assert_close(&lse, &lowest, 0.0, "lse");
        Ok(())
    };
    test().expect("parts without keys merge");
}

fn one_part_merges_to_itself(device: &Device) {
    let test = || -> Result<()> {
        for &dtype in dtypes(device) {
            let x = Tensor::randn(0f32, 1., (2, 2, 3, 4), device)?.to_dtype(dtype)?;
            let (context, lse) = attend(&x, &x, &x, &AttentionMask::causal(), &reference())?;
            let (merged, merged_lse) = merge_attention(&[(context.clone(), lse.clone())])?;
            assert_close(&merged, &context, 0.0, "context");
            assert_close(&merged_lse, &lse, 0.0, "lse");
        }
        Ok(())
    };
    test().expect("one part merges");
}
