//! Attention over keys that are made floats some positions at a time. A sink is one more score of the whole: the first part
//! counts it.

use std::ops::Range;

use candle_core::{D, Result, Tensor, bail};

use super::step::Step;
use crate::sdpa::{attend_with_weights_and_lse, shares_of_parts};
use crate::{
    AttentionMask, AttentionOutput, EmptyRows, SdpaOptions, merge_attention, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
};

impl Step<'_> {
    /// Attention over at most `most` positions at a time, of those between the first and the last that a query sees.
    pub(super) fn attend_in_parts(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        most: usize,
    ) -> Result<Tensor> {
        check(mask, options)?;
        let (rows, whole) = self.whole(q, mask)?;
        let (b, _, t_q, _) = q.dims4()?;
        let ranges = whole.resolve(b, t_q, rows.end)?;
        let seen = (0..b * t_q).map(|row| ranges.kv_range(row / t_q, row % t_q)).filter(|seen| !seen.is_empty());
        let seen = seen.reduce(|all, seen| all.start.min(seen.start)..all.end.max(seen.end)).unwrap_or(0..0);

        let first = seen.start..seen.end.min(seen.start.saturating_add(most));
        let (k, v) = self.read(&first)?;
        let of_first = self.place(q, mask, &first)?;
        if first == seen {
            return scaled_dot_product_attention(q, &k, &v, &of_first, options);
        }
        let mut merged = scaled_dot_product_attention_with_lse(q, &k, &v, &of_first, options)?;
        let without_sinks = SdpaOptions { sinks: None, ..options.clone() };
        for rows in cut(first.end..seen.end, most) {
            let (k, v) = self.read(&rows)?;
            let mask = self.place(q, mask, &rows)?;
            let part = scaled_dot_product_attention_with_lse(q, &k, &v, &mask, &without_sinks)?;
            // One at a time, since a context is as large as the queries.
            merged = merge_attention(&[merged, part])?;
        }
        Ok(merged.0)
    }

    /// [`attend_in_parts`](Self::attend_in_parts) over all positions, with the weights of each.
    pub(super) fn attend_in_parts_with_weights(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        most: usize,
    ) -> Result<AttentionOutput> {
        check(mask, options)?;
        let (rows, _) = self.whole(q, mask)?;
        let without_sinks = SdpaOptions { sinks: None, ..options.clone() };
        let (mut contexts, mut weights) = (Vec::new(), Vec::new());
        for rows in cut(rows, most) {
            let (k, v) = self.read(&rows)?;
            let options = if contexts.is_empty() { options } else { &without_sinks };
            let (output, lse) = attend_with_weights_and_lse((q, &k, &v), &self.place(q, mask, &rows)?, options)?;
            contexts.push((output.context, lse));
            weights.push(output.weights);
        }
        if let ([(context, _)], [weights]) = (contexts.as_slice(), weights.as_slice()) {
            return Ok(AttentionOutput { context: context.clone(), weights: weights.clone() });
        }
        let (context, lse) = merge_attention(&contexts)?;
        if lse.elem_count() > 0 {
            let lses: Vec<_> = contexts.iter().map(|(_, lse)| lse).collect();
            let (shares, _) = shares_of_parts(&lses, lse.dtype())?;
            for (part, weights) in weights.iter_mut().enumerate() {
                *weights = weights.broadcast_mul(&shares.narrow(D::Minus1, part, 1)?)?;
            }
        }
        Ok(AttentionOutput { context, weights: Tensor::cat(&weights, 3)? })
    }
}

/// What has no meaning for a part of the keys.
fn check(mask: &AttentionMask, options: &SdpaOptions) -> Result<()> {
    if mask.empty_rows() == EmptyRows::Uniform {
        bail!(
            "[attention_cache] uniform empty rows weigh all keys at once, which a cache of 8 bits does not; expected \
             empty rows of zeros"
        )
    }
    if options.train && options.dropout > 0.0 && options.dropout_seed.is_some() {
        bail!(
            "[attention_cache] a dropout seed draws for all keys at once, which a cache of 8 bits does not; expected \
             dropout without a seed"
        )
    }
    Ok(())
}

/// A range in pieces of at most `most`; one that is empty is one piece.
fn cut(rows: Range<usize>, most: usize) -> Vec<Range<usize>> {
    if rows.is_empty() {
        return vec![rows];
    }
    rows.clone().step_by(most).map(|start| start..rows.end.min(start.saturating_add(most))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Backend;
    use crate::cache::{AttentionCache, AttentionCacheConfig, Tokens, Values, q8};
    use candle_core::{DType, Device};

    const B: usize = 2;
    const H: usize = 4;
    const T: usize = 3;
    const LENS: [usize; B] = [8, 5];

    fn random(shape: (usize, usize, usize, usize)) -> Result<Tensor> {
        Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
    }

    /// Calls with the tokens of each sequence: eight positions of the first, five of the second.
    fn calls() -> [(usize, [usize; B], [usize; B]); 3] {
        [(4, [0, 0], [4, 3]), (1, [0, 1], [1, 1]), (T, [0, 1], [3, 3])]
    }

    fn masks() -> Result<Vec<AttentionMask>> {
        let (none, causal) = (AttentionMask::none, AttentionMask::causal);
        let t_kv = LENS[0];
        let keep = random((B, 1, T, t_kv))?.ge(-0.3f32)?;
        let bias = random((1, H, T, t_kv))?;
        let hidden = (random((B, H, 1, t_kv))?.ge(0.3f32)?.to_dtype(DType::F32)? * -1e30)?;
        Ok(vec![
            none(),
            causal(),
            causal().with_window(2),
            none().with_band(1, 1),
            causal().with_prefix(vec![3, 7]),
            AttentionMask::causal_upper_left(),
            AttentionMask::causal_with_offset(4),
            none().with_starts(vec![3, 0]),
            none().with_valid_lens(vec![2, 4]),
            none().with_valid_lens(vec![vec![0, 1, 8], vec![5, 0, 2]]),
            causal().with_keep(&keep),
            causal().with_bias(&bias).with_starts(vec![1, 1]),
            none().with_bias(&(hidden * 1e30)?),
        ])
    }

    fn options() -> Result<Vec<SdpaOptions>> {
        let by_head = |of: [f32; H]| Tensor::new(&of, &Device::Cpu);
        Ok(vec![
            SdpaOptions::default(),
            SdpaOptions::default().with_softcap(1.5).with_scale(0.7),
            SdpaOptions::default().with_sinks(&by_head([0.0, 1.0, -1.0, 2.0])?),
            SdpaOptions::default().with_alibi_slopes(&by_head([0.5, 0.25, 0.1, 1.0])?),
        ])
    }

    fn assert_close(found: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
        assert_eq!(found.dims(), expected.dims(), "{what}");
        let (found, expected) = (found.flatten_all()?.to_vec1::<f32>()?, expected.flatten_all()?.to_vec1::<f32>()?);
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found - expected).abs() <= 2e-6 * expected.abs().max(1.0), "{what}: {found}, not {expected}");
        }
        Ok(())
    }

    /// Beside a cache of f32 whose keys and values went through 8 bits before, in which attention is one call.
    #[test]
    fn parts_give_the_numbers_of_the_whole() -> Result<()> {
        let growing = AttentionCacheConfig::new().with_capacity(2);
        for (cfg, slides) in [(growing.clone(), false), (growing.with_window(4), true)] {
            let mut small = AttentionCache::new(&cfg.clone().with_q8())?;
            let mut plain = AttentionCache::new(&cfg)?;
            for (n, (t, starts, lens)) in calls().into_iter().enumerate() {
                let (k, v) = (random((B, 2, t, 6))?, random((B, 2, t, 5))?);
                let rounded = |rows: &Tensor| {
                    let (numbers, scales) = q8::encode(rows)?;
                    q8::decode(&numbers, &scales, DType::F32)
                };
                let tokens = Tokens { lens: Some(&lens), starts: Some(&starts) };
                let small_arrivals = small.arrivals((B, t), tokens)?;
                let small_step = small.stage(small_arrivals, &k, Values::Own(&v))?;
                let arrivals = plain.arrivals((B, t), tokens)?;
                let step = plain.stage(arrivals, &rounded(&k)?, Values::Own(&rounded(&v)?))?;
                if n == 2 {
                    compare(&small_step, &step, slides)?;
                }
                small_step.commit();
                step.commit();
            }
            assert_eq!(small.lens(), LENS);
        }
        Ok(())
    }

    fn compare(small: &Step, plain: &Step, slides: bool) -> Result<()> {
        let q = random((B, H, T, 6))?;
        let window = AttentionMask::causal().with_window(3);
        for (n, mask) in masks()?.into_iter().enumerate() {
            let mask = if slides { mask.and(&window) } else { mask };
            for options in options()? {
                let expected = plain.attend_with_weights(&q, &mask, &options)?;
                for most in [1, 2, 3, 7, 8, usize::MAX] {
                    let what = format!("mask {n}, {options:?}, {most} at a time");
                    for backend in [Backend::Auto, Backend::Reference] {
                        let options = options.clone().with_backend(backend);
                        let found = small.attend_in_parts(&q, &mask, &options, most)?;
                        assert_close(&found, &expected.context, &what)?;
                    }
                    let found = small.attend_in_parts_with_weights(&q, &mask, &options, most)?;
                    assert_close(&found.context, &expected.context, &what)?;
                    assert_close(&found.weights, &expected.weights, &what)?;
                }
            }
        }
        Ok(())
    }
}
