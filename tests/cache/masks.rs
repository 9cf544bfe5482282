//! Random masks of a call. A caller's mask counts the positions of each sequence, also where the cache no longer stores
//! all of them.

use crate::call::attention_mask;
use crate::program::Call;
use crate::recipe::{Kind, MaskShape, Recipe};
use crate::*;

const KINDS: [&[Kind]; 10] = [
    &[Kind::ValidLens],
    &[Kind::ValidLensPerQuery],
    &[Kind::Starts],
    &[Kind::StartsPerQuery],
    &[Kind::Causal, Kind::Prefix],
    &[Kind::Causal, Kind::PrefixPerQuery],
    &[Kind::Window],
    &[Kind::BoolMask(MaskShape::Whole)],
    &[Kind::Bias(MaskShape::Whole)],
    // Of batches of one length.
    &[Kind::UpperLeft],
];

/// Two of them together, over the keys of the longest sequence.
pub struct Drawn(Vec<Mask>);

impl Drawn {
    pub fn draw(random: &mut Random, call: &Call) -> Self {
        let is_even = call.before.iter().all(|before| *before == call.before[0])
            && call.own.iter().all(|own| own.len() == call.t);
        let most = KINDS.len() - if is_even { 1 } else { 2 };
        let masks = vec![KINDS[random.up_to(most)].to_vec(), KINDS[random.up_to(most)].to_vec()];
        let t_kv = call.before.iter().zip(&call.own).map(|(before, own)| before + own.len()).max().unwrap_or(0);
        let dims = Dims { b: call.own.len(), h: 1, h_kv: 1, t_q: call.t, t_kv, d: 1, d_v: 1 };
        Self(Recipe { seed: random.bits(), ..Recipe::plain(dims, masks, DType::F32) }.case().masks)
    }

    pub fn of_call(&self, call: &Call, device: &Device) -> Result<AttentionMask> {
        let mut masks = self.0.clone();
        for mask in masks.iter_mut().filter(|mask| mask.alignment == Alignment::UpperLeft) {
            // Without a cache, query i has position i; here its position has to be set, the same for all sequences.
            mask.alignment = Alignment::Offset(call.before[0]);
        }
        attention_mask(&masks, device, |_, _, bias| bias.tensor(DType::F32, device))
    }

    /// Returns the mask of sequence `n` as a whole, whose last queries are the queries of the call. Outputs of earlier
    /// queries are not read.
    pub fn of_sequence(&self, n: usize, call: &Call, device: &Device) -> Result<AttentionMask> {
        let before = call.before[n];
        let own = call.own[n].clone();
        let len = before + own.len();
        let mut masks: Vec<_> = self.0.iter().map(|mask| mask.of_sequence(n)).collect();
        for part in masks.iter_mut().flat_map(|mask| &mut mask.parts) {
            match part {
                Part::ValidLens(Lens::PerQuery(rows))
                | Part::Starts(Lens::PerQuery(rows))
                | Part::Prefix(Lens::PerQuery(rows)) => rows[0] = [&vec![0; before], &rows[0][own.clone()]].concat(),
                Part::BoolMask(table) | Part::Bias(table) => {
                    *table = Array::each([1, 1, len, len], |[_, _, i, j]| match i.checked_sub(before) {
                        Some(i) => table.at([0, 0, own.start + i, j]),
                        None => 1.0,
                    });
                }
                _ => {}
            }
        }
        attention_mask(&masks, device, |_, _, bias| bias.tensor(DType::F32, device))
    }
}
