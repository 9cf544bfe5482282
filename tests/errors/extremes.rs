//! Unusual calls that are allowed: sizes of zero, huge numbers, strides of every kind, each builder of weights. They
//! return the results of ordinary calls, or an error; they never panic.

use candle_attention::init::TorchSeed;

use crate::cache::numbers;
use crate::common::assert_close;
use crate::*;

fn attend(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
    scaled_dot_product_attention(q, k, v, mask, options)
}

#[test]
fn additive_attention_with_empty_sizes_returns_empty_tensors_or_zeros() -> Result<()> {
    let causal = AttentionMask::causal().with_window(2);
    let additive = AdditiveAttention::new(&AdditiveAttentionConfig::new(6, 6, 3), any_weights())?;
    for (b, t_q, t_kv, d_v) in [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (2, 0, 0, 5), (0, 0, 0, 0)] {
        let q = numbers((b, t_q, 6));
        let k = numbers((b, t_kv, 6));
        let v = numbers((b, t_kv, d_v));
        let output = additive.forward_with_weights(&q, &k, &v, &causal)?;
        assert_eq!((output.output.dims(), output.weights.dims()), (&[b, t_q, d_v][..], &[b, t_q, t_kv][..]));
    }
    // Weights do not depend on how wide the values are, be it nothing.
    let q = numbers((1, 3, 6));
    let k = numbers((1, 5, 6));
    let output = additive.forward_with_weights(&q, &k, &zeros((1, 5, 0)), &AttentionMask::none())?;
    assert_close(&output.weights, &(Tensor::ones((1, 3, 5), DType::F32, &CPU)? / 5.0)?, 1e-7, "additive weights");
    let scores = masked_softmax(&zeros((2, 3, 0)), Some(&vec![4, 0].into()), FullyMaskedRows::Uniform)?;
    assert_eq!(scores.dims(), [2, 3, 0]);
    Ok(())
}

/// Compares strides that `tests/attention` does not draw.
#[test]
fn strided_slopes_sinks_lengths_and_inputs_match_contiguous_ones() -> Result<()> {
    let q = numbers((2, 4, 3, 6));
    let mask = AttentionMask::causal();
    let wide = numbers((4, 2));
    let with =
        |heads: &Tensor| attend(&q, &q, &q, &mask, &SdpaOptions::default().with_alibi_slopes(heads).with_sinks(heads));
    for heads in [wide.narrow(1, 1, 1)?.squeeze(1)?, wide.flatten_all()?.narrow(0, 3, 4)?] {
        assert_close(&with(&heads)?, &with(&heads.force_contiguous()?)?, 0.0, "slopes and sinks");
    }
    let masked =
        |lens: ValidLens| attend(&q, &q, &q, &AttentionMask::none().with_valid_lens(lens), &SdpaOptions::default());
    let lens = ValidLens::from_tensor(&Tensor::new(&[2i64], &CPU)?.broadcast_as(2)?)?;
    assert_close(&masked(lens)?, &masked(vec![2, 2].into())?, 0.0, "lengths");

    let layer = MultiHeadAttention::new(&Config::new(6, 2), variables())?;
    for xs in [
        numbers((1, 3, 6)).broadcast_as((4, 3, 6))?,
        numbers((4, 3, 6, 2)).narrow(3, 1, 1)?.squeeze(3)?,
        numbers((8, 3, 6)).narrow(0, 4, 4)?,
        numbers((4, 6, 3)).transpose(1, 2)?,
        numbers((6, 3, 4)).transpose(0, 2)?,
    ] {
        let copy = xs.force_contiguous()?;
        assert_close(&layer.forward(&xs)?, &layer.forward(&copy)?, 1e-6, &format!("strides {:?}", xs.stride()));
    }
    Ok(())
}

type Builder = fn() -> VarBuilder<'static>;

const BUILDERS: [(&str, Builder); 3] =
    [("zeros", any_weights), ("variables", variables), ("a seed", || TorchSeed::new(1).var_builder(DType::F32, &CPU))];

/// Checks too that sizes beyond memory are errors.
#[test]
fn every_builder_loads_every_layout_twice_alike() -> Result<()> {
    let most = u32::MAX as usize;
    let xs = numbers((1, 3, 8));
    let wide = Config::new(2, most).with_head_dim(most).with_value_head_dim(most);
    for layout in WeightLayout::all() {
        let cfg = Config::new(8, 2).with_out_proj(!matches!(layout, WeightLayout::StackedHeads(..)));
        for (what, builder) in BUILDERS {
            let vb = builder();
            let load = || MultiHeadAttention::load(&cfg, layout, vb.pp("attn"))?.forward(&xs);
            let first = load()?;
            assert_close(&load()?, &first, 0.0, &format!("{layout} from {what}"));
            for huge in [&Config::new(most, 1).with_num_kv_heads(1), &wide] {
                for either in [huge.clone(), huge.clone().with_out_proj(false)] {
                    assert!(MultiHeadAttention::load(&either, layout, builder()).is_err(), "{layout} from {what}");
                }
            }
        }
    }
    Ok(())
}
