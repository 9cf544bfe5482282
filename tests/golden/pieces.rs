//! Systems without a layer: single steps of attention.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionMask, AttentionOutput, FullyMaskedRows, SdpaOptions, ValidLens, masked_softmax,
    scaled_dot_product_attention, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{D, Device, Result, Tensor};

use crate::common::{Golden, assert_close};
use crate::{TOLERANCE, layers};

/// Reshapes (T, D) to (1, 1, T, D).
fn heads(tensor: &Tensor) -> Result<Tensor> {
    tensor.unsqueeze(0)?.unsqueeze(0)
}

fn attend(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask, scale: Option<f64>) -> Result<AttentionOutput> {
    let options = scale.map_or_else(SdpaOptions::default, |scale| SdpaOptions::default().with_scale(scale));
    scaled_dot_product_attention_with_weights(q, k, v, mask, &options)
}

fn assert_golden(output: &AttentionOutput, golden: &Golden, case: &str) -> Result<()> {
    golden.check(case, "expected_f64", &output.output)?;
    golden.check(case, "attn_weights_f64", &output.weights)
}

#[test]
fn small_examples_match_scores_weights_and_outputs() -> Result<()> {
    let sun = Golden::open("shiny_sun");
    let golden = Golden::open("qkv_2x2");
    let x = heads(sun.get("main", "x"))?;
    let output = attend(&x.narrow(2, 1, 1)?, &x, &x, &AttentionMask::none(), Some(1.0))?;
    assert_golden(&output, &sun, "main")?;
    // The tutorial lists the weighted embeddings component by component.
    sun.check("main", "weighted", &output.weights.t()?.broadcast_mul(&x)?.t()?)?;
    let all = heads(sun.get("all_queries", "x"))?;
    sun.check("all_queries", "expected_f64", &attend(&all, &all, &all, &AttentionMask::none(), Some(1.0))?.output)?;
    let [q, k, v] = ["q", "k", "v"].map(|name| heads(golden.get("main", name)));
    let q = q?;
    let k = k?;
    let v = v?;
    golden.check("main", "scores", &scores(&q, &k, 1.0)?)?;
    golden.check("main", "scaled", &scores(&q, &k, 0.5f64.sqrt())?)?;
    assert_golden(&attend(&q, &k, &v, &AttentionMask::none(), None)?, &golden, "main")
}

/// Returns the scores that attention computes: with a single key, the log-sum-exp is the score.
fn scores(q: &Tensor, k: &Tensor, scale: f64) -> Result<Tensor> {
    let options = SdpaOptions::default().with_scale(scale);
    let columns = (0..k.dim(2)?).map(|j| {
        let key = k.narrow(2, j, 1)?;
        let (_, lse) = scaled_dot_product_attention_with_lse(q, &key, &key, &AttentionMask::none(), &options)?;
        lse.unsqueeze(D::Minus1)
    });
    Tensor::cat(&columns.collect::<Result<Vec<_>>>()?, D::Minus1)
}

#[test]
fn batched_matmul_matches_each_head_alone() -> Result<()> {
    let golden = Golden::open("batched_matmul");
    let a = golden.get("main", "a");
    let all = scores(a, a, 1.0)?;
    golden.check("main", "expected_f64", &all)?;
    for head in 0..a.dim(1)? {
        let one = a.narrow(1, head, 1)?;
        assert_close(&scores(&one, &one, 1.0)?, &all.narrow(1, head, 1)?, 0.0, "one head");
    }
    Ok(())
}

/// Checks the triangle that the tutorial intended, both as a bias and as the causal mask; `0 · -inf` never occurs.
#[test]
fn causal_mask_matches_additive_mask() -> Result<()> {
    let golden = Golden::open("additive_mask");
    let scores = golden.get("main", "scores");
    let meant = golden.get("main", "mask_meant");
    let t = scores.dim(1)?;
    let additive = AttentionMask::causal().to_additive((1, 1, t, t), scores.dtype(), scores.device())?;
    assert_close(&additive.squeeze(0)?.squeeze(0)?, meant, 0.0, "the triangle");
    // Queries are the rows of the identity and keys the columns of the scores, so the products are the scores.
    let q = heads(&Tensor::eye(t, scores.dtype(), scores.device())?)?;
    let k = heads(&scores.squeeze(0)?.t()?)?;
    for mask in [AttentionMask::causal(), AttentionMask::none().with_bias(meant)] {
        golden.check("main", "expected_f64", &attend(&q, &k, &q, &mask, Some(1.0))?.weights)?;
    }
    Ok(())
}

#[test]
fn d2l_masked_softmax_matches_pytorch() -> Result<()> {
    let golden = Golden::open("d2l_masked_softmax");
    let scores = golden.top("scores");
    for case in golden.cases() {
        let lens = golden.find(&case, "valid_lens").map(ValidLens::from_tensor).transpose()?;
        let weights = masked_softmax(scores, lens.as_ref(), FullyMaskedRows::Uniform)?;
        golden.check(&case, "expected_f64", &weights)?;
        let zeros = masked_softmax(scores, lens.as_ref(), FullyMaskedRows::Zero)?;
        if case.starts_with("zero") {
            let smallest = zeros.sum(D::Minus1)?.flatten_all()?.min(0)?.to_scalar::<f32>()?;
            assert_eq!(smallest, 0.0, "{case}: a row of length 0 is zeros");
        } else {
            assert_close(&zeros, &weights, 0.0, &case);
        }
    }
    Ok(())
}

#[test]
fn d2l_dot_product_matches_pytorch() -> Result<()> {
    let golden = Golden::open("d2l_dot_product");
    for case in golden.cases() {
        let [q, k, v] = ["queries", "keys", "values"].map(|name| golden.get(&case, name).unsqueeze(1));
        let mask = layers::mask(&golden, &case, &Device::Cpu)?;
        assert_golden(&attend(&q?, &k?, &v?, &mask, None)?, &golden, &case)?;
    }
    Ok(())
}

/// Checks that heads, which d2l folds into the batch, are a dimension here, in the same order.
#[test]
fn d2l_transpose_qkv_matches_heads_dimension() -> Result<()> {
    let golden = Golden::open("d2l_transpose_qkv");
    let x = golden.get("main", "x");
    let (b, t, width) = x.dims3()?;
    let split = x.reshape((b, t, 3, width / 3))?.transpose(1, 2)?;
    assert_close(&split.flatten(0, 1)?, golden.get("main", "output"), 0.0, "split");
    // With a single key, the output is its value, so attention shows how the layer orders heads.
    let value = split.narrow(2, 0, 1)?;
    let none = AttentionMask::none();
    let context = scaled_dot_product_attention(&split, &value, &value, &none, &SdpaOptions::default())?;
    let merged = context.transpose(1, 2)?.reshape((b, t, width))?;
    assert_close(&merged, &x.narrow(1, 0, 1)?.broadcast_as((b, t, width))?, TOLERANCE, "merged");
    Ok(())
}

#[test]
fn dropout_mask_matches_pytorch() -> Result<()> {
    let golden = Golden::open("dropout");
    for (case, seed, p) in [("ones", 123, 0.5), ("tenth", 7, 0.1)] {
        let x = golden.get(case, "x");
        let expected = golden.get(case, "output");
        let keep = TorchSeed::new(seed).dropout_keep(x.shape(), p)?;
        assert_close(&keep, golden.get(case, "keep"), 0.0, case);
        assert_close(&(x.mul(&keep.to_dtype(x.dtype())?)? / (1.0 - p))?, expected, 1e-7, case);
    }
    Ok(())
}
