//! Inputs and positions that rotary embeddings cannot take.

use serde::Deserialize;

use crate::words::{Of, Tensors};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("rope", run::<Rotary>)];

/// A rotary embedding, of tables if given, and what it rotates.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rotary {
    config: Of<RopeConfig>,
    head_dim: usize,
    cos: Option<Tensors>,
    sin: Option<Tensors>,
    xs: Option<Tensors>,
    positions: Option<Tensors>,
    axis_positions: Option<Tensors>,
    #[serde(default)]
    offset: usize,
}

impl Rotary {
    pub fn build(&self) -> Result<RotaryEmbedding> {
        let Of(config) = &self.config;
        match (&self.cos, &self.sin) {
            (Some(cos), Some(sin)) => RotaryEmbedding::from_tables(config, self.head_dim, cos, sin),
            _ => RotaryEmbedding::new(config, self.head_dim),
        }
    }
}

impl Call for Rotary {
    fn call(self) -> Result<String> {
        let rotary = self.build()?;
        let Some(xs) = &self.xs else { return Ok(accepted(rotary)) };
        match (&self.positions, &self.axis_positions) {
            (Some(positions), _) => rotary.apply(xs, positions),
            (None, Some(positions)) => rotary.apply_on_axes(xs, positions),
            (None, None) => rotary.apply_from(xs, self.offset),
        }
        .map(accepted)
    }
}
