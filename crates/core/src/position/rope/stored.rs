//! The angles of single tokens, for modules that store them with keys that are rotated later.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor};

use super::angles::Angles;
use super::{RopeConfig, Rotation};
use candle_attention_modules::base::rowwise::to_vec;

impl Rotation {
    /// Returns the cosines of the pairs of each token and then their sines, (B, T, r) in f32, for a call of `b`
    /// sequences of `t` tokens.
    pub(crate) fn angles_of_tokens(&self, b: usize, t: usize, device: &Device) -> Result<Tensor> {
        let mut entries = Vec::with_capacity(b * t * 2 * self.angles.half);
        for token in 0..b * t {
            let row = self.angles.row(self.index[token % self.index.len()] as usize);
            entries.extend_from_slice(row.cos);
            entries.extend_from_slice(row.sin);
        }
        Tensor::from_vec(entries, (b, t, 2 * self.angles.half), device)
    }

    /// Returns the rotation of N tokens by the angles (N, r) that [`angles_of_tokens`](Self::angles_of_tokens) returned
    /// for them.
    pub(crate) fn of_stored_angles(config: &RopeConfig, angles: &Tensor) -> Result<Self> {
        let (rows, r) = angles.dims2()?;
        let half = r / 2;
        let cos = to_vec(&angles.narrow(1, 0, half)?)?;
        let sin = to_vec(&angles.narrow(1, half, half)?)?;
        Ok(Self {
            angles: Arc::new(Angles::new(cos, sin, half)),
            index: (0..rows as u32).collect(),
            style: config.style(),
            parts: config.parts(),
            inverse: false,
        })
    }
}
