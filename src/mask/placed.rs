//! A mask over all positions of a sequence, moved to the keys that a cache holds of it.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::{Alignment, AttentionMask, Relative, ValidLens, fit};
use crate::EmptyRows;

/// Where the queries of a call, and the rows of keys that it reads, stand in one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Placement {
    /// The position of query 0; negative where padding stands before the first token.
    pub query: i128,
    /// Which queries are tokens; the others see nothing.
    pub tokens: Range<usize>,
    /// The positions of the keys that are read: row 0 holds the first of them.
    pub keys: Range<usize>,
    /// The positions of the sequence in all.
    pub end: usize,
}

/// H and T_q of the call, and how many rows of keys it reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlacedDims {
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
    pub(crate) fn placed(&self, placements: &[Placement], dims: PlacedDims, device: &Device) -> Result<Self> {
        let b = placements.len();
        let t_kv = longest(placements);
        self.resolve(b, dims.t_q, t_kv)?;
        let (first, whole) = (placements.first(), 0..dims.t_q);
        let alike = placements.iter().all(|placement| Some(placement) == first && placement.tokens == whole);
        let at_end = placements.iter().all(|placement| placement.keys.end == placement.end);
        if alike && at_end && first.is_none_or(|placement| placement.keys.start == 0) {
            return Ok(self.clone());
        }
        if self.empty_rows == EmptyRows::Uniform {
            bail!(
                "[attention_mask] uniform empty rows weigh all keys alike, expected every sequence to hold all of its keys"
            )
        }

        let moved = |lens: &[ValidLens]| -> Vec<ValidLens> {
            lens.iter().map(|lens| lens.less(|sequence| placements[sequence].keys.start)).collect()
        };
        let relative = |relative: &Relative| -> Relative {
            let offsets = |of: &dyn Fn(&Placement) -> i128| {
                Alignment::Each(placements.iter().map(|placed| of(placed) - placed.keys.start as i128).collect())
            };
            let alignment = match relative.alignment {
                Alignment::End if alike && at_end => Alignment::End,
                Alignment::End => offsets(&|placed| placed.query),
                Alignment::Start => offsets(&|_| 0),
                Alignment::Offset(n) => offsets(&|_| n as i128),
                Alignment::Each(ref own) => Alignment::Each(own.clone()),
            };
            Relative { alignment, prefix: moved(&relative.prefix), ..relative.clone() }
        };
        let mut mask = Self {
            relative: self.relative.iter().map(relative).collect(),
            valid_lens: moved(&self.valid_lens),
            starts: moved(&self.starts),
            widths: Vec::new(),
            keep: Vec::new(),
            bias: Vec::new(),
            empty_rows: self.empty_rows,
        };
        if mask.relative.is_empty() {
            // Nothing is relative to a query's position but ALiBi.
            mask.relative.push(relative(&Relative::default()));
        }
        let full = (b, dims.h, dims.t_q, t_kv);
        for keep in &self.keep {
            mask.keep.push(columns(&fit("keep", keep, full, device)?, placements, dims.rows)?);
        }
        for bias in &self.bias {
            mask.bias.push(columns(&fit("bias", bias, full, device)?, placements, dims.rows)?);
        }
        let held = |placed: &Placement| placed.keys.len();
        mask.valid_lens.push(match placements.iter().all(|placed| placed.tokens == whole) {
            true => placements.iter().map(held).collect::<Vec<_>>().into(),
            false => {
                let row = |placed: &Placement| -> Vec<usize> {
                    whole.clone().map(|i| if placed.tokens.contains(&i) { held(placed) } else { 0 }).collect()
                };
                placements.iter().map(row).collect::<Vec<_>>().into()
            }
        });
        Ok(mask)
    }

    /// The sequence and position of a key that a query sees and that is not read.
    ///
    /// # Errors
    /// As [`placed`](Self::placed).
    pub(crate) fn missing_key(
        &self,
        placements: &[Placement],
        dims: PlacedDims,
        device: &Device,
    ) -> Result<Option<(usize, usize)>> {
        let t_kv = longest(placements);
        let whole: Vec<_> =
            placements.iter().map(|placed| Placement { keys: 0..placed.end, ..placed.clone() }).collect();
        let ranges =
            self.placed(&whole, PlacedDims { rows: t_kv, ..dims }, device)?.resolve(whole.len(), dims.t_q, t_kv)?;
        let seen = (0..whole.len()).flat_map(|b| (0..dims.t_q).map(move |i| (b, i)));
        Ok(seen
            .map(|(b, i)| (b, ranges.kv_range(b, i)))
            .find(|(b, range)| !range.is_empty() && range.start < placements[*b].keys.start)
            .map(|(b, range)| (b, range.start)))
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
        // Hidden by the length of the sequence.
        let rest = Tensor::zeros((b, h, t_q, rows - have), own.dtype(), own.device())?;
        if have == 0 { Ok(rest) } else { Tensor::cat(&[&own.contiguous()?, &rest], 3) }
    };
    let start = placements.first().map_or(0, |placement| placement.keys.start);
    if placements.iter().all(|placement| placement.keys.start == start) {
        return of_sequence(tensor, start);
    }
    let by_sequence = tensor.dim(0)? > 1;
    let own = placements.iter().enumerate().map(|(b, placement)| {
        let tensor = if by_sequence { tensor.narrow(0, b, 1)? } else { tensor.clone() };
        of_sequence(&tensor, placement.keys.start)?.contiguous()
    });
    Tensor::cat(&own.collect::<Result<Vec<_>>>()?, 0)
}
