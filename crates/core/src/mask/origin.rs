//! The first key of each sequence, from which chunks, attention temperatures and lengths count.

use candle_core::{DType, Device, Result, Tensor};

use super::AttentionMask;
use super::constraint::{Constraint, Reach, first_key};
use super::tensors::{check_memory, readable};

impl AttentionMask {
    /// Returns whether the mask has chunks.
    pub(crate) fn has_chunks(&self) -> bool {
        self.constraints.iter().any(|constraint| matches!(constraint, Constraint::Aligned(_, Reach::Chunk(_))))
    }

    /// Returns whether a sequence may begin after the first key.
    pub(crate) fn can_move_first_key(&self) -> bool {
        self.constraints.iter().any(|constraint| match constraint {
            Constraint::Starts(_) => true,
            Constraint::Padded(columns) => columns.iter().any(|&padded| padded > 0),
            _ => false,
        })
    }

    /// Returns the key at which the sequence of query `i` of row `b` of a batch begins. Padding that tensors name is
    /// only known after [`with_padded_columns`](Self::with_padded_columns).
    pub(crate) fn first_key(&self, b: usize, i: usize) -> usize {
        first_key(&self.constraints, b, i)
    }

    /// Returns the mask with the padding on the left that its boolean masks and biases name, for `b` sequences of `t_q`
    /// queries and `t_kv` keys. The tensors are copied to the CPU. Tensors that are added later, such as a layer's
    /// relative bias, are no padding.
    ///
    /// # Errors
    /// If the copies do not fit in memory.
    pub(crate) fn with_padded_columns(&self, b: usize, t_q: usize, t_kv: usize) -> Result<Self> {
        let is_known = self.constraints.iter().any(|constraint| matches!(constraint, Constraint::Padded(_)));
        if is_known || t_q == 0 || t_kv == 0 {
            return Ok(self.clone());
        }
        let mut columns = if self.tensor_kind().is_some() { vec![0; b] } else { Vec::new() };
        for tensor in self.bool_masks.iter().chain(&self.biases) {
            let found = padded_columns(tensor, t_q, t_kv)?;
            for (sequence, most) in columns.iter_mut().enumerate() {
                let own = if found.len() == 1 { found.first() } else { found.get(sequence) };
                *most = (*most).max(own.copied().unwrap_or(0));
            }
        }
        Ok(self.clone().with(Constraint::Padded(columns.into())))
    }

    /// Returns the mask with [`with_padded_columns`](Self::with_padded_columns), if it has chunks, which count from
    /// there.
    ///
    /// # Errors
    /// As `with_padded_columns`.
    pub(super) fn with_chunks_counted(&self, b: usize, t_q: usize, t_kv: usize) -> Result<Self> {
        if self.has_chunks() { self.with_padded_columns(b, t_q, t_kv) } else { Ok(self.clone()) }
    }
}

/// Returns the number of columns that are padding on the left by a boolean mask or a bias that broadcasts to (B, H,
/// T_q, T_kv), for each sequence, or one for all. There are none by a tensor of another shape, which is an error
/// elsewhere.
///
/// These are the first columns, which no query attends to. Queries of the padding itself do not count if they attend to
/// all keys or none, as in masks that avoid rows without keys.
fn padded_columns(tensor: &Tensor, t_q: usize, t_kv: usize) -> Result<Vec<usize>> {
    let (rows, columns) = match *tensor.dims() {
        [columns] => (1, columns),
        [.., rows, columns] => (rows, columns),
        [] => return Ok(Vec::new()),
    };
    if tensor.rank() > 4 || columns != t_kv || (rows != t_q && rows != 1) || tensor.elem_count() == 0 {
        return Ok(Vec::new());
    }
    let sequences = if tensor.rank() == 4 { tensor.dims()[0] } else { 1 };
    let allowed = allowed_entries(tensor)?;
    let mut found = Vec::with_capacity(sequences);
    for of_sequence in allowed.chunks(allowed.len() / sequences) {
        let first_of_row = |row: &[u8]| row.iter().position(|&is_allowed| is_allowed == 1).unwrap_or(columns);
        let is_open = |row: &&[u8]| row.iter().all(|&is_allowed| is_allowed == 1);
        let limiting = of_sequence.chunks(columns).filter(|row| !is_open(row));
        let padded = limiting.map(first_of_row).min().unwrap_or(0);
        // The last query is at the last key. One row for all queries is that of the last one too.
        let position = |row: usize| (row % rows + columns).saturating_sub(rows);
        let is_attended =
            of_sequence.chunks(columns).enumerate().any(|(n, row)| is_open(&row) && position(n) >= padded);
        found.push(if is_attended || padded == columns { 0 } else { padded });
    }
    Ok(found)
}

/// Returns 1 for each entry of a boolean mask or a bias that allows to attend, and 0 for the others: in biases, -inf
/// and the smallest number of the dtype mask a key.
fn allowed_entries(tensor: &Tensor) -> Result<Vec<u8>> {
    check_memory(tensor.dims(), DType::F32)?;
    let on_cpu = readable(tensor)?.detach().to_device(&Device::Cpu)?;
    if !on_cpu.dtype().is_float() {
        return on_cpu.ne(&on_cpu.zeros_like()?)?.flatten_all()?.to_vec1();
    }
    let smallest = match on_cpu.dtype() {
        DType::F16 => half::f16::MIN.to_f32(),
        DType::BF16 => half::bf16::MIN.to_f32(),
        _ => f32::MIN,
    };
    let entries = on_cpu.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(entries.into_iter().map(|entry| u8::from(entry > smallest || entry.is_nan())).collect())
}
