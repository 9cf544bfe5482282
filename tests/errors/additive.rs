//! `AdditiveAttention`.

use serde::Deserialize;

use crate::words::{Mask, Of, Tensors, builder, dtype};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("additive", run::<Additive>),
    ("additive config in JSON", |line, _| {
        serde_json::from_str::<AdditiveAttentionConfig>(line).map(accepted).map_err(Error::wrap)
    }),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Additive {
    config: Of<AdditiveAttentionConfig>,
    dtype: Option<String>,
    #[serde(default)]
    weights: Value,
    queries: Tensors,
    keys: Tensors,
    values: Tensors,
    #[serde(default)]
    mask: Mask,
}

impl Call for Additive {
    fn call(self) -> Result<String> {
        let layer = AdditiveAttention::new(&self.config.0, builder(&self.weights, dtype(&self.dtype))?)?;
        layer.forward(&self.queries, &self.keys, &self.values, &self.mask.build()?).map(accepted)
    }
}
