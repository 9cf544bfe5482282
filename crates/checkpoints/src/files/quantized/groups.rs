//! Groups of inputs that share a scale, in any order.

use candle_core::{Result, bail};

use super::bits::greatest_common_divisor;
use candle_attention_modules::base::GroupNumbers;

/// The inputs of a layer, sorted so that neighbours have the scale of one group of the file.
#[derive(Debug, PartialEq)]
pub(super) struct Groups {
    /// The number of neighbouring inputs that share a scale.
    pub size: usize,
    /// The group of the file for each `size` inputs.
    pub of_file: Vec<usize>,
    /// The input of each column; `None` where the columns are in the order of the inputs.
    pub input_order: Option<Vec<u32>>,
}

impl Groups {
    /// Returns groups of neighbours, of which the last may be smaller.
    pub(super) fn of_neighbours(inputs: usize, size: usize) -> Self {
        let unit = greatest_common_divisor(size.min(inputs), inputs).max(1);
        Self { size: unit, of_file: (0..inputs / unit).map(|own| own * unit / size).collect(), input_order: None }
    }

    /// Returns the groups of a list with the group of each input, such as `g_idx` of GPTQ. If neighbouring inputs have
    /// one group as they are, the columns stay in the order of the inputs; otherwise they are sorted by group.
    pub(super) fn of_list(list: &[i64], count: usize) -> Result<Self> {
        let mut groups = Vec::with_capacity(list.len());
        let mut sizes = vec![0; count];
        for &group in list {
            let Some(own) = usize::try_from(group).ok().filter(|own| *own < count) else {
                bail!("expected groups of 0..{count} in the list of groups, found {group}")
            };
            groups.push(own);
            sizes[own] += 1;
        }
        let size = sizes.into_iter().fold(0, greatest_common_divisor).max(1);
        if groups.chunks(size).all(|own| own.iter().all(|group| *group == own[0])) {
            let of_file = groups.iter().step_by(size).copied().collect();
            return Ok(Self { size, of_file, input_order: None });
        }
        let mut order: Vec<u32> = (0..groups.len() as u32).collect();
        order.sort_by_key(|&input| groups[input as usize]);
        let of_file = order.iter().step_by(size).map(|&input| groups[input as usize]).collect();
        Ok(Self { size, of_file, input_order: Some(order) })
    }

    /// Puts a row of codes into the order of the columns.
    pub(super) fn sort_codes(&self, row: &mut [u8]) {
        if let Some(order) = &self.input_order {
            let sorted: Vec<u8> = order.iter().map(|&input| row[input as usize]).collect();
            row.copy_from_slice(&sorted);
        }
    }

    /// Returns the numbers (out, in / size). `at` returns the index of the number of an output and a group of the file.
    pub(super) fn numbers(
        &self,
        outputs: usize,
        numbers: &GroupNumbers,
        at: impl Fn(usize, usize) -> usize,
    ) -> Result<GroupNumbers> {
        let mut indices = Vec::with_capacity(outputs * self.of_file.len());
        for output in 0..outputs {
            for &group in &self.of_file {
                indices.push(at(output, group));
            }
        }
        picked(numbers, &indices)
    }
}

/// Returns some of the numbers, in a new order.
fn picked(numbers: &GroupNumbers, indices: &[usize]) -> Result<GroupNumbers> {
    fn of<T: Copy>(numbers: &[T], indices: &[usize]) -> Vec<T> {
        indices.iter().map(|&index| numbers[index]).collect()
    }
    if indices.iter().any(|&index| index >= numbers.len()) {
        bail!("expected a number for each of the groups, found {}", numbers.len())
    }
    Ok(match numbers {
        GroupNumbers::F16(own) => GroupNumbers::F16(of(own, indices)),
        GroupNumbers::BF16(own) => GroupNumbers::BF16(of(own, indices)),
        GroupNumbers::F32(own) => GroupNumbers::F32(of(own, indices)),
        GroupNumbers::Whole(own) => GroupNumbers::Whole(of(own, indices)),
        GroupNumbers::Bytes { bytes, table } => GroupNumbers::Bytes { bytes: of(bytes, indices), table: table.clone() },
        GroupNumbers::Nested { .. } => bail!("expected one scale for each group, found scales with factors"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_in_any_order_are_sorted_by_group() -> Result<()> {
        let groups = Groups::of_list(&[1, 0, 1, 0, 2, 2], 3)?;
        let expected = Groups { size: 2, of_file: vec![0, 1, 2], input_order: Some(vec![1, 3, 0, 2, 4, 5]) };
        assert_eq!(groups, expected);
        let mut codes = [10, 11, 12, 13, 14, 15];
        groups.sort_codes(&mut codes);
        assert_eq!(codes, [11, 13, 10, 12, 14, 15]);
        Ok(())
    }

    #[test]
    fn groups_of_neighbours_in_another_order_keep_the_order_of_inputs() -> Result<()> {
        let groups = Groups::of_list(&[2, 2, 0, 0, 1, 1], 3)?;
        assert_eq!(groups, Groups { size: 2, of_file: vec![2, 0, 1], input_order: None });
        Ok(())
    }

    #[test]
    fn a_smaller_last_group_has_a_scale_in_smaller_groups() -> Result<()> {
        let expected = Groups { size: 2, of_file: vec![0, 0, 1], input_order: None };
        assert_eq!(Groups::of_neighbours(6, 4), expected);
        assert_eq!(Groups::of_list(&[0, 0, 0, 0, 1, 1], 2)?, expected);
        assert!(Groups::of_list(&[0, 2], 2).is_err());
        Ok(())
    }
}
