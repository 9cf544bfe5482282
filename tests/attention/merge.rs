//! Keys in parts, each attended to alone and merged, compared with one call over all keys.

use crate::gradients::{Attention, Function};
use crate::*;

crate::on_each_device!(
    merge_attention_of_random_parts_matches_whole,
    merge_attention_ignores_outputs_and_gradients_of_empty_rows,
);

/// The part that each key goes to, side by side or scattered, and the part that the sinks go to.
#[derive(Debug, Clone)]
pub struct Split {
    pub parts: usize,
    pub sinks_in: usize,
    pub assigned: Vec<usize>,
    /// Parts are merged in two stages, as a tree of machines would do it, and not at once.
    pub in_stages: bool,
}

pub fn splits(recipes: impl Strategy<Value = Recipe>) -> impl Strategy<Value = (Recipe, Split)> {
    (recipes, 1..=5usize).prop_flat_map(|(recipe, parts)| {
        let assigned = proptest::collection::vec(0..parts, recipe.dims.t_kv);
        (Just(recipe), 0..parts, any::<bool>(), assigned).prop_map(move |(recipe, sinks_in, in_order, mut assigned)| {
            if in_order {
                assigned.sort_unstable();
            }
            (recipe, Split { parts, sinks_in, assigned, in_stages: false })
        })
    })
}

impl Split {
    /// Merges the results of the parts of a case, with parts of these tensors.
    pub fn merge(&self, case: &Case, whole: &Call, leaves: &Named, path: Path) -> Result<(Tensor, Tensor)> {
        let part = |n| self.part(n, case, whole, leaves)?.by(path).with_lse();
        let parts = (0..self.parts).map(part).collect::<Result<Vec<_>>>()?;
        if !self.in_stages {
            return merge_attention(&parts);
        }
        let (front, back) = parts.split_at(self.sinks_in);
        let halves = [front, back].into_iter().filter(|half| !half.is_empty());
        merge_attention(&halves.map(merge_attention).collect::<Result<Vec<_>>>()?)
    }

    /// Returns the call of a part. Its mask and the biases by distance are written as tensors, since positions count in
    /// the whole.
    fn part(&self, n: usize, case: &Case, whole: &Call, leaves: &Named) -> Result<Call> {
        let Dims { b, h, t_q, t_kv, .. } = case.dims;
        let device = whole.q.device();
        let keys: Vec<usize> = (0..t_kv).filter(|&j| self.assigned[j] == n).collect();
        let in_order = keys.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let take = |tensor: &Tensor, dim: usize| match keys.first() {
            Some(&first) if in_order => tensor.narrow(dim, first, keys.len()),
            // Candle copies no view of an empty buffer that begins past its end.
            Some(_) if tensor.elem_count() == 0 => {
                let sizes =
                    tensor.dims().iter().enumerate().map(|(axis, &size)| if axis == dim { keys.len() } else { size });
                Tensor::zeros(sizes.collect::<Vec<_>>(), tensor.dtype(), device)
            }
            Some(_) => {
                let index: Vec<u32> = keys.iter().map(|&j| j as u32).collect();
                tensor.contiguous()?.index_select(&Tensor::new(index, device)?, dim)
            }
            None => tensor.narrow(dim, 0, 0),
        };
        let columns = |dtype: DType, entry: &dyn Fn([usize; 4]) -> f64| {
            let column = |[sequence, head, i, at]: [usize; 4]| entry([sequence, head, i, keys[at]]);
            Array::each([b, h, t_q, keys.len()], column).tensor(dtype, device)
        };
        let keep = columns(DType::U8, &|index| f64::from(u8::from(case.sees(index))))?;
        let mut mask = AttentionMask::none().with_bool_mask(&keep);
        let mut by_distance = case.clone();
        for (m, own) in by_distance.masks.iter_mut().enumerate() {
            for (p, part) in own.parts.iter().enumerate() {
                if let Part::Bias(bias) = part {
                    let biases = bias.look(&leaves[&format!("bias {m} {p}")])?.broadcast_as((b, h, t_q, t_kv))?;
                    mask = mask.with_bias(&take(&biases, 3)?);
                }
            }
            own.parts.retain(|part| !matches!(part, Part::Bias(_)));
        }
        mask = mask.with_bias(&columns(wide(whole.q.dtype()), &|index| by_distance.bias(index))?);
        // The mean of a part's keys must not enter the whole's; with a sink it would, which no merge can tell.
        if case.uniform_fully_masked_rows && case.options.sinks.is_none() {
            mask = mask.with_fully_masked_rows(FullyMaskedRows::Uniform);
        }
        // Scale and softcap belong to every part.
        let options = numbers(&case.options);
        let sinks = leaves.get("sinks").filter(|_| n == self.sinks_in);
        let options = sinks.map_or(options.clone(), |sinks| options.with_sinks(sinks));
        Ok(Call { q: whole.q.clone(), k: take(&whole.k, 2)?, v: take(&whole.v, 2)?, mask, options })
    }
}

fn check(recipe: &Recipe, split: &Split, device: &Device, path: Path) -> Result<()> {
    let case = recipe.case();
    let dtype = recipe.dtype;
    let expected = Expected::new(&Case { uniform_fully_masked_rows: false, ..case.clone() }, dtype).on(path);
    for in_stages in [false, true] {
        let split = Split { in_stages, ..split.clone() };
        let call = Attention::on(device, case.clone(), Function::Merged(split));
        let merged = call.run(&(dtype, path), &mut |_, tensor| Ok(tensor))?;
        let outcome = expected.merged_context(&merged[0], if in_stages { 2.0 } else { 1.0 });
        let outcome = outcome.and_then(|()| expected.lse(&merged[1]));
        outcome.map_err(|error| error.context(format!("{path:?}, in stages: {in_stages}")))?;
    }
    Ok(())
}

fn merge_attention_of_random_parts_matches_whole(device: &Device) {
    let splits = splits(recipes(dtypes(device)));
    for_all(2_000, splits, |(recipe, split)| check(&recipe, &split, device, Path::REFERENCE));
}

/// Includes parts without keys.
#[test]
fn merge_attention_of_kernel_parts_matches_whole() {
    for_all(64, splits(kernel_recipes()), |(recipe, split)| {
        Path::kernels().into_iter().try_for_each(|path| check(&recipe, &split, &CPU, path))
    });
}

/// Draws parts with some rows without keys, whose log-sum-exp is -inf and whose outputs are `junk`, and compares the
/// result and its gradients with the ones of outputs of zeros.
fn merge_attention_ignores_outputs_and_gradients_of_empty_rows(device: &Device) -> Result<()> {
    let dtypes =
        if device.is_metal() { vec![DType::F32] } else { vec![DType::F32, DType::F64, DType::BF16, DType::F16] };
    for (seed, junk) in (0..24).flat_map(|seed| [(seed, f64::NAN), (seed, f64::INFINITY), (seed, f64::NEG_INFINITY)]) {
        let random = &mut Random::new(seed);
        let dtype = dtypes[random.up_to(dtypes.len() - 1)];
        let lse_dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let shape = [2, 1 + random.up_to(2), 1 + random.up_to(3), 3];
        let rows = shape[..3].iter().product::<usize>();
        let upstream = Array::new(&shape).uniform(random, 1.0, dtype).tensor(dtype, device)?;
        let mut parts = Vec::new();
        for _ in 0..1 + random.up_to(3) {
            let is_empty: Vec<bool> = (0..rows).map(|_| random.chance(0.4)).collect();
            let output = Array::new(&shape).uniform(random, 1.0, dtype);
            let lse: Vec<f64> = is_empty
                .iter()
                .map(|&is_empty| if is_empty { f64::NEG_INFINITY } else { random.between(-3.0, 3.0) })
                .collect();
            parts.push((is_empty, output, lse));
        }
        let run = |of_empty_rows: f64| -> Result<_> {
            let mut variables = Vec::new();
            for (is_empty, output, lse) in &parts {
                let mut numbers = output.clone();
                for (row, of_row) in numbers.data.chunks_mut(shape[3]).enumerate() {
                    if is_empty[row] {
                        of_row.fill(of_empty_rows);
                    }
                }
                let of_lse = Tensor::new(lse.as_slice(), &CPU)?.to_dtype(lse_dtype)?.to_device(device)?;
                let of_lse = Var::from_tensor(&of_lse.reshape(&shape[..3])?)?;
                variables.push((Var::from_tensor(&numbers.tensor(dtype, device)?)?, of_lse));
            }
            let tensors: Vec<_> = variables.iter().map(|(output, lse)| (output.as_tensor(), lse.as_tensor())).collect();
            let merged = merge_attention(&tensors.iter().map(|&(o, l)| (o.clone(), l.clone())).collect::<Vec<_>>())?;
            let gradients = (&merged.0 * &upstream)?.sum_all()?.backward()?;
            let mut found = vec![values(&merged.0), values(&merged.1)];
            for (output, lse) in tensors {
                for tensor in [output, lse] {
                    found.push(gradients.get(tensor).map(values).unwrap_or_default());
                }
            }
            Ok(found)
        };
        let found = run(junk)?;
        assert_eq!(found, run(0.0)?, "seed {seed}, {junk}, {dtype:?}");
        for (part, (empty_rows, ..)) in parts.iter().enumerate() {
            let of_outputs: Vec<_> = found[2 + 2 * part].chunks(shape[3]).collect();
            let of_lses = &found[3 + 2 * part];
            for row in (0..rows).filter(|&row| empty_rows[row]) {
                let gradients = of_outputs[row].iter().chain(&of_lses[row..=row]);
                assert!(gradients.into_iter().all(|&number| number == 0.0), "row {row}, seed {seed}, {junk}");
            }
        }
    }
    Ok(())
}
