//! ONNX's operators by this crate: <https://onnx.ai/onnx/operators/>.

use candle_attention::{
    AttentionMask, Backend, DeltaOptions, RopeConfig, RopeStyle, RotaryEmbedding, SdpaOptions, ValidLens,
    gated_delta_rule, scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::{Answer, Case};

pub fn answer(case: &Case, backend: Backend) -> Result<Answer> {
    match case.group.split_once(' ').map_or("", |(operator, _)| operator) {
        "RotaryEmbedding" => rotary_embedding(case),
        "LinearAttention" => linear_attention(case, backend),
        _ => attention(case, backend),
    }
}

/// Computes `Attention`, and `FlexAttention` where its graphs are a bias or a softcap.
fn attention(case: &Case, backend: Backend) -> Result<Answer> {
    if case.attributes.contains_key("prob_mod") {
        return Ok(Answer::NotExpressible("`prob_mod` changes the weights after the softmax"));
    }
    let [q, mut k, mut v] = [("Q", "q_num_heads"), ("K", "kv_num_heads"), ("V", "kv_num_heads")]
        .map(|(name, heads)| heads_of(case.input(name), case.count(heads)));
    let past = case.find("past_key").zip(case.find("past_value"));
    if let Some((past_k, past_v)) = past {
        k = Ok(Tensor::cat(&[past_k, &k?], 2)?);
        v = Ok(Tensor::cat(&[past_v, &v?], 2)?);
    }
    let q = q?;
    let k = k?;
    let v = v?;
    let (b, _, t_q, _) = q.dims4()?;

    // Query i has the position of key i + offset.
    let offsets: Vec<i64> = match case.find("nonpad_kv_seqlen") {
        Some(lens) => (lens - t_q as f64)?.to_vec1()?,
        None => vec![past.map_or(0, |(past_k, _)| past_k.dims()[2] as i64); b],
    };
    let side = |name| case.number(name).filter(|&size| size >= 0.0).map(|size| size as usize);
    let right = if case.has("is_causal") { Some(0) } else { side("right_window_size") };
    let mut mask = match (right, side("left_window_size")) {
        (None, None) => AttentionMask::none(),
        (None, Some(_)) => return Ok(Answer::NotExpressible("a window that ends on the left alone")),
        // Attending to keys on the right of a query means a position that is further to the right.
        (Some(right), left) => {
            let offsets: Vec<_> = offsets.iter().map(|offset| offset + right as i64).collect();
            let causal = AttentionMask::causal_with_offsets(offsets);
            left.map_or(causal.clone(), |left| causal.with_window(left + right + 1))
        }
    };
    if let Some(lens) = case.find("nonpad_kv_seqlen") {
        mask = mask.with_valid_lens(ValidLens::from_tensor(lens)?);
    }
    if let Some(given) = case.find("attn_mask").or(case.find("score_mod_bias")) {
        mask = match given.dtype() {
            DType::U8 => mask.with_bool_mask(&padded(given, k.dim(2)?, 0.0)?),
            _ => mask.with_bias(&padded(given, k.dim(2)?, f64::NEG_INFINITY)?),
        };
    }
    let mut options = SdpaOptions::default().with_backend(backend);
    if let Some(scale) = case.number("scale") {
        options = options.with_scale(scale);
    }
    let softcap = case.attributes.get("score_mod").map_or(case.number("softcap"), |graph| graph["softcap"].as_f64());
    let capped = match softcap.filter(|&softcap| softcap > 0.0) {
        Some(softcap) => options.clone().with_softcap(softcap),
        None => options.clone(),
    };

    let (context, _) = scaled_dot_product_attention_with_lse(&q, &k, &v, &mask, &capped)?;
    let context = match case.input("Q").rank() {
        3 => context.transpose(1, 2)?.flatten_from(2)?,
        _ => context,
    };
    // Scores as they are after the product, the softcap, and the mask; and the weights.
    let scores = match case.count("qk_matmul_output_mode").unwrap_or(0) {
        0 => scores(&q, &k, &AttentionMask::none(), &options)?,
        1 => scores(&q, &k, &AttentionMask::none(), &capped)?,
        2 => scores(&q, &k, &mask, &capped)?,
        _ => weights(&q, &k, &mask, &capped)?,
    };
    Ok(Answer::Outputs(vec![("Y", context), ("qk_matmul_output", scores)]))
}

/// Returns (B, H, T, D), also of (B, T, H·D).
fn heads_of(xs: &Tensor, heads: Option<usize>) -> Result<Tensor> {
    match (heads, xs.dims()) {
        (Some(h), &[b, t, _]) => xs.reshape((b, t, h, ()))?.transpose(1, 2),
        _ => Ok(xs.clone()),
    }
}

/// Pads a mask for the first keys with `masked` for the others.
fn padded(mask: &Tensor, t_kv: usize, masked: f64) -> Result<Tensor> {
    let mut dims = mask.dims().to_vec();
    let last = dims.len().saturating_sub(1);
    match dims.last_mut() {
        Some(width) if *width > 1 && *width < t_kv => *width = t_kv - *width,
        _ => return Ok(mask.clone()),
    }
    let rest = (Tensor::zeros(dims, DType::F32, &Device::Cpu)? + masked)?.to_dtype(mask.dtype())?;
    Tensor::cat(&[mask, &rest], last)
}

/// Returns the weights of the reference path, since no fused path has weights.
fn weights(q: &Tensor, k: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
    let options = options.clone().with_backend(Backend::Auto);
    Ok(scaled_dot_product_attention_with_weights(q, k, k, mask, &options)?.weights)
}

/// Returns the scores before the softmax: `ln(weights) + log-sum-exp`.
fn scores(q: &Tensor, k: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
    let (_, lse) = scaled_dot_product_attention_with_lse(q, k, k, mask, options)?;
    let weights = weights(q, k, mask, options)?.to_dtype(lse.dtype())?;
    weights.log()?.broadcast_add(&lse.unsqueeze(3)?)?.to_dtype(q.dtype())
}

/// Computes linear attention. The rule follows from the inputs that are given.
fn linear_attention(case: &Case, backend: Backend) -> Result<Answer> {
    let [q, k, v] = [("query", "q_num_heads"), ("key", "kv_num_heads"), ("value", "kv_num_heads")]
        .map(|(name, heads)| heads_of(case.input(name), case.count(heads)));
    let h_s = case.count("kv_num_heads");
    let decay = case.find("decay").map(|decay| match Some(decay.dim(2)?) == h_s {
        true => decay.transpose(1, 2),
        false => heads_of(decay, h_s),
    });
    let decay = decay.transpose()?;
    let beta = case.find("beta").map(|beta| beta.transpose(1, 2)).transpose()?;
    let mut options = DeltaOptions::default().with_backend(backend);
    if let Some(scale) = case.number("scale") {
        options = options.with_scale(scale);
    }
    let q = q?;
    let past = case.find("past_state");
    let (y, state) = gated_delta_rule(&q, &k?, &v?, decay.as_ref(), beta.as_ref(), past, &options)?;
    let y = y.transpose(1, 2)?.flatten_from(2)?;
    let state = state.to_dtype(q.dtype())?;
    Ok(Answer::Outputs(vec![("output", y), ("present_state", state)]))
}

fn rotary_embedding(case: &Case) -> Result<Answer> {
    let xs = heads_of(case.input("X"), case.count("num_heads"))?;
    let (b, _, t, d) = xs.dims4()?;
    let style = if case.has("interleaved") { RopeStyle::Interleaved } else { RopeStyle::RotateHalf };
    let mut config = RopeConfig::new(10_000.0).with_style(style);
    if let Some(r) = case.count("rotary_embedding_dim").filter(|&r| r > 0) {
        config = config.with_rotary_dim(r);
    }
    let [cos, sin] = ["cos_cache", "sin_cache"].map(|name| case.input(name));
    let rotated = match case.find("position_ids") {
        Some(positions) => RotaryEmbedding::from_tables(&config, d, cos, sin)?.apply(&xs, positions)?,
        // A row for each token.
        None => {
            let rows = Tensor::arange(0, (b * t) as i64, &Device::Cpu)?.reshape((b, t))?;
            let [cos, sin] = [cos, sin].map(|table| table.flatten_to(1));
            RotaryEmbedding::from_tables(&config, d, &cos?, &sin?)?.apply(&xs, &rows)?
        }
    };
    let rotated = if case.input("X").rank() == 3 { rotated.transpose(1, 2)?.flatten_from(2)? } else { rotated };
    Ok(Answer::Outputs(vec![("Y", rotated)]))
}
