//! Modules in the places of projections that do not fit a layer.

use candle_core::Module;
use candle_nn::Linear;

use crate::words::{Fields, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("modules", modules)];

/// Builds a layer of modules with these numbers of outputs, of which one may be changed.
fn modules(_: &str, call: &Fields) -> Result<String> {
    let linear = |out: usize| Linear::new(zeros((out, 8)), None);
    let module = |name: &str| Ok::<_, Error>(linear(call.need(name)?));
    let modules = ProjectionModules::new(module("query")?, module("key")?, module("value")?);
    let modules = with(modules, call.get("gate")?, |modules, out| modules.with_gate(linear(out)));
    let modules = with(modules, call.get("output")?, |modules, out| modules.with_output(linear(out)));
    let modules = match call.is("output_in_f64") {
        true => modules.with_output(|xs: &Tensor| xs.to_dtype(DType::F64)),
        false => modules,
    };
    let layer = MultiHeadAttention::from_modules(&call.need("config")?, modules, call.builder("zeros")?)?;
    let layer = match call.get::<String>("change")?.as_deref() {
        None => layer,
        Some("gate") => layer.map_projection(Projection::Gate, Ok)?,
        Some("output") => layer.map_projection(Projection::Output, Ok)?,
        _ => layer.map_projection(Projection::Key, |_| Err(Error::msg("no adapter")))?,
    };
    layer.forward(&zeros((1, 3, 8))).map(accepted)
}

/// Checks that the error of a cache names a module of the caller that has variables, since `freeze` keeps them, and
/// that it asks for `freeze` and a detached input where these are missing.
#[test]
fn cache_of_frozen_layer_names_module_with_variables() -> Result<()> {
    let run = |layer: &MultiHeadAttention, xs: &Tensor, config: &AttentionCacheConfig| -> Result<String> {
        let mut cache = AttentionCache::new(config)?;
        let outcome = layer.forward_with(AttentionInput::new(xs).with_cache(&mut cache));
        Ok(outcome.err().map(|error| error.to_string()).unwrap_or_default())
    };
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    let layer = MultiHeadAttention::new(&Config::new(8, 2).with_causal(true), vb.clone())?;
    let adapter = candle_nn::linear_no_bias(8, 8, vb.pp("adapter"))?;
    let xs = zeros((1, 3, 8));
    let plain = AttentionCacheConfig::new();
    for projection in [Projection::Key, Projection::Value] {
        let own = adapter.clone();
        let adapted = layer.freeze()?.map_projection(projection, |current| {
            Ok(std::sync::Arc::new(move |input: &Tensor| current.forward(input)? + own.forward(input)?))
        })?;
        for frozen in [adapted.clone(), adapted.freeze()?] {
            let text = run(&frozen, &xs, &plain)?;
            let named = format!("the {projection} projection is a module of the caller, which `freeze()` keeps");
            assert!(text.contains(&named), "{text}");
            assert_eq!(run(&frozen, &xs, &plain.clone().with_detached(true))?, "");
        }
        let tracked = candle_core::Var::from_tensor(&xs)?;
        let text = run(&adapted, &tracked, &plain)?;
        assert!(text.contains("expected a layer after `freeze()` and an input `xs.detach()`"), "{text}");
    }
    let text = run(&layer, &xs, &plain)?;
    assert!(text.contains("expected a layer after `freeze()` and an input `xs.detach()`"), "{text}");
    Ok(())
}
