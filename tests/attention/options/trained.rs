//! Layers over variables.

use crate::layer_kind::{Layer, LayerKind};
use crate::registry::{configs, content, relative};
use crate::*;

/// Checks that after a step, a layer uses the new values of its variables, and a frozen layer the former ones, and that
/// a saved frozen layer loads as an equal layer. Layers are of every kind, with relative positions too.
#[test]
fn layer_parameters_are_trained_frozen_and_saved() -> Result<()> {
    let content = content().into_iter().map(|cfg| ("content", LayerKind::MultiHead(cfg)));
    for (name, kind) in configs().into_iter().chain(relative()).chain(content) {
        let vars = VarMap::new();
        let t = kind.tokens().unwrap_or(17);
        for (path, numbers) in kind.parameters(3) {
            let var = Var::from_tensor(&(numbers.tensor(DType::F32, &CPU)? * 0.6)?)?;
            vars.data().lock().expect("one thread").insert(path, var);
        }
        let held =
            || named(&vars).into_iter().map(|(path, var)| (path, var.as_tensor().copy().expect("memory").detach()));
        let input = kind.input([2, t, t], vec![]);
        let [xs, keys, vs] = [&input.queries, &input.keys, &input.values].map(|x| x.tensor(DType::F32, &CPU));
        let xs = xs?;
        let keys = keys?;
        let vs = vs?;
        let run = |layer: &dyn Layer| {
            let own = AttentionInput::new(&xs);
            layer.run(if kind.is_self(t, t) { own } else { own.with_key_value(&keys, &vs) })
        };
        let near = |ys: Tensor, expected: &Tensor, what: &str| {
            let error = relative_error(&ys, expected);
            assert!(error < 1e-5, "{name}, {what}: off by {error:e}, {kind:?}");
        };
        let learning = kind.layer(VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
        let frozen = learning.frozen()?;
        let before = run(&*learning)?;
        let apart = ["relative_attention_bias", "rel_embeddings", "LayerNorm"];
        let apart: Tensors = held().filter(|(path, _)| apart.iter().any(|part| path.starts_with(part))).collect();
        for var in vars.all_vars() {
            var.set(&(var.as_tensor() * 1.5)?)?;
        }
        let after = run(&*kind.layer(builder(held().collect()))?)?;
        assert!(relative_error(&after, &before) > 1e-2, "{name} is what it was");
        near(run(&*learning)?, &after, "learning");
        near(run(&*frozen)?, &before, "frozen");
        if let Some(layer) = frozen.as_multi_head() {
            let saved = layer.state_dict(WeightLayout::Canonical)?.into_iter().chain(apart).collect();
            assert_eq!(values(&run(&*kind.layer(builder(saved))?)?), values(&run(&*frozen)?), "{name} saved");
        }
    }
    Ok(())
}
