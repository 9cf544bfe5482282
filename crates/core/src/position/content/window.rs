//! Relative positions in a window of an image as a bias for each place of a key from its query (Swin).

use candle_core::{Result, Tensor};

use super::super::{CallContext, KeyValueHeads, Latest, ScoreArguments, ScoreTerm, gathered, latest};
use super::OP;
use super::call::{Image, projected_keys};
use super::specs::{LayerSpecs, normal};
use crate::mask::AttentionMask;
use candle_attention_modules::base::{Heads, ParameterList, ParameterSpec};

/// The parameter ((2 · rows - 1) · (2 · columns - 1), H).
const TABLE: &str = "relative_position_bias_table";

/// The term of [`ContentPositions::Window`](crate::ContentPositions::Window).
#[derive(Debug)]
pub(super) struct WindowTerm {
    pub image: Image,
    pub parameters: ParameterList,
    pub bias: WindowBias,
}

/// Returns the parameters.
pub(super) fn specs(image: Image, layer: &LayerSpecs) -> Vec<ParameterSpec> {
    let places = (2 * image.rows - 1) * (2 * image.columns - 1);
    vec![layer.shared(TABLE, &[places, layer.num_heads], normal(0.02)).by_head(Heads::Query, 1)]
}

impl ScoreTerm for WindowTerm {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        projected_keys(kv, call)?;
        self.image.check("window", &arguments.q)?;
        if arguments.q.elem_count() > 0 {
            arguments.mask = self.bias.add_to(&arguments.mask, self.image, false, || self.parameters.expect(TABLE))?;
        }
        Ok(())
    }
}

/// The bias (1, H, T, T) of a window, which is computed once unless a parameter is tracked for gradients.
#[derive(Debug, Default)]
pub(super) struct WindowBias(Latest<(), Tensor>);

impl WindowBias {
    /// Returns the mask with the bias. `table` returns the entries (places, H) of the places of a key from its query,
    /// row by row, from the query furthest above and left of its key on. Entries that may change from call to call, by
    /// dropout, are computed each time.
    pub fn add_to(
        &self,
        mask: &AttentionMask,
        image: Image,
        may_change: bool,
        table: impl FnOnce() -> Result<Tensor>,
    ) -> Result<AttentionMask> {
        let compute = || {
            let Image { rows, columns } = image;
            let t = rows * columns;
            let place = |query: usize, key: usize| {
                let down = query / columns + rows - 1 - key / columns;
                down * (2 * columns - 1) + query % columns + columns - 1 - key % columns
            };
            let pairs = (0..t).flat_map(|query| (0..t).map(move |key| place(query, key)));
            gathered(OP, &table()?, pairs, &[t, t])?.unsqueeze(0)
        };
        let bias = if may_change {
            compute()?
        } else {
            latest(&self.0, |()| true, compute, |bias| (!bias.track_op()).then_some(()))?
        };
        Ok(mask.clone().with_bias(&bias))
    }
}
