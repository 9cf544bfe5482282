//! Modules in the places of projections that do not fit a layer.

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
