//! Norms under the names of other libraries, of tensors and of variables.

use std::collections::HashMap;

use super::weights;
use crate::*;

fn config(kind: QkNormKind, scope: QkNormScope) -> Config {
    Config::new(12, 4).with_num_kv_heads(2).with_causal(true).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 })
}

/// Renames the norms of a layer. A (H, D) parameter becomes a list if the name has `{}`.
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
fn qk_norm_names_of_other_libraries_give_equal_layers() -> Result<()> {
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
                let renamed = renamed(&own, names)?;
                let what = format!("{kind:?} {scope:?} as {names:?}");
                let layer = MultiHeadAttention::new(&cfg, builder(renamed.clone()))?;
                assert_close(&layer.forward(&xs)?, &expected, 0.0, &what);
                let saved: Tensors = layer.state_dict(WeightLayout::Canonical)?.into_iter().collect();
                let again = MultiHeadAttention::new(&cfg, builder(saved))?;
                assert_close(&again.forward(&xs)?, &expected, 0.0, "saved and loaded");
                // Training changes variables in their own place.
                let vars = VarMap::new();
                for (name, tensor) in &renamed {
                    vars.get(tensor.shape(), name, candle_nn::Init::Const(0.3), DType::F32, &CPU)?;
                }
                let learning = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
                assert!(max_error(&learning.forward(&xs)?, &expected) > 1e-2, "{what}");
                named(&vars).iter().try_for_each(|(name, var)| var.set(&renamed[name]))?;
                let after = learning.forward(&xs)?;
                assert_close(&after, &expected, 1e-5, &what);
                assert_eq!(variables_without_gradient(&after.sqr()?.sum_all()?.backward()?, &vars), [""; 0], "{what}");
            }
        }
    }
    Ok(())
}
