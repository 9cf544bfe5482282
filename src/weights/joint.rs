//! Query, key and value projections as the rows of one weight, so that one product gives all of them.

use candle_core::{Result, Tensor};
use candle_nn::Linear;

/// Projections of inputs of one width as one: the rows of q, then those of k, then those of v.
///
/// Of plain tensors only: training changes a variable in its own place, which a copy of its rows would not see.
#[derive(Debug, Clone)]
pub(crate) struct Joint {
    rows: Linear,
    /// Rows of q; `None` where only k and v are joined.
    q: Option<usize>,
    k: usize,
    v: usize,
}

impl Joint {
    /// All three, or k and v where q reads another width; `None` for variables, and where k and v differ in width.
    pub(super) fn of([q, k, v]: [&Linear; 3]) -> Result<Option<Self>> {
        let width = |linear: &Linear| linear.weight().dim(1);
        if [q, k, v].into_iter().any(is_tracked) || width(k)? != width(v)? {
            return Ok(None);
        }
        let with_q = width(q)? == width(k)?;
        let parts = if with_q { vec![q, k, v] } else { vec![k, v] };
        let weights: Vec<_> = parts.iter().map(|part| part.weight()).collect();
        let bias = if parts.iter().any(|part| part.bias().is_some()) {
            // Adding zero changes no number.
            let bias = |part: &&Linear| match (part.bias(), part.weight()) {
                (Some(bias), _) => Ok(bias.clone()),
                (None, weight) => Tensor::zeros(weight.dim(0)?, weight.dtype(), weight.device()),
            };
            Some(Tensor::cat(&parts.iter().map(bias).collect::<Result<Vec<_>>>()?, 0)?)
        } else {
            None
        };
        let rows = |linear: &Linear| linear.weight().dim(0);
        let q = if with_q { Some(rows(q)?) } else { None };
        Ok(Some(Self { rows: Linear::new(Tensor::cat(&weights, 0)?, bias), q, k: rows(k)?, v: rows(v)? }))
    }

    /// A projection whose rows lie in this order already, as they are; `None` for variables.
    pub(super) fn packed(packed: &Linear, [q, k, v]: [usize; 3]) -> Result<Option<Self>> {
        if is_tracked(packed) {
            return Ok(None);
        }
        let rows = Linear::new(packed.weight().contiguous()?, packed.bias().cloned());
        Ok(Some(Self { rows, q: Some(q), k, v }))
    }

    /// q, k and v as views of the joint rows, those with biases that have them `apart`; q as it is where it is not joined.
    pub(super) fn views(&self, apart: [&Linear; 3]) -> Result<[Linear; 3]> {
        let [q, k, v] = apart;
        let view = |part: &Linear, start: usize, len: usize| -> Result<Linear> {
            let own = |tensor: &Tensor| tensor.narrow(0, start, len);
            let bias = self.rows.bias().filter(|_| part.bias().is_some());
            Ok(Linear::new(own(self.rows.weight())?, bias.map(own).transpose()?))
        };
        let first = self.q.unwrap_or(0);
        let q = match self.q {
            Some(len) => view(q, 0, len)?,
            None => q.clone(),
        };
        Ok([q, view(k, first, self.k)?, view(v, first + self.k, self.v)?])
    }

    /// q, k and v as one projection, if q is among them: (H·D + H_kv·D + H_kv·D_v, E).
    pub(crate) fn all(&self) -> Option<&Linear> {
        self.q.map(|_| &self.rows)
    }

    /// k and v as one projection: (H_kv·D + H_kv·D_v, key_size).
    pub(crate) fn keys_and_values(&self) -> Result<Linear> {
        let own = |tensor: &Tensor| tensor.narrow(0, self.q.unwrap_or(0), self.k + self.v);
        Ok(Linear::new(own(self.rows.weight())?, self.rows.bias().map(own).transpose()?))
    }
}

fn is_tracked(linear: &Linear) -> bool {
    linear.weight().track_op() || linear.bias().is_some_and(Tensor::track_op)
}
