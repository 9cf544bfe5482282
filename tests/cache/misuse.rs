//! What does not fit a cache is an error that says so, and the cache stays as it was.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, MultiHeadAttention,
    MultiHeadAttentionConfig as Config,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::compare::layer;

const CPU: Device = Device::Cpu;

fn config() -> Config {
    Config::new(8, 4).with_num_kv_heads(2).with_causal(true).with_context_length(9)
}

fn xs(b: usize, t: usize) -> Tensor {
    let data: Vec<f32> = (0..b * t * 8).map(|n| (n as f32 * 0.7).sin()).collect();
    Tensor::from_vec(data, (b, t, 8), &CPU).expect("as many numbers")
}

/// A sliding cache under a layer that sees further is found out once there is something that it would miss.
#[test]
fn a_key_that_was_dropped_and_is_seen_is_an_error() -> Result<()> {
    for (cfg, window) in [(config(), 3), (config().with_window(4), 3)] {
        let layer = layer(&cfg, DType::F32, &CPU)?;
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_window(window))?;
        for _ in 0..6 {
            layer.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))?;
        }
        let first = if cfg.window().is_some() { 3 } else { 0 };
        let held = 4;
        assert_eq!(
            error_text(layer.forward_with(AttentionInput::new(&xs(2, 1)).with_cache(&mut cache))),
            format!(
                "[attention_cache] a query of sequence 0 sees the key at position {first}, but the cache holds those from \
                 {held} on; expected a shorter window in the mask, or a longer one in the cache"
            )
        );
        assert_eq!(cache.lens(), [6, 6]);
    }
    Ok(())
}

/// Generation with a model in training: the numbers of plain weights, and no gradient but that of the output
/// projection.
#[test]
fn a_detached_cache_takes_variables() -> Result<()> {
    let vars = VarMap::new();
    let trained = MultiHeadAttention::new(&config(), VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let tensors = vars.data().lock().expect("one thread").clone();
    let plain = tensors.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    let plain = MultiHeadAttention::new(&config(), VarBuilder::from_tensors(plain, DType::F32, &CPU))?;
    let mut detached = AttentionCache::new(&AttentionCacheConfig::new().with_detached(true))?;
    let mut cache = AttentionCache::default();
    for t in [4, 1] {
        let ys = trained.forward_with(AttentionInput::new(&xs(2, t)).with_cache(&mut detached))?;
        let expected = plain.forward_with(AttentionInput::new(&xs(2, t)).with_cache(&mut cache))?;
        assert_close(&ys, &expected, 1e-6, "the numbers of plain weights");
        let gradients = ys.sum_all()?.backward()?;
        let tracked: Vec<_> = tensors.iter().filter(|(_, var)| gradients.get(var).is_some()).collect();
        assert_eq!(tracked.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), ["o_proj.weight"]);
        assert!(values(&ys).iter().any(|&y| y != 0.0));
    }
    Ok(())
}

/// A layer of plain weights but for one variable, its query projection.
fn with_trained_queries(cfg: &Config) -> Result<(MultiHeadAttention, Var)> {
    let mut weights = crate::by_hand::tensors(&crate::by_hand::parameters(cfg, 3), DType::F32, &CPU)?;
    let q_proj = Var::from_tensor(&weights["q_proj.weight"])?;
    weights.insert("q_proj.weight".into(), q_proj.as_tensor().clone());
    Ok((MultiHeadAttention::new(cfg, VarBuilder::from_tensors(weights, DType::F32, &CPU))?, q_proj))
}

/// Gradients that nothing loses stay: of a bias that is added to the scores, and of the query projection.
#[test]
fn gradients_that_pass_no_cached_key_stay() -> Result<()> {
    let (layer, q_proj) = with_trained_queries(&config())?;
    let mut cache = AttentionCache::default();
    layer.forward_with(AttentionInput::new(&xs(2, 3)).with_cache(&mut cache))?;
    let bias = Var::zeros((4, 2, 5), DType::F32, &CPU)?;
    let mask = AttentionMask::none().with_bias(bias.as_tensor());
    let ys = layer.forward_with(AttentionInput::new(&xs(2, 2)).with_mask(&mask).with_cache(&mut cache))?;
    let gradients = ys.sqr()?.sum_all()?.backward()?;
    for var in [&q_proj, &bias] {
        let gradient = gradients.get(var).expect("a gradient");
        assert!(values(gradient).iter().any(|&entry| entry != 0.0));
    }
    Ok(())
}

/// A graph keeps the keys of its own call, whatever is done with the cache before `backward`.
#[test]
fn gradients_are_those_of_the_call_when_its_cache_is_used_again() -> Result<()> {
    type Use = fn(&MultiHeadAttention, &mut AttentionCache) -> Result<()>;
    fn append(layer: &MultiHeadAttention, cache: &mut AttentionCache, t: usize) -> Result<()> {
        layer.forward_with(AttentionInput::new(&(xs(1, t) * -3.0)?).with_cache(cache)).map(drop)
    }
    let uses: [(&str, Use); 3] = [
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
    for kv_heads in [1, 2] {
        let (layer, q_proj) = with_trained_queries(&config().with_num_kv_heads(kv_heads))?;
        let gradient = |again: Option<Use>| -> Result<Tensor> {
            let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(16))?;
            let ys = layer.forward_with(AttentionInput::new(&xs(1, 4)).with_cache(&mut cache))?;
            again.map_or(Ok(()), |again| again(&layer, &mut cache))?;
            Ok(ys.sqr()?.sum_all()?.backward()?.get(&q_proj).expect("a gradient").clone())
        };
        let expected = gradient(None)?;
        for (what, again) in uses {
            assert_close(&gradient(Some(again))?, &expected, 0.0, &format!("{kv_heads} key heads, {what}"));
        }
    }
    Ok(())
}
