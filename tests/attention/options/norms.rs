//! Norms under the names of other libraries, and of variables.

use std::collections::HashMap;

use crate::by_hand::{parameters, tensors};
use crate::*;

fn config(kind: QkNormKind, scope: QkNormScope) -> Config {
    Config::new(12, 4).with_num_kv_heads(2).with_causal(true).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 })
}

fn weights(cfg: &Config) -> Result<Tensors> {
    tensors(&parameters(cfg, 3), DType::F32, &CPU)
}

/// The same with other names of norms; a (H, D) parameter becomes a list where the name says `{}`.
fn renamed(weights: &Tensors, [q, k]: [&str; 2]) -> Result<Tensors> {
    let mut renamed = HashMap::new();
    for (name, tensor) in weights {
        let (module, parameter) = name.split_once('.').expect("a module's parameter");
        let module = match module {
            "q_norm" => q,
            "k_norm" => k,
            other => other,
        };
        if module.contains("{}") {
            for head in 0..tensor.dim(0)? {
                let module = module.replace("{}", &head.to_string());
                renamed.insert(format!("{module}.{parameter}"), tensor.get(head)?);
            }
        } else {
            renamed.insert(format!("{module}.{parameter}"), tensor.clone());
        }
    }
    Ok(renamed)
}

#[test]
fn every_librarys_names_give_the_same_layer() -> Result<()> {
    let xs = random((2, 5, 12))?;
    for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::Layer, QkNormKind::LayerNoBias] {
        for scope in [QkNormScope::PerHead, QkNormScope::PerHeadWeights, QkNormScope::Projection] {
            let cfg = config(kind, scope);
            let own = weights(&cfg)?;
            let expected = MultiHeadAttention::new(&cfg, builder(own.clone()))?.forward(&xs)?;
            let mut spellings = vec![["q_layernorm", "k_layernorm"], ["query_layernorm", "key_layernorm"]];
            if scope == QkNormScope::PerHeadWeights {
                spellings.push(["q_layernorm.norms.{}", "k_layernorm.norms.{}"]);
            }
            for names in spellings {
                let layer = MultiHeadAttention::new(&cfg, builder(renamed(&own, names)?))?;
                assert_close(&layer.forward(&xs)?, &expected, 0.0, &format!("{kind:?} {scope:?} as {names:?}"));
                let saved: Tensors = layer.state_dict(WeightLayout::Canonical)?.into_iter().collect();
                let again = MultiHeadAttention::new(&cfg, builder(saved))?;
                assert_close(&again.forward(&xs)?, &expected, 0.0, "saved and loaded");
            }
        }
    }
    Ok(())
}

/// Training changes variables in their own place.
#[test]
fn a_list_of_variables_is_read_in_every_call() -> Result<()> {
    let cfg = config(QkNormKind::Layer, QkNormScope::PerHeadWeights);
    let own = weights(&cfg)?;
    let list = renamed(&own, ["q_layernorm.norms.{}", "k_layernorm.norms.{}"])?;
    let varmap = VarMap::new();
    for (name, tensor) in &list {
        varmap.get(tensor.shape(), name, candle_nn::Init::Const(0.3), DType::F32, &CPU)?;
    }
    let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&varmap, DType::F32, &CPU))?;
    let xs = random((2, 5, 12))?;
    let before = layer.forward(&xs)?;
    for (name, var) in named(&varmap) {
        var.set(&list[&name])?;
    }
    let after = layer.forward(&xs)?;
    assert!(max_error(&after, &before) > 1e-2);
    assert_close(&after, &MultiHeadAttention::new(&cfg, builder(own))?.forward(&xs)?, 1e-5, "with the new numbers");
    let store = after.sqr()?.sum_all()?.backward()?;
    for (name, var) in named(&varmap) {
        assert!(store.get(&var).is_some(), "{name} has no gradient");
    }
    Ok(())
}
