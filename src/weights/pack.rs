//! The rows of a packed query, key and value projection.

use candle_core::{Result, Tensor};
use candle_nn::Linear;

use super::joint::Joint;
use super::layout::QkvOrder;
use super::load::projection_shapes;
use super::source::Source;
use crate::MultiHeadAttentionConfig;

/// Where the parts of one packed weight lie.
#[derive(Debug, Clone)]
pub(crate) struct PackedRows {
    order: QkvOrder,
    groups: usize,
    /// Rows of q, k and v in one group: all of them by part, those of one key head by head.
    parts: [usize; 3],
    pub bias: bool,
}

impl PackedRows {
    /// # Errors
    /// If the config describes projections that cannot share one weight.
    pub(super) fn new(cfg: &MultiHeadAttentionConfig, order: QkvOrder, source: &Source) -> Result<Self> {
        let [q, k, v, _] = projection_shapes(cfg);
        if q.1 != k.1 || q.1 != v.1 {
            return source.fail(format!(
                "one packed weight reads one input, but the config has input widths {}, {} and {}",
                q.1, k.1, v.1
            ));
        }
        let biases = cfg.qkv_bias();
        if biases[0] != biases[1] || biases[0] != biases[2] {
            return source.fail("one packed bias covers q, k and v, but the config wants some of them only");
        }
        let groups = match order {
            QkvOrder::ByPart => 1,
            QkvOrder::ByHead => cfg.num_kv_heads(),
        };
        Ok(Self { order, groups, parts: [q.0 / groups, k.0 / groups, v.0 / groups], bias: biases[0] })
    }

    /// Rows in all.
    pub(super) fn len(&self) -> usize {
        self.groups * self.parts.iter().sum::<usize>()
    }

    /// The packed projection as it is, where its rows lie by part already; `None` by head, and for variables.
    pub(super) fn joint(&self, packed: &Linear) -> Result<Option<Joint>> {
        match self.order {
            QkvOrder::ByPart => Joint::packed(packed, self.parts),
            QkvOrder::ByHead => Ok(None),
        }
    }

    /// The packed projection taken apart.
    pub(super) fn split(&self, packed: &Linear) -> Result<[Linear; 3]> {
        let weights = self.split_rows(&packed.weight().contiguous()?)?;
        let biases = packed.bias().map(|bias| self.split_rows(bias)).transpose()?;
        let mut biases = biases.map(|biases| biases.map(Some)).unwrap_or_default().into_iter();
        Ok(weights.map(|weight| Linear::new(weight, biases.next().flatten())))
    }

    /// A tensor with the packed rows first, (rows, ..), as its three parts.
    fn split_rows(&self, packed: &Tensor) -> Result<[Tensor; 3]> {
        let [q, k, v] = self.parts;
        if self.order == QkvOrder::ByPart {
            return Ok([packed.narrow(0, 0, q)?, packed.narrow(0, q, k)?, packed.narrow(0, q + k, v)?]);
        }
        let columns = &packed.dims()[1..];
        let with_columns = |head: &[usize]| [head, columns].concat();
        let grouped = packed.reshape(with_columns(&[self.groups, q + k + v]))?;
        let part = |start: usize, len: usize| {
            grouped.narrow(1, start, len)?.contiguous()?.reshape(with_columns(&[self.groups * len]))
        };
        Ok([part(0, q)?, part(q, k)?, part(q + k, v)?])
    }

    /// The inverse of `split_rows`.
    pub(super) fn join_rows(&self, parts: [&Tensor; 3]) -> Result<Tensor> {
        if self.order == QkvOrder::ByPart {
            return Tensor::cat(&parts, 0);
        }
        let columns = &parts[0].dims()[1..];
        let mut grouped = Vec::with_capacity(3);
        for (part, len) in parts.iter().zip(self.parts) {
            grouped.push(part.reshape([&[self.groups, len], columns].concat())?);
        }
        Tensor::cat(&grouped, 1)?.reshape([&[self.len()], columns].concat())
    }
}
