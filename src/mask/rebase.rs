//! A mask over all positions of a sequence, moved to the keys that a cache holds of it, and a mask over packed sequences taken
//! apart.

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::{Constraint, Placement};
use super::ranges::Frames;
use super::tensors::{check_memory, fit};
use super::{AttentionMask, EmptyRows};

/// H and T_q of the call, and how many rows of keys it reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RebaseDims {
    pub h: usize,
    pub t_q: usize,
    pub rows: usize,
}

impl AttentionMask {
    /// This mask, in which keys are counted by their position in the sequence, for keys that are counted by row. T_kv of
    /// this mask is the length of the longest sequence, and what is aligned to the end is aligned to that of each sequence.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), and for `keep` and `bias` tensors that do not fit.
    pub(crate) fn rebase(&self, placements: &[Placement], dims: RebaseDims, device: &Device) -> Result<Self> {
        let b = placements.len();
        let t_kv = longest(placements);
        self.resolve(b, dims.t_q, t_kv)?;
        let whole = Placement { keys: 0..t_kv, tokens: 0..dims.t_q, ..Placement::whole(dims.t_q, t_kv) };
        if placements.iter().all(|placement| *placement == whole) {
            return Ok(self.clone());
        }
        if self.empty_rows == EmptyRows::Uniform {
            bail!(
                "[attention_mask] uniform empty rows weigh all keys alike, expected every sequence to hold all of its keys"
            )
        }
        let mut mask = self.with_frames(Frames { placements: placements.to_vec(), first: 0, of: b });
        // Checked above; rows of keys are no columns of it.
        mask.constraints.retain(|constraint| !matches!(constraint, Constraint::Columns(_)));
        let full = (b, dims.h, dims.t_q, t_kv);
        for constraint in &self.constraints {
            let cut = |what, tensor| columns(&fit(what, tensor, full, device)?, placements, dims.rows);
            match constraint {
                Constraint::Keep(keep) => mask.constraints.push(Constraint::Keep(cut("keep", keep)?)),
                Constraint::Bias(bias) => mask.constraints.push(Constraint::Bias(cut("bias", bias)?)),
                _ => {}
            }
        }
        Ok(mask)
    }

    /// The sequence and position of a key that a query sees and that is not read.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve).
    pub(crate) fn missing_key(&self, placements: &[Placement], t_q: usize) -> Result<Option<(usize, usize)>> {
        let (b, t_kv) = (placements.len(), longest(placements));
        let whole = placements.iter().map(|placement| Placement { keys: 0..placement.end, ..placement.clone() });
        let ranges = self.with_frames(Frames { placements: whole.collect(), first: 0, of: b }).resolve(b, t_q, t_kv)?;
        let seen = (0..b).flat_map(|b| (0..t_q).map(move |i| (b, i)));
        Ok(seen
            .map(|(b, i)| (b, ranges.kv_range(b, i)))
            .find(|(b, range)| !range.is_empty() && range.start < placements[*b].keys.start)
            .map(|(b, range)| (b, range.start)))
    }

    /// The constraints of sequence `s` of `n` packed ones, of `t_q` queries and `t_kv` keys, as for a batch of one; without
    /// `keep` and `bias` tensors, which have no meaning there.
    pub(crate) fn of_sequence(&self, s: usize, n: usize, t_q: usize, t_kv: usize) -> Self {
        self.with_frames(Frames { placements: vec![Placement::whole(t_q, t_kv)], first: s, of: n })
    }

    fn with_frames(&self, frames: Frames) -> Self {
        let tensor = |constraint: &&Constraint| matches!(constraint, Constraint::Keep(_) | Constraint::Bias(_));
        let constraints = self.constraints.iter().filter(|constraint| !tensor(constraint)).cloned().collect();
        Self { constraints, frames: Some(frames), empty_rows: self.empty_rows }
    }
}

fn longest(placements: &[Placement]) -> usize {
    placements.iter().map(|placement| placement.end).max().unwrap_or(0)
}

/// The columns of a mask tensor (.., T_kv) for the rows of keys that each sequence reads.
fn columns(tensor: &Tensor, placements: &[Placement], rows: usize) -> Result<Tensor> {
    let t_kv = tensor.dim(3)?;
    if t_kv == 1 && longest(placements) != 1 {
        return Ok(tensor.clone());
    }
    let (_, h, t_q, _) = tensor.dims4()?;
    if tensor.elem_count() == 0 || rows == 0 {
        // Candle copies no empty views.
        return Tensor::zeros((placements.len(), h, t_q, rows), tensor.dtype(), tensor.device());
    }
    let of_sequence = |tensor: &Tensor, start: usize| -> Result<Tensor> {
        let own = tensor.narrow(3, start.min(t_kv), rows.min(t_kv - start.min(t_kv)))?;
        let (b, h, t_q, have) = own.dims4()?;
        if have == rows {
            return Ok(own);
        }
        // Hidden, since the sequence holds no more keys.
        check_memory(&[b, h, t_q, rows])?;
        let rest = Tensor::zeros((b, h, t_q, rows - have), own.dtype(), own.device())?;
        if have == 0 { Ok(rest) } else { Tensor::cat(&[&own.contiguous()?, &rest], 3) }
    };
    let start = placements.first().map_or(0, |placement| placement.keys.start);
    if placements.iter().all(|placement| placement.keys.start == start) {
        return of_sequence(tensor, start);
    }
    check_memory(&[placements.len(), h, t_q, rows])?;
    let by_sequence = tensor.dim(0)? > 1;
    let own = placements.iter().enumerate().map(|(b, placement)| {
        let tensor = if by_sequence { tensor.narrow(0, b, 1)? } else { tensor.clone() };
        of_sequence(&tensor, placement.keys.start)?.contiguous()
    });
    Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 0)
}
