//! The experts of Nomic v2: MLPs without a gate, whose weights follow each other in two matrices.

use candle_attention::PackedLinear;
use candle_core::{Result, bail};
use candle_nn::Activation;

use super::mlp::Mlp;
use super::weights::Weights;

/// The matrices of all experts, below the module of the experts.
const UP: &str = "mlp.w1";
const DOWN: &str = "mlp.w2";

/// Returns whether the weights of experts are in two matrices.
pub fn are_here(all: &Weights) -> bool {
    all.contains_tensor(UP)
}

/// Loads `count` experts from two matrices (count · F, E), which have a row for each of the F inner numbers of an
/// expert.
pub fn experts(all: &Weights, count: usize, activation: Activation) -> Result<Vec<Mlp>> {
    let ups = all.get_unchecked(UP)?;
    let downs = all.get_unchecked(DOWN)?;
    let (rows, _) = ups.dims2()?;
    if count == 0 || !rows.is_multiple_of(count) || downs.dims() != ups.dims() {
        bail!(
            "[encoder] {UP} and {DOWN} have shapes {:?} and {:?}, expected equal ones with rows for {count} experts",
            ups.dims(),
            downs.dims()
        )
    }
    let inner = rows / count;
    let mut experts = Vec::with_capacity(count);
    for expert in 0..count {
        let up = PackedLinear::new(&ups.narrow(0, expert * inner, inner)?, None)?;
        let down = PackedLinear::new(&downs.narrow(0, expert * inner, inner)?.t()?, None)?;
        experts.push(Mlp::plain(up, down, activation));
    }
    Ok(experts)
}
