//! The keys that queries attend to, in the form that takes the least memory on the device: numbers where all sequences
//! have the same bounds, an entry for each sequence where these differ, and an entry for each query otherwise.

use candle_attention_call::{BoundedKeys, FirstPosition, Intervals, PackedLengths};
use candle_core::{Device, Result, Tensor, bail};

use super::call::Call;
use super::packed::PackedSequences;
use crate::mask::{KeyBounds, PackedRows, RowRanges};
use candle_attention_modules::base::uploaded;

/// Returns the lengths of packed sequences.
fn packed_lengths(sequences: &PackedSequences, device: &Device) -> Result<PackedLengths<Tensor>> {
    let (mut ends_of_queries, mut ends_of_keys) = (vec![0], vec![0]);
    for PackedRows { queries, keys } in sequences.rows() {
        ends_of_queries.push(entry(queries.end)?);
        ends_of_keys.push(entry(keys.end)?);
    }
    let shape = [ends_of_queries.len()];
    Ok(PackedLengths {
        cu_seqlens_q: uploaded(ends_of_queries, &shape, device)?,
        cu_seqlens_kv: uploaded(ends_of_keys, &shape, device)?,
        longest_queries: sequences.most_queries(),
        longest_keys: sequences.most_keys(),
    })
}

/// Returns the keys that the queries of a call attend to.
///
/// # Errors
/// If ALiBi counts from a query's position, and joined masks disagree on it or it is beyond 32 bits.
pub(super) fn bounded_keys(call: &Call) -> Result<BoundedKeys<Tensor>> {
    let has_alibi = call.attention.scores.alibi_slopes.is_some();
    let mut ranges = match call.attention.keys.ranges.bounds() {
        Some(bounds) if bounds.positions_agree || !has_alibi => of_bounds(bounds, call)?,
        _ => of_rows(call.rows()?, call)?,
    };
    if let Some(sequences) = call.sequences() {
        ranges.packed = Some(packed_lengths(sequences, call.attention.q.device())?);
    }
    Ok(ranges)
}

/// Returns the keys within some bounds, without the lengths of packed sequences.
fn of_bounds(bounds: KeyBounds, call: &Call) -> Result<BoundedKeys<Tensor>> {
    let device = call.attention.q.device();
    let by_sequence = |entries: Option<Vec<i32>>| -> Result<Option<Tensor>> {
        let Some(entries) = entries else { return Ok(None) };
        let shape = [entries.len()];
        uploaded(entries, &shape, device).map(Some)
    };
    let distance = |limit: Option<i32>| limit.map(|limit| limit as usize);
    let first_position = match bounds.is_aligned_to_end {
        true => FirstPosition::AtEnd,
        false => first_position(bounds.first_positions, device)?,
    };
    Ok(BoundedKeys {
        packed: None,
        first_position,
        causal: bounds.is_causal,
        left: distance(bounds.left),
        right: distance(bounds.right),
        chunk: distance(bounds.chunk),
        starts: by_sequence(bounds.starts)?,
        lengths: by_sequence(bounds.lengths)?,
        prefixes: by_sequence(bounds.prefixes)?,
        intervals: None,
    })
}

/// Returns the keys within a start and an end for each query.
fn of_rows(rows: &RowRanges, call: &Call) -> Result<BoundedKeys<Tensor>> {
    let device = call.attention.q.device();
    let positions = match &call.attention.scores.alibi_slopes {
        Some(_) => {
            // An error if joined masks disagree.
            rows.positions()?;
            let mut first = Vec::with_capacity(rows.sequences.len());
            for sequence in &rows.sequences {
                first.push(position(sequence.first_position.saturating_sub(sequence.first_key as i64))?);
            }
            first_position(first, device)?
        }
        // Nothing else counts from positions.
        None => FirstPosition::AtEnd,
    };
    let mut starts = vec![0; rows.keys.len()];
    let mut ends = vec![0; rows.keys.len()];
    for sequence in &rows.sequences {
        for row in sequence.queries.clone() {
            let keys = &rows.keys[row];
            starts[row] = entry(keys.start - sequence.first_key)?;
            ends[row] = entry(keys.end - sequence.first_key)?;
        }
    }
    let shape = match call.sequences() {
        Some(_) => vec![call.attention.dims.t_q],
        None => vec![call.attention.dims.b, call.attention.dims.t_q],
    };
    let intervals = Intervals { starts: uploaded(starts, &shape, device)?, ends: uploaded(ends, &shape, device)? };
    Ok(BoundedKeys { first_position: positions, intervals: Some(intervals), ..BoundedKeys::default() })
}

/// Returns the position of query 0: a number if it is the same in all sequences.
fn first_position(positions: Vec<i32>, device: &Device) -> Result<FirstPosition<Tensor>> {
    match positions.first() {
        Some(&first) if positions.iter().all(|&other| other == first) => Ok(FirstPosition::Same(first)),
        _ => {
            let shape = [positions.len()];
            Ok(FirstPosition::Each(uploaded(positions, &shape, device)?))
        }
    }
}

/// Returns a number of keys or queries in 32 bits.
fn entry(count: usize) -> Result<i32> {
    match i32::try_from(count) {
        Ok(number) => Ok(number),
        Err(_) => bail!("the kernels of a GPU count in 32 bits, and the call has {count} queries or keys"),
    }
}

/// Returns a position in 32 bits, whose sums fit too.
fn position(number: i64) -> Result<i32> {
    match i32::try_from(number) {
        Ok(small) if small.unsigned_abs() <= 1 << 30 => Ok(small),
        _ => bail!("the kernels of a GPU count in 32 bits, and a query has the position {number}"),
    }
}
