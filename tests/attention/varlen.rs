//! Packed sequences against each sequence by itself.

use candle_attention::{
    scaled_dot_product_attention_varlen as varlen, scaled_dot_product_attention_varlen_with_lse as varlen_with_lse,
};

use crate::*;

crate::on_each_device!(
    packed_sequences_with_random_masks_match_separate_calls,
    packed_sequences_of_any_strides_match_contiguous_ones,
);

const H: usize = 4;
const H_KV: usize = 2;
const D: usize = 3;
const D_V: usize = 5;

/// Queries and keys of each sequence, with empty ones of either kind and of both; masks of all of them.
#[derive(Debug, Clone)]
struct Packed {
    lens: Vec<(usize, usize)>,
    recipe: Recipe,
}

fn packed(dtypes: &'static [DType]) -> impl Strategy<Value = Packed> {
    let lens = proptest::collection::vec((0..=5usize, 0..=6usize), 0..=7);
    (lens, recipes(dtypes)).prop_map(|(lens, mut recipe)| {
        let longest = |side: fn(&(usize, usize)) -> usize| lens.iter().map(side).max().unwrap_or(0);
        let t_q = longest(|pair| pair.0);
        let t_kv = longest(|pair| pair.1);
        recipe.dims = Dims { b: lens.len(), h: H, h_kv: H_KV, t_q, t_kv, d: D, d_v: D_V };
        // As packed sequences lie, since products take sums in another order where strides are others.
        recipe.layouts = [Layout::HeadsTransposed; 3];
        recipe.masks.iter_mut().for_each(|kinds| kinds.retain(|kind| !kind.is_tensor()));
        // Joined masks may define different positions in one of the sequences, so that ALiBi is an error.
        recipe.chosen.alibi &= recipe.masks.len() < 2 && recipe.masks.concat().len() < 2;
        Packed { lens, recipe }
    })
}

impl Packed {
    /// Returns the padded call, with the masks of the rows that each sequence has.
    fn case(&self) -> Case {
        let mut case = self.recipe.case();
        let sequences = self.lens.len();
        for part in case.masks.iter_mut().flat_map(|mask| &mut mask.parts) {
            if let Part::ValidLens(Lens::PerQuery(rows))
            | Part::Starts(Lens::PerQuery(rows))
            | Part::Prefix(Lens::PerQuery(rows)) = part
            {
                rows.iter_mut().zip(&self.lens).for_each(|(row, (t_q, _))| row.truncate(*t_q));
            }
        }
        // All sequences have one table of biases by distance, and where there are none, no table is for them.
        let biases = case.options.relative_bias.take().filter(|_| sequences > 0);
        case.options.relative_bias = biases.map(|biases| biases.of_sequence(0));
        // What is no number in a last row reaches no other sequence.
        let (t_q, t_kv) = self.lens.last().filter(|_| self.is_poisoned()).copied().unwrap_or_default();
        for (array, t) in [(&mut case.q, t_q), (&mut case.k, t_kv), (&mut case.v, t_kv)].into_iter().filter(|x| x.1 > 0)
        {
            let last = array.place([sequences - 1, array.dim(1) - 1, t - 1, 0]);
            array.data[last] = f64::NAN;
        }
        case
    }

    /// Returns whether all weights are dropped, which is the only dropout mask that sequences share.
    fn drops(&self) -> bool {
        self.recipe.seed.is_multiple_of(8)
    }

    fn is_poisoned(&self) -> bool {
        self.recipe.seed.is_multiple_of(5)
    }

    /// Returns the call of one sequence.
    fn alone(&self, case: &Case, s: usize) -> Case {
        let (t_q, t_kv) = self.lens[s];
        let mut own = case.of_sequence(s);
        let first = |len| View::Narrow { dim: 2, start: 0, len };
        own.q = own.q.view(first(t_q));
        own.k = own.k.view(first(t_kv));
        own.v = own.v.view(first(t_kv));
        // Of the biases for the longest queries and keys.
        let distances = View::Narrow { dim: 3, start: own.dims.t_q - t_q, len: t_q + t_kv - 1 };
        own.options.relative_bias = own.options.relative_bias.map(|biases| biases.view(distances));
        own.dims = Dims { t_q, t_kv, ..own.dims };
        own
    }

    /// Compares results of the reference path bit for bit, gradients of all inputs in the widest dtype approximately,
    /// and the kernel's results.
    fn check(&self, device: &Device) -> Result<()> {
        let dtype = self.recipe.dtype;
        let has_queries = self.lens.iter().any(|(t_q, _)| *t_q > 0);
        let is_tracked = dtype == dtypes(device)[0] && has_queries && !self.is_poisoned();
        let run = |backend, is_packed| backward(self, &(device.clone(), backend, is_packed), |_| is_tracked);
        let packed = run(Backend::Reference, true)?;
        let tolerance = if dtype == DType::F64 { 1e-12 } else { 1e-4 };
        let most = |name: &str, largest: f64| tolerance * if is_result(name) { 0.0 } else { largest.max(1.0) };
        are_near(&packed, &run(Backend::Reference, false)?, most)?;
        let is_cpu = device.is_cpu();
        let is_uniform = self.recipe.uniform_fully_masked_rows;
        match (run(Backend::Fused, true), dtype) {
            (Err(error), DType::F64) if !is_cpu || is_uniform || error.to_string().contains("F64") => Ok(()),
            (fused, DType::F64) => bail!("no kernel computes in f64: {fused:?}"),
            (fused, DType::F32) if is_cpu && !is_uniform => {
                are_near(&fused?, &packed, |_, _| 1e-4).map_err(|error| error.context("the kernel"))
            }
            _ => Ok(()),
        }
    }
}

impl Operation for Packed {
    /// Packed, or one sequence after the other.
    type Way = (Device, Backend, bool);

    fn run(&self, (device, backend, is_packed): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let dtype = self.recipe.dtype;
        let case = self.case();
        let mut leaves = Named::new();
        let mut call = |of: &Case| -> Result<Call> {
            let call = Call::with_leaves(of, dtype, device, &mut |name, tensor| match leaves.get(name) {
                Some(known) => Ok(known.clone()),
                None => leaf(name, tensor).inspect(|leaf| drop(leaves.insert(name.to_string(), leaf.clone()))),
            })?;
            Ok(call.on(*backend).with(|options| options.with_dropout(1.0, self.drops())))
        };
        if !is_packed {
            let mut contexts = vec![Tensor::zeros((0, H, D_V), dtype, device)?];
            let mut lses = vec![Tensor::zeros((H, 0), wide(dtype), device)?];
            for s in (0..self.lens.len()).filter(|s| self.lens[*s].0 > 0) {
                let (context, lse) = call(&self.alone(&case, s))?.with_lse()?;
                contexts.push(context.squeeze(0)?.transpose(0, 1)?);
                lses.push(lse.squeeze(0)?);
            }
            return Ok(vec![Tensor::cat(&contexts, 0)?, Tensor::cat(&lses, 1)?]);
        }
        let Call { q, k, v, mask, options } = call(&case)?;
        let pack = |xs: &Tensor, t: fn(&(usize, usize)) -> usize| -> Result<Tensor> {
            let own = |(s, lens)| xs.i(s)?.narrow(1, 0, t(lens))?.transpose(0, 1);
            let none = Tensor::zeros((0, xs.dim(1)?, xs.dim(3)?), dtype, device);
            let all = std::iter::once(none).chain(self.lens.iter().enumerate().map(own));
            Tensor::cat(&all.collect::<Result<Vec<_>>>()?, 0)
        };
        let q = pack(&q, |lens| lens.0)?;
        let k = pack(&k, |lens| lens.1)?;
        let v = pack(&v, |lens| lens.1)?;
        let (lens_q, lens_kv): (Vec<_>, Vec<_>) = self.lens.iter().copied().unzip();
        let sequences = PackedSequences::from_lens(&lens_q, &lens_kv)?;
        let (context, lse) = varlen_with_lse(&q, &k, &v, &sequences, &mask, &options)?;
        assert!(context.is_contiguous() && lse.is_contiguous() && context.dtype() == dtype);
        assert_eq!(bits(&varlen(&q, &k, &v, &sequences, &mask, &options)?), bits(&context));
        Ok(vec![context, lse])
    }
}

fn packed_sequences_with_random_masks_match_separate_calls(device: &Device) {
    for_all(400, packed(dtypes(device)), |packed| packed.check(device));
}

/// Compares columns of one product, and tensors whose heads come before positions.
fn packed_sequences_of_any_strides_match_contiguous_ones(device: &Device) -> Result<()> {
    let sequences = PackedSequences::from_lens(&[2, 4, 1], &[2, 4, 1])?;
    let product = Tensor::randn(0f32, 1., (7, H + 2 * H_KV, D), device)?;
    let q = product.narrow(1, 0, H)?;
    let k = product.narrow(1, H, H_KV)?;
    let v = Tensor::randn(0f32, 1., (H_KV, 7, D_V), device)?.transpose(0, 1)?;
    let mask = AttentionMask::none();
    let options = SdpaOptions::default();
    let expected = varlen(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, &sequences, &mask, &options)?;
    // Products of sums of three, which another layout may take in another order.
    assert_close(&varlen(&q, &k, &v, &sequences, &mask, &options)?, &expected, 1e-5, "strides");
    Ok(())
}
