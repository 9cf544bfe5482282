//! Lists of keys of several packed sequences, some of which may attend to all of their keys.

use candle_core::{Device, Result, Tensor};

use super::KeyLists;
use candle_attention_modules::base::rowwise::to_vec;

/// The lists of the queries of one sequence.
pub(crate) struct SequenceLists {
    /// Lists (1, heads, T_q, n), with a list for each query; `None` if the queries attend to all keys that the mask
    /// allows.
    pub lists: Option<KeyLists>,
    pub t_q: usize,
    pub t_kv: usize,
}

impl SequenceLists {
    /// Returns the number of heads that have lists.
    fn heads(&self) -> usize {
        self.lists.as_ref().map_or(1, |lists| lists.entries.dims()[1])
    }

    /// Returns the most entries of a list whose entries are blocks of `block` keys.
    fn most_entries(&self, block: usize) -> usize {
        match &self.lists {
            Some(lists) => lists.entries.dims()[3] * (lists.key_block / block),
            None if self.t_q == 0 => 0,
            None => self.t_kv.div_ceil(block),
        }
    }
}

impl KeyLists {
    /// Returns the lists of packed sequences, (1, heads, total queries, n); `None` if no sequence has lists.
    pub(crate) fn of_packed(all: &[SequenceLists]) -> Result<Option<Self>> {
        let blocks: Vec<usize> = all.iter().filter_map(|own| Some(own.lists.as_ref()?.key_block)).collect();
        let Some(&first_block) = blocks.first() else { return Ok(None) };
        // Sequences whose lists name keys are listed key by key, and all others with them.
        let block = if blocks.iter().all(|&block| block == first_block) { first_block } else { 1 };
        let heads = all.iter().map(SequenceLists::heads).max().unwrap_or(1);
        let n = all.iter().map(|own| own.most_entries(block)).max().unwrap_or(0);
        let total: usize = all.iter().map(|own| own.t_q).sum();
        let mut entries = vec![-1i64; heads * total * n];
        let mut first_query = 0;
        for own in all {
            let stored = match &own.lists {
                Some(lists) => to_vec::<i64>(&lists.entries)?,
                None => Vec::new(),
            };
            for head in 0..heads {
                for query in 0..own.t_q {
                    let to = &mut entries[(head * total + first_query + query) * n..][..n];
                    let Some(lists) = &own.lists else {
                        for (entry, number) in to.iter_mut().zip(0..own.t_kv.div_ceil(block)) {
                            *entry = number as i64;
                        }
                        continue;
                    };
                    let width = lists.entries.dims()[3];
                    let own_head = head % own.heads();
                    let list = &stored[(own_head * own.t_q + query) * width..][..width];
                    let of_entry = lists.key_block / block;
                    for (place, number) in to.chunks_exact_mut(of_entry).zip(list) {
                        let Ok(number) = usize::try_from(*number) else { continue };
                        for (entry, key) in place.iter_mut().zip(number * of_entry..own.t_kv.div_ceil(block)) {
                            *entry = key as i64;
                        }
                    }
                }
            }
            first_query += own.t_q;
        }
        let entries = Tensor::from_vec(entries, (1, heads, total, n), &Device::Cpu)?;
        Ok(Some(Self::new(&entries)?.with_key_blocks(block)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists<const N: usize>(entries: [[i64; 2]; N], block: usize) -> Result<Option<KeyLists>> {
        let entries = Tensor::new(&entries, &Device::Cpu)?.unsqueeze(0)?.unsqueeze(0)?;
        Ok(Some(KeyLists::new(&entries)?.with_key_blocks(block)?))
    }

    #[test]
    fn lists_of_packed_sequences_name_the_keys_of_each_alone() -> Result<()> {
        let all = [
            SequenceLists { lists: lists([[0, -1], [2, 0]], 2)?, t_q: 2, t_kv: 5 },
            SequenceLists { lists: None, t_q: 1, t_kv: 3 },
            SequenceLists { lists: None, t_q: 0, t_kv: 90 },
        ];
        let in_blocks = KeyLists::of_packed(&all)?.expect("lists");
        assert_eq!(in_blocks.key_block, 2);
        assert_eq!(in_blocks.entries.get(0)?.get(0)?.to_vec2::<i64>()?, [[0, -1], [2, 0], [0, 1]]);

        let [one, other, _] = all;
        let key_by_key = SequenceLists { lists: lists([[4, 1]], 1)?, t_q: 1, t_kv: 6 };
        let mixed = KeyLists::of_packed(&[one, key_by_key, other])?.expect("lists");
        assert_eq!(mixed.key_block, 1);
        let expected = [[0, 1, -1, -1], [4, -1, 0, 1], [4, 1, -1, -1], [0, 1, 2, -1]];
        assert_eq!(mixed.entries.get(0)?.get(0)?.to_vec2::<i64>()?, expected);
        assert!(KeyLists::of_packed(&[SequenceLists { lists: None, t_q: 1, t_kv: 3 }])?.is_none());
        Ok(())
    }

    #[test]
    fn lists_of_packed_sequences_with_lists_for_each_head_repeat_those_for_all_heads() -> Result<()> {
        let by_head = Tensor::new(&[[[[3i64]], [[1]]]], &Device::Cpu)?;
        let all = [
            SequenceLists { lists: Some(KeyLists::new(&by_head)?), t_q: 1, t_kv: 4 },
            SequenceLists { lists: lists([[0, 2]], 1)?, t_q: 1, t_kv: 3 },
        ];
        let packed = KeyLists::of_packed(&all)?.expect("lists");
        assert_eq!(packed.entries.get(0)?.to_vec3::<i64>()?, [[[3, -1], [0, 2]], [[1, -1], [0, 2]]]);
        Ok(())
    }
}
