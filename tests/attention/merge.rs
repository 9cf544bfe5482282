//! Keys cut into parts, each attended alone, merge to what all keys together give.

use crate::*;

crate::on_each_device!(random_parts_merge_to_the_whole);

/// A call, and the part that each key goes to.
#[derive(Debug, Clone)]
struct Split {
    recipe: Recipe,
    parts: usize,
    sinks_in: usize,
    /// Side by side, or scattered.
    assigned: Vec<usize>,
}

fn splits(recipes: impl Strategy<Value = Recipe>) -> impl Strategy<Value = Split> {
    (recipes, 1..=5usize).prop_flat_map(|(recipe, parts)| {
        let assigned = proptest::collection::vec(0..parts, recipe.dims.t_kv);
        (Just(recipe), Just(parts), 0..parts, any::<bool>(), assigned).prop_map(
            |(recipe, parts, sinks_in, in_order, mut assigned)| {
                if in_order {
                    assigned.sort_unstable();
                }
                Split { recipe, parts, sinks_in, assigned }
            },
        )
    })
}

impl Split {
    /// At once, and in two stages, as a tree of machines would do it.
    fn check(&self, device: &Device, path: Path) -> Result<()> {
        let Self { recipe, parts, sinks_in, assigned } = self;
        let mut case = recipe.case();
        let mut sinks = None;
        let whole = Call::with_leaves(&case, recipe.dtype, device, &mut |name, leaf| {
            sinks = if name == "sinks" { Some(leaf.clone()) } else { sinks.take() };
            Ok(leaf)
        })?;
        let part = |n: usize| {
            let keys: Vec<usize> = (0..case.dims.t_kv).filter(|&j| assigned[j] == n).collect();
            let bias = columns(&case, &keys, |index| case.bias(index)).tensor(wide(recipe.dtype), device)?;
            let mut part = part(&whole, &case, &keys, (&[bias], sinks.as_ref().filter(|_| n == *sinks_in)))?;
            // The mean of a part's keys must not enter the whole's; with a sink it would, which no merge can tell.
            if recipe.uniform_empty_rows && case.options.sinks.is_none() {
                part.mask = part.mask.with_empty_rows(EmptyRows::Uniform);
            }
            part.by(path).with_lse()
        };
        let parts = (0..*parts).map(part).collect::<Result<Vec<_>>>()?;
        let (front, back) = parts.split_at(*sinks_in);
        let halves = [front, back].into_iter().filter(|half| !half.is_empty());
        let in_stages = merge_attention(&halves.map(merge_attention).collect::<Result<Vec<_>>>()?)?;
        case.uniform_empty_rows = false;
        let expected = Expected::new(&case, recipe.dtype).on(path);
        let compare = |(context, lse): &(Tensor, Tensor), stages: f64| {
            expected.merged_context(context, stages)?;
            expected.lse(lse)
        };
        compare(&merge_attention(&parts)?, 1.0).map_err(|error| error.context(format!("{path:?}, at once")))?;
        compare(&in_stages, 2.0).map_err(|error| error.context(format!("{path:?}, in stages")))
    }
}

/// The columns `keys` of a matrix (B, H, T_q, T_kv).
fn columns(case: &Case, keys: &[usize], entry: impl Fn([usize; 4]) -> f64) -> Array {
    let Dims { b, h, t_q, .. } = case.dims;
    Array::each([b, h, t_q, keys.len()], |[b, h, i, n]| entry([b, h, i, keys[n]]))
}

/// These keys of a call as a call of their own, with biases and sinks. What is hidden is written out, and what is added
/// has to be, since positions, and ALiBi's distances, count in the whole.
pub fn part(whole: &Call, case: &Case, keys: &[usize], (biases, sinks): (&[Tensor], Option<&Tensor>)) -> Result<Call> {
    let (dtype, device) = (whole.q.dtype(), whole.q.device());
    let in_order = keys.windows(2).all(|pair| pair[1] == pair[0] + 1);
    let take = |tensor: &Tensor| match keys.first() {
        Some(&first) if in_order => tensor.narrow(2, first, keys.len()),
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
    let keep = columns(case, keys, |index| f64::from(u8::from(case.sees(index)))).tensor(DType::U8, device)?;
    let mask = biases.iter().fold(AttentionMask::none().with_keep(&keep), |mask, bias| mask.with_bias(bias));
    // Scale and softcap belong to every part.
    let options = numbers(&case.options);
    let options = sinks.map_or(options.clone(), |sinks| options.with_sinks(sinks));
    Ok(Call { q: whole.q.clone(), k: take(&whole.k)?, v: take(&whole.v)?, mask, options })
}

fn random_parts_merge_to_the_whole(device: &Device) {
    for_all(2_000, splits(recipes(dtypes(device))), |split| split.check(device, Path::REFERENCE));
}

/// Some of which have no keys.
#[test]
fn random_parts_of_the_kernel_merge_to_the_whole() {
    for_all(64, splits(kernel_recipes()), |split| {
        Path::kernels().into_iter().try_for_each(|path| split.check(&CPU, path))
    });
}
