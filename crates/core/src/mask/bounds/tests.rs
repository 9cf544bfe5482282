use std::ops::Range;

use super::*;
use crate::mask::{AttentionMask, PackedRows};
use candle_core::Result;

impl KeyBounds {
    /// Returns the keys that query `i` of sequence `b` attends to, as a kernel computes them.
    fn keys(&self, b: usize, i: usize, t_kv: usize) -> Range<i32> {
        let position = self.first_positions[b] + i as i32;
        let mut start = 0;
        let mut end = t_kv as i32;
        let of_sequence = |entries: &Option<Vec<i32>>| entries.as_ref().map(|entries| entries[b]);
        if let Some(own) = of_sequence(&self.starts) {
            start = start.max(own);
        }
        if let Some(own) = of_sequence(&self.lengths) {
            end = end.min(own);
        }
        if self.is_causal {
            end = end.min((position + 1).max(of_sequence(&self.prefixes).unwrap_or(0)));
        }
        if let Some(left) = self.left {
            start = start.max(position - left);
        }
        if let Some(right) = self.right {
            end = end.min(position + right + 1);
        }
        if let Some(chunk) = self.chunk {
            let first = position.div_euclid(chunk) * chunk;
            start = start.max(first);
            end = end.min(first + chunk);
        }
        if start < end { start..end } else { 0..0 }
    }
}

/// Compares every mask of ranges, alone and with each other mask.
#[test]
fn bounds_have_the_ranges_of_keys_that_the_mask_has() -> Result<()> {
    let none = AttentionMask::none;
    let causal = AttentionMask::causal;
    let masks = [
        none(),
        causal(),
        AttentionMask::causal_upper_left(),
        AttentionMask::causal_with_offset(2),
        AttentionMask::causal_with_offset(usize::MAX),
        AttentionMask::causal_with_offsets([-1, 3]),
        causal().with_window(1),
        AttentionMask::causal_with_offsets([4, 0]).with_window(3),
        none().with_window(2),
        none().with_local_window(1, 2),
        none().with_local_window(usize::MAX, 1),
        causal().with_chunk(2),
        none().with_chunk(4),
        causal().with_chunk(2).with_starts(vec![0, 2]),
        causal().with_chunk(3).with_starts(vec![1, 4]),
        causal().with_chunk(2).with_starts(ValidLens::from(vec![vec![0, 1, 2], vec![0, 0, 1]])),
        none().with_valid_lens(vec![3, 0]),
        none().with_valid_lens(vec![2, 9]),
        none().with_starts(vec![0, 2]),
        none().with_starts(vec![4, 9]),
        none().with_valid_lens(ValidLens::from(vec![vec![1, 4, 4], vec![0, 3, 3]])),
        none().with_starts(ValidLens::from(vec![vec![1], vec![2]])),
        causal().with_prefix(vec![2, 0]),
        AttentionMask::causal_upper_left().with_prefix(vec![2, 4]).with_window(2),
    ];
    let mut bounds_found = 0;
    let mut ranges_only = 0;
    for mask in masks.iter().flat_map(|a| masks.iter().map(|b| a.and(b))) {
        for (t_q, t_kv) in [(1, 1), (1, 6), (3, 3), (3, 6), (3, 2), (3, 0), (0, 2)] {
            let (Ok(call), Ok(ranges)) = (mask.ranges_of_batch(2, t_q, t_kv), mask.resolve(2, t_q, t_kv)) else {
                continue;
            };
            let Some(bounds) = call.bounds() else {
                ranges_only += 1;
                continue;
            };
            bounds_found += 1;
            for (b, i) in (0..2).flat_map(|b| (0..t_q).map(move |i| (b, i))) {
                let expected = ranges.kv_range(b, i);
                let found = bounds.keys(b, i, t_kv);
                assert_eq!(found, expected.start as i32..expected.end as i32, "{mask:?} {t_q} {t_kv}: {bounds:?}");
            }
        }
    }
    assert!(bounds_found > 1000 && ranges_only > 100, "{bounds_found} {ranges_only}");
    Ok(())
}

/// Checks which masks are numbers alone, for which nothing is copied to a device.
#[test]
fn bounds_of_causal_masks_and_windows_have_no_entry_for_each_sequence() -> Result<()> {
    let causal = AttentionMask::causal;
    for mask in [
        AttentionMask::none(),
        causal(),
        AttentionMask::causal_with_offset(3),
        causal().with_window(4),
        AttentionMask::none().with_local_window(1, 2),
        causal().with_chunk(4),
        causal().with_valid_lens(vec![9, 8]),
    ] {
        for t_q in [1, 5] {
            let bounds = mask.ranges_of_batch(2, t_q, 8)?.bounds().expect("bounds");
            let entries = [&bounds.starts, &bounds.lengths, &bounds.prefixes];
            let is_chunk_of_one_query = t_q == 1 && bounds.starts == Some(vec![4, 4]);
            assert!(entries.iter().all(|own| own.is_none()) || is_chunk_of_one_query, "{mask:?}: {bounds:?}");
        }
    }
    let padded = causal().with_valid_lens(vec![3, 8]).with_starts(vec![0, 2]);
    let bounds = padded.ranges_of_batch(2, 5, 8)?.bounds().expect("bounds");
    assert_eq!((bounds.starts, bounds.lengths), (Some(vec![0, 2]), Some(vec![3, 8])));
    assert!(bounds.is_causal && bounds.is_aligned_to_end);
    Ok(())
}

#[test]
fn bounds_of_packed_sequences_count_within_each_sequence() -> Result<()> {
    let sequences = vec![
        PackedRows { queries: 0..2, keys: 0..4 },
        PackedRows { queries: 2..2, keys: 4..7 },
        PackedRows { queries: 2..3, keys: 7..7 },
        PackedRows { queries: 3..6, keys: 7..9 },
    ];
    let mask = AttentionMask::causal().with_valid_lens(vec![3, 1, 1, 1]);
    let call = mask.ranges_of_packed("test", sequences.clone())?;
    let bounds = call.bounds().expect("bounds");
    assert!(bounds.is_aligned_to_end && bounds.is_causal);
    for (s, PackedRows { queries, keys }) in sequences.into_iter().enumerate() {
        for (i, row) in queries.enumerate() {
            let expected = &call.rows("test")?.keys[row];
            let own = bounds.keys(s, i, keys.len());
            assert_eq!(own.start as usize + keys.start..own.end as usize + keys.start, *expected);
        }
    }
    Ok(())
}
