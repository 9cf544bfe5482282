//! Packed sequences against each sequence by itself.

use candle_attention::{
    scaled_dot_product_attention_varlen as varlen, scaled_dot_product_attention_varlen_with_lse as varlen_with_lse,
    scaled_dot_product_attention_with_lse as with_lse,
};

use crate::*;

crate::on_each_device!(
    masks_and_options_hold_for_each_sequence_by_itself,
    any_strides_are_read,
    a_fused_kernel_that_is_not_there_is_an_error,
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
    let structural: Vec<_> = Kind::all().into_iter().filter(|kind| !kind.is_tensor()).collect();
    let kinds = proptest::collection::vec(select(structural), 0..=2);
    let lens = proptest::collection::vec((0..=5usize, 0..=6usize), 0..=7);
    let options = ((0..Chosen::SETS).prop_map(Chosen::set), proptest::bool::weighted(0.2), any::<u64>().no_shrink());
    (lens, proptest::collection::vec(kinds, 0..=2), select(dtypes), options).prop_map(
        |(lens, masks, dtype, (chosen, uniform_empty_rows, seed))| {
            let [t_q, t_kv] = [|lens: &(usize, usize)| lens.0, |lens: &(usize, usize)| lens.1]
                .map(|side| lens.iter().map(side).max().unwrap_or(0));
            let dims = Dims { b: lens.len(), h: H, h_kv: H_KV, t_q, t_kv, d: D, d_v: D_V };
            // Joined masks may count from positions that differ in one of the sequences, which leaves ALiBi none.
            let chosen = Chosen { alibi: chosen.alibi && masks.len() < 2 && masks.concat().len() < 2, ..chosen };
            Packed { lens, recipe: Recipe { chosen, uniform_empty_rows, seed, ..Recipe::plain(dims, masks, dtype) } }
        },
    )
}

impl Packed {
    fn sequences(&self) -> Result<PackedSequences> {
        let (lens_q, lens_kv): (Vec<_>, Vec<_>) = self.lens.iter().copied().unzip();
        PackedSequences::from_lens(&lens_q, &lens_kv)
    }

    /// Of all sequences or of one.
    fn mask(&self, masks: &[Mask], of: Option<usize>) -> Result<AttentionMask> {
        let mut masks: Vec<_> = masks.iter().map(|mask| of.map_or(mask.clone(), |s| mask.of_sequence(s))).collect();
        for part in masks.iter_mut().flat_map(|mask| &mut mask.parts) {
            if let Part::ValidLens(Lens::PerQuery(rows))
            | Part::Starts(Lens::PerQuery(rows))
            | Part::Prefix(Lens::PerQuery(rows)) = part
            {
                let lens = &self.lens[of.unwrap_or(0)..];
                rows.iter_mut().zip(lens).for_each(|(row, (t_q, _))| row.truncate(*t_q));
            }
        }
        let mask = attention_mask(&masks, &Device::Cpu, |_, _, _| unreachable!("packed sequences have no bias"))?;
        let uniform = self.recipe.uniform_empty_rows;
        Ok(mask.with_empty_rows(if uniform { EmptyRows::Uniform } else { EmptyRows::Zero }))
    }

    /// Of biases (H, T_q + T_kv - 1) for the longest queries and keys, those of one sequence.
    fn distances_of(&self, biases: &Tensor, s: usize) -> Result<Tensor> {
        let (t_q, t_kv) = self.lens[s];
        biases.narrow(1, self.recipe.dims.t_q - t_q, t_q + t_kv - 1)
    }

    /// The reference path: contexts and log-sum-exps to the bit, and gradients of everything in the widest dtype. And
    /// the kernel's contexts.
    fn check(&self, device: &Device) -> Result<()> {
        let (dtype, sequences, mut case) = (self.recipe.dtype, self.sequences()?, self.recipe.case());
        // All sequences have one table of biases by distance, and where there are none, no table is for them.
        let biases = case.options.distance_bias.take().filter(|_| !sequences.is_empty());
        case.options.distance_bias = biases.map(|biases| biases.of_sequence(0));
        let (total_q, total_kv) = (sequences.total_queries(), sequences.total_keys());
        let (mut vars, is_poisoned) = (Vec::new(), self.recipe.seed.is_multiple_of(5));
        for shape in [(total_q, H, D), (total_kv, H_KV, D), (total_kv, H_KV, D_V)] {
            let drawn = Tensor::randn(0f32, 1., shape, device)?.to_dtype(dtype)?;
            // What is no number in the last row reaches no other sequence.
            let last = shape.0.saturating_sub(usize::from(is_poisoned));
            let poison = (drawn.narrow(0, last, shape.0 - last)? * f64::NAN)?;
            vars.push(Var::from_tensor(&Tensor::cat(&[drawn.narrow(0, 0, last)?, poison], 0)?)?);
        }
        let mut distances = None;
        let options = Call::with_leaves(&case, dtype, device, &mut |name, leaf| {
            let var = Var::from_tensor(&leaf)?;
            vars.push(var.clone());
            if name == "distances" {
                distances = Some(var.narrow(0, 0, 1)?.squeeze(2)?.squeeze(0)?);
            }
            Ok(var.into_inner())
        })?;
        // Sequences have no mask of dropout in common but that of everything.
        let drops = self.recipe.seed.is_multiple_of(8);
        let options = if drops { options.options.with_dropout(1.0, true) } else { options.options };
        let [q, k, v] = [0, 1, 2].map(|n| vars[n].as_tensor());
        let mask = self.mask(&case.masks, None)?;
        let (context, lse) = varlen_with_lse(q, k, v, &sequences, &mask, &options)?;
        assert_eq!((context.dims(), lse.dims()), (&[total_q, H, D_V][..], &[H, total_q][..]));
        assert!(context.is_contiguous() && lse.is_contiguous() && context.dtype() == dtype);
        let (mut contexts, mut lses) = (vec![context.narrow(0, 0, 0)?], vec![lse.narrow(1, 0, 0)?]);
        for s in (0..sequences.len()).filter(|&s| !sequences.queries(s).is_empty()) {
            let own = |tensor: &Tensor, range: std::ops::Range<usize>| {
                tensor.narrow(0, range.start, range.len())?.transpose(0, 1)?.unsqueeze(0)
            };
            let (q, k, v) = (own(q, sequences.queries(s))?, own(k, sequences.keys(s))?, own(v, sequences.keys(s))?);
            let options = match &distances {
                Some(biases) => options.clone().with_distance_bias(&self.distances_of(biases, s)?),
                None => options.clone(),
            };
            let (context, lse) = with_lse(&q, &k, &v, &self.mask(&case.masks, Some(s))?, &options)?;
            contexts.push(context.squeeze(0)?.transpose(0, 1)?);
            lses.push(lse.squeeze(0)?);
        }
        let (expected, expected_lse) = (Tensor::cat(&contexts, 0)?, Tensor::cat(&lses, 1)?);
        let alone = varlen(q, k, v, &sequences, &mask, &options)?;
        if bits(&context) != bits(&expected) || bits(&alone) != bits(&expected) || bits(&lse) != bits(&expected_lse) {
            bail!("other bits than each sequence by itself");
        }
        if device.is_cpu() && dtype == DType::F32 && !self.recipe.uniform_empty_rows {
            let fused = varlen(q, k, v, &sequences, &mask, &options.with_backend(Backend::Fused))?;
            let error = max_error(&fused, &context);
            if error > 1e-4 {
                bail!("the kernel is off by {error:e}");
            }
        }
        if dtype != dtypes(device)[0] || total_q == 0 || is_poisoned {
            return Ok(());
        }
        let factors = Tensor::randn(0f32, 1., (total_q, H, D_V), device)?.to_dtype(dtype)?;
        let [got, expected] = [context, expected].map(|context| (context * &factors)?.sum_all()?.backward());
        let (got, expected, tolerance) = (got?, expected?, if dtype == DType::F64 { 1e-12 } else { 1e-4 });
        for (n, var) in vars.iter().enumerate() {
            // No entry is a gradient of zero.
            let [got, expected] =
                [&got, &expected].map(|store| store.get(var).map_or_else(|| var.zeros_like(), |x| Ok(x.clone())));
            let error = max_error(&got?, &expected?);
            if error > tolerance {
                bail!("the gradient of leaf {n} is off by {error:e}");
            }
        }
        Ok(())
    }
}

fn masks_and_options_hold_for_each_sequence_by_itself(device: &Device) {
    for_all(400, packed(dtypes(device)), |packed| packed.check(device));
}

/// Every query sees every key of its sequence.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, sequences: &PackedSequences) -> Result<Tensor> {
    varlen(q, k, v, sequences, &AttentionMask::none(), &SdpaOptions::default())
}

/// Columns of one product, and heads before positions.
fn any_strides_are_read(device: &Device) -> Result<()> {
    let sequences = PackedSequences::from_lens(&[2, 4, 1], &[2, 4, 1])?;
    let product = Tensor::randn(0f32, 1., (7, H + 2 * H_KV, D), device)?;
    let (q, k) = (product.narrow(1, 0, H)?, product.narrow(1, H, H_KV)?);
    let v = Tensor::randn(0f32, 1., (H_KV, 7, D_V), device)?.transpose(0, 1)?;
    let expected = plain(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, &sequences)?;
    // Products of sums of three, which another layout may take in another order.
    assert_close(&plain(&q, &k, &v, &sequences)?, &expected, 1e-5, "strides");
    Ok(())
}

/// f64 has the reference path only, and Metal has no f64.
fn a_fused_kernel_that_is_not_there_is_an_error(device: &Device) -> Result<()> {
    if !device.is_metal() {
        let (sequences, qkv) = (PackedSequences::from_lens(&[2], &[2])?, Tensor::zeros((2, 1, D), DType::F64, device)?);
        let options = SdpaOptions::default().with_backend(Backend::Fused);
        let error = error_text(varlen(&qkv, &qkv, &qkv, &sequences, &AttentionMask::none(), &options));
        assert!(error.starts_with("[scaled_dot_product_attention_varlen] no fused path: "), "{error}");
        assert!(error.contains("F64"), "{error}");
    }
    Ok(())
}
