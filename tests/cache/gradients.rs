//! Gradients that pass no cached key stay; those that would are an error, or are left out on request.

use std::collections::BTreeMap;

use crate::*;

fn config() -> Config {
    Config::new(8, 4).with_num_kv_heads(2).with_causal(true).with_context_length(9)
}

fn trained(cfg: &Config) -> Result<(VarMap, MultiHeadAttention)> {
    let vars = VarMap::new();
    let layer = MultiHeadAttention::new(cfg, VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
    Ok((vars, layer))
}

/// Checks that the next call, of a prompt or of a token, uses the new value of a variable. With a detached cache,
/// generation with a model in training runs on the fused kernel, and the projections of cached keys get no gradients.
#[test]
fn cache_call_reads_variables_every_time() -> Result<()> {
    if skips_device("the fused kernel computes on the CPU") {
        return Ok(());
    }
    let latent = LatentConfig::new(8, 2).with_q_lora_rank(4).with_kv_lora_rank(6).with_rope_head_dim(2).with_bias(true);
    let of_latents = ["kv_b_proj.weight", "o_proj.weight"];
    for (kind, expected) in
        [(LayerKind::MultiHead(config()), &of_latents[1..]), (LayerKind::Latent(latent), &of_latents)]
    {
        let vars = VarMap::new();
        let xs = wave(1, 4, 8, 0.0)?;
        let layer = kind.layer(VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
        let named = BTreeMap::from_iter(vars.data().lock().expect("one thread").clone());
        for (n, var) in named.values().enumerate() {
            var.set(&(wave(1, 1, var.elem_count(), n as f32)?.reshape(var.shape())? * 0.5)?)?;
        }
        let mut before = layer.run(AttentionInput::new(&xs))?;
        for changed in named.values() {
            changed.set(&changed.affine(1.5, 0.1)?)?;
            let after = layer.run(AttentionInput::new(&xs))?;
            assert!(max_error(&after, &before) > 1e-4, "{kind:?}");
            for (pieces, backend) in
                [(&[4][..], Backend::Auto), (&[1; 4], Backend::Fused), (&[2, 1, 1], Backend::Fused)]
            {
                let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_detached(true))?;
                let mut at = 0;
                let decoded = pieces.iter().map(|&t| {
                    let xs = part(&xs, at, t)?;
                    at += t;
                    layer.run(AttentionInput::new(&xs).with_backend(backend).with_cache(&mut cache))
                });
                let decoded = Tensor::cat(&decoded.collect::<Result<Vec<_>>>()?, 1)?;
                assert_close(&decoded, &after, 1e-5, &format!("{kind:?}"));
                let gradients = decoded.sum_all()?.backward()?;
                let tracked = named.iter().filter(|(_, var)| gradients.get(var).is_some()).map(|(name, _)| name);
                assert_eq!(Vec::from_iter(tracked.filter(|name| !name.ends_with("bias"))), expected);
            }
            before = after;
        }
    }
    Ok(())
}

/// Builds a layer of plain weights and one variable, its query projection.
fn with_trained_queries(cfg: &Config) -> Result<(MultiHeadAttention, Var)> {
    let mut weights = crate::by_hand::tensors(&crate::by_hand::parameters(cfg, 3), DType::F32, &DEVICE)?;
    let q_proj = Var::from_tensor(&weights["q_proj.weight"])?;
    weights.insert("q_proj.weight".into(), q_proj.as_tensor().clone());
    Ok((MultiHeadAttention::new(cfg, VarBuilder::from_tensors(weights, DType::F32, &DEVICE))?, q_proj))
}

/// Checks gradients that pass no cached key.
#[test]
fn cache_call_keeps_gradients_of_queries_and_bias() -> Result<()> {
    let (layer, q_proj) = with_trained_queries(&config())?;
    let mut cache = AttentionCache::default();
    in_calls(&layer, &mut cache, &wave(2, 3, 8, 0.0)?, &[3])?;
    let bias = Var::zeros((4, 2, 5), DType::F32, &DEVICE)?;
    let mask = AttentionMask::none().with_bias(bias.as_tensor());
    let xs = wave(2, 2, 8, 0.0)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_mask(&mask).with_cache(&mut cache))?;
    let gradients = ys.sqr()?.sum_all()?.backward()?;
    for var in [&q_proj, &bias] {
        assert!(values(gradients.get(var).expect("a gradient")).iter().any(|&entry| entry != 0.0));
    }
    Ok(())
}

type Use = fn(&MultiHeadAttention, &mut AttentionCache) -> Result<()>;

/// Uses of a cache before `backward`.
const USES: [(&str, Use); 3] = [
    ("reset", |layer, cache| {
        cache.reset();
        append(layer, cache, 4)
    }),
    ("truncated", |layer, cache| {
        cache.truncate(1)?;
        append(layer, cache, 3)
    }),
    ("appended to", |layer, cache| append(layer, cache, 3)),
];

fn append(layer: &MultiHeadAttention, cache: &mut AttentionCache, t: usize) -> Result<()> {
    in_calls(layer, cache, &wave(1, t, 8, 7.0)?, &[t]).map(drop)
}

/// Checks that a graph keeps the keys of its call, or the keys of an earlier layer.
#[test]
fn cache_call_gradients_do_not_change_when_cache_is_used_again() -> Result<()> {
    for kv_heads in [1, 2] {
        let cfg = config().with_num_kv_heads(kv_heads);
        let (own, q_proj) = with_trained_queries(&cfg)?;
        let earlier = layer(&cfg)?;
        let cfg = cfg.with_kv_sharing(KvSharing::EarlierLayer);
        let (later_vars, later) = trained(&cfg)?;
        let frozen = layer(&cfg)?;
        let bias = Var::zeros((4, 4, 4), DType::F32, &DEVICE)?;
        let mask = AttentionMask::none().with_bias(bias.as_tensor());
        let xs = wave(1, 4, 8, 0.0)?;
        let gradients = |again: Option<Use>| -> Result<Vec<Tensor>> {
            let mut own_cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(16))?;
            let own_ys = in_calls(&own, &mut own_cache, &xs, &[4])?;
            again.map_or(Ok(()), |again| again(&own, &mut own_cache))?;
            let of_own = own_ys.sqr()?.sum_all()?.backward()?.get(&q_proj).expect("a gradient").clone();
            let mut cache = AttentionCache::default();
            in_calls(&earlier, &mut cache, &xs, &[4])?;
            let ys = later.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))?;
            let masked = AttentionInput::new(&xs).with_mask(&mask).with_shared_cache(&cache);
            let ys_of_mask = frozen.forward_with(masked)?.sqr()?.sum_all()?;
            again.map_or(Ok(()), |again| again(&earlier, &mut cache))?;
            let of_later = ys.sqr()?.sum_all()?.backward()?;
            let of_later = later_vars.all_vars().into_iter().map(|var| of_later.get(&var).expect("one").clone());
            let of_bias = ys_of_mask.backward()?.get(&bias).expect("a gradient").clone();
            Ok([of_own, of_bias].into_iter().chain(of_later).collect())
        };
        let untouched = gradients(None)?;
        for (what, again) in USES {
            for (found, expected) in gradients(Some(again))?.iter().zip(&untouched) {
                assert_close(found, expected, 0.0, &format!("{kv_heads} key heads, {what}"));
            }
        }
    }
    Ok(())
}
