//! Cosines and sines of positions, which are computed once in a table that grows.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use candle_attention_kernels::{Workers, for_each_chunk};
use candle_core::{Device, Result, Tensor, bail};

use super::frequencies::{attention_factor, frequencies, is_long};
use super::scaling::RopeScaling;
use super::{RotaryEmbedding, Rotation};
use crate::position::{Latest, Positions, latest};

/// The most entries of a table, 32 MB each of cosines and of sines: positions up to 131,072 of heads of 128.
const TABLE_ENTRIES: usize = 1 << 23;

/// The fewest entries of a task. A table of fewer than two tasks is computed on the calling thread.
const TASK_ENTRIES: usize = 1 << 11;

/// Cosines and sines, a row of r/2 for each position.
#[derive(Debug, Default)]
pub(super) struct Angles {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub half: usize,
    /// Copies on devices.
    copies: Mutex<Vec<AngleTensors>>,
}

/// Cosines and sines on a device, (rows, r/2) each.
#[derive(Debug, Clone)]
pub(super) struct AngleTensors {
    pub cos: Tensor,
    pub sin: Tensor,
}

/// The r/2 cosines and sines of one position.
#[derive(Clone, Copy)]
pub(super) struct AngleRow<'a> {
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Angles {
    /// Returns angles whose rows have `half` cosines and sines.
    pub fn new(cos: Vec<f32>, sin: Vec<f32>, half: usize) -> Self {
        Self { cos, sin, half, copies: Mutex::default() }
    }

    /// Returns both on a device, in f32. They are copied there once.
    pub fn on(&self, device: &Device) -> Result<AngleTensors> {
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.iter().find(|copy| copy.cos.device().location() == device.location()) {
            return Ok(copy.clone());
        }
        let copied = |entries: &[f32]| Tensor::from_slice(entries, (self.rows(), self.half), device);
        let copy = AngleTensors { cos: copied(&self.cos)?, sin: copied(&self.sin)? };
        copies.push(copy.clone());
        Ok(copy)
    }

    pub fn rows(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// Returns the cosines and sines of one row.
    #[inline]
    pub fn row(&self, row: usize) -> AngleRow<'_> {
        let row = row * self.half..(row + 1) * self.half;
        AngleRow { cos: &self.cos[row.clone()], sin: &self.sin[row] }
    }
}

/// The angles of one config and width of heads. Shared between layers and threads.
#[derive(Debug, Default)]
pub(super) struct Tables {
    /// The angles of successive positions: for calls within the original context, and for calls beyond it.
    regular: [RwLock<Arc<Angles>>; 2],
    /// The angles of the latest positions outside of these tables, axis by axis.
    latest: Latest<CallOnAxes, Arc<Angles>>,
}

/// The positions of a call, axis by axis and row by row.
#[derive(Debug, PartialEq)]
struct CallOnAxes {
    positions: Vec<f32>,
    /// The length of the call, by which frequencies may be scaled.
    length: usize,
}

impl RotaryEmbedding {
    /// Returns the rotation of one call, whose tensors are (B, T, H, D). Its length is the largest position + 1.
    ///
    /// # Errors
    /// For a position past the end of given tables.
    pub(crate) fn at(&self, positions: &Positions) -> Result<Rotation> {
        self.at_length(positions, positions.length)
    }

    /// Returns the rotation of one call of a length by which frequencies may be scaled.
    ///
    /// # Errors
    /// As [`at`](Self::at).
    pub(crate) fn at_length(&self, positions: &Positions, length: usize) -> Result<Rotation> {
        let scaling = self.config.scaling();
        let is_long = is_long(scaling, length);
        let table = match &self.given {
            Some(given) if positions.length > given.rows() => {
                bail!("[rope] position {} is past the given tables of {} positions", positions.length - 1, given.rows())
            }
            Some(given) => Some(given.clone()),
            // The frequencies are different for every length.
            None if is_long && matches!(scaling, RopeScaling::Dynamic { .. }) => None,
            None => self.table(&self.tables.regular[usize::from(is_long)], positions, length),
        };
        match table {
            Some(angles) => Ok(self.rotation(angles, positions.entries.as_slice().into())),
            None => {
                let on_one_axis: Vec<_> = positions.entries.iter().map(|&position| position as f32).collect();
                self.on_axes_of_length(&on_one_axis.repeat(self.config.num_axes()), length)
            }
        }
    }

    /// Returns the rotation at positions on the config's axes, axis by axis and row by row.
    pub(crate) fn on_axes(&self, positions: &[f32]) -> Result<Rotation> {
        let length = positions.iter().map(|&entry| entry.max(0.0) as usize + 1).max();
        self.on_axes_of_length(positions, length.unwrap_or(0))
    }

    fn on_axes_of_length(&self, positions: &[f32], length: usize) -> Result<Rotation> {
        let rows = positions.len() / self.config.num_axes();
        let compute = || Ok(self.angles(length, rows, |axis, row| positions[axis * rows + row]));
        let is_same = |call: &CallOnAxes| call.length == length && call.positions == positions;
        let key = |_: &Arc<Angles>| Some(CallOnAxes { positions: positions.to_vec(), length });
        let angles = latest(&self.tables.latest, is_same, compute, key)?;
        Ok(self.rotation(angles, (0..rows as u32).collect()))
    }

    fn rotation(&self, angles: Arc<Angles>, index: Arc<[u32]>) -> Rotation {
        Rotation { angles, index, style: self.config.style(), parts: self.config.parts(), inverse: false }
    }

    /// Returns the number of pairs, r/2.
    pub(super) fn half(&self) -> usize {
        self.config.rotary_dim(self.head_dim) / 2
    }

    /// Returns a table up to the last position, for calls of a length; `None` if most of it would be computed for a few
    /// large positions.
    fn table(&self, table: &RwLock<Arc<Angles>>, positions: &Positions, length: usize) -> Option<Arc<Angles>> {
        let angles = table.read().unwrap_or_else(PoisonError::into_inner).clone();
        let needed = positions.length;
        let rows = angles.rows();
        if needed <= rows {
            return Some(angles);
        }
        let most = TABLE_ENTRIES / self.half();
        if needed > most || needed > (4 * positions.entries.len()).max(2 * rows).max(256) {
            return None;
        }
        // Not under the lock: a thread that computes rows may steal work that needs the same lock.
        let grown = self.angles(length, needed.next_power_of_two().min(most), |_, row| row as f32);
        let mut current = table.write().unwrap_or_else(PoisonError::into_inner);
        if grown.rows() > current.rows() {
            *current = grown;
        }
        Some(current.clone())
    }

    /// Computes the angles of a call of some length, which is its largest position + 1. `position(axis, row)` returns
    /// the position of a row on an axis.
    fn angles(&self, length: usize, rows: usize, position: impl Fn(usize, usize) -> f32 + Sync) -> Arc<Angles> {
        let half = self.half();
        let factor = attention_factor(self.config.scaling()) as f32;
        let mut pairs = frequencies(&self.config, half, length);
        if let Some(factors) = &self.frequency_factors {
            for (pair, own) in pairs.iter_mut().zip(factors.iter()) {
                pair.frequency *= own;
            }
        }
        let mut all_cos = vec![0.0; rows * half];
        let mut all_sin = vec![0.0; rows * half];
        let rows_of_task = TASK_ENTRIES.div_ceil(half);
        let workers = Workers::for_tasks(rows.div_ceil(rows_of_task));
        let fill = |table: &mut [f32], function: fn(f64) -> f64| {
            for_each_chunk(table, rows_of_task * half, workers, &|task, chunk| {
                for (n, numbers) in chunk.chunks_mut(half).enumerate() {
                    let row = task * rows_of_task + n;
                    for (number, pair) in numbers.iter_mut().zip(&pairs) {
                        let angle = f64::from(position(pair.axis, row) * pair.frequency);
                        *number = function(angle) as f32 * factor;
                    }
                }
            });
        };
        fill(&mut all_cos, f64::cos);
        fill(&mut all_sin, f64::sin);
        Arc::new(Angles::new(all_cos, all_sin, half))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::RopeConfig;

    fn rotary(scaling: RopeScaling) -> Result<RotaryEmbedding> {
        RotaryEmbedding::new(&RopeConfig::new(10_000.0).with_scaling(scaling), 8)
    }

    /// Returns the cosines of each position.
    fn cosines(rotary: &RotaryEmbedding, positions: &Positions) -> Vec<f32> {
        let Rotation { angles, index, .. } = rotary.at(positions).expect("no table is given");
        index.iter().flat_map(|&row| angles.row(row as usize).cos.to_vec()).collect()
    }

    #[test]
    fn rope_table_is_computed_once_and_doubles() -> Result<()> {
        let rotary = rotary(RopeScaling::None)?;
        let first = rotary.at(&Positions::starting_at(&[0], 100)?)?.angles;
        assert_eq!(first.rows(), 128);
        let within = rotary.at(&Positions::starting_at(&[127], 1)?)?;
        assert!(Arc::ptr_eq(&first, &within.angles) && *within.index == [127]);
        let next = rotary.at(&Positions::starting_at(&[128], 1)?)?.angles;
        assert_eq!((next.rows(), &next.cos[..128 * 4]), (256, first.cos.as_slice()));
        Ok(())
    }

    #[test]
    fn rope_far_positions_are_computed_without_a_table_and_once_for_all_layers() -> Result<()> {
        let rotary = rotary(RopeScaling::None)?;
        let far = Positions::starting_at(&[100_000, 1 << 23], 1)?;
        let rows = rotary.at(&far)?;
        assert_eq!((rows.angles.rows(), &*rows.index), (2, [0, 1].as_slice()));
        assert!(Arc::ptr_eq(&rows.angles, &rotary.at(&far)?.angles));
        let long = Positions::starting_at(&[0], 100_001)?;
        assert_eq!(cosines(&rotary, &far)[..4], cosines(&rotary, &long)[100_000 * 4..]);
        Ok(())
    }

    #[test]
    fn rope_dynamic_and_longrope_frequencies_depend_on_the_length_of_the_call() -> Result<()> {
        let dynamic = rotary(RopeScaling::Dynamic { factor: 2.0, original_context: 8 })?;
        let long = RopeScaling::LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![2.0; 4],
            original_context: 8,
            factor: None,
            attention_factor: None,
        };
        let long = rotary(long)?;
        let none = rotary(RopeScaling::None)?;
        let within = Positions::starting_at(&[0], 8)?;
        for rotary in [&dynamic, &long] {
            assert_eq!(cosines(rotary, &within), cosines(&none, &within));
        }
        let half = cosines(&none, &Positions::starting_at(&[2], 1)?);
        assert_eq!(cosines(&long, &Positions::starting_at(&[0], 9)?)[4 * 4..][..4], half);
        // Position 3 in calls of two lengths, then in the first again.
        let [nine, ten] = [9, 10].map(|t| Positions::starting_at(&[0], t));
        let at_3 = |positions: &Positions| cosines(&dynamic, positions)[3 * 4..][..4].to_vec();
        let nine = nine?;
        let ten = ten?;
        assert!(at_3(&nine) != at_3(&ten) && at_3(&nine) != at_3(&within));
        assert_eq!(at_3(&nine), at_3(&nine));
        Ok(())
    }

    #[test]
    fn rope_threads_share_one_table() -> Result<()> {
        let rotary = rotary(RopeScaling::None)?;
        let starting_at = |thread: usize, t: usize| Positions::starting_at(&[thread], t).expect("few positions");
        std::thread::scope(|scope| {
            let work = |thread| {
                let rotary = &rotary;
                scope.spawn(move || (1..300).map(|t| cosines(rotary, &starting_at(thread, t))).next_back())
            };
            let threads: Vec<_> = (0..4).map(work).collect();
            for (thread, found) in threads.into_iter().enumerate() {
                let found = found.join().expect("no panic").expect("the last of many");
                assert_eq!(found, cosines(&rotary, &starting_at(thread, 299)));
            }
        });
        Ok(())
    }
}
