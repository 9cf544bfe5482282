//! Cosines and sines of positions: computed once, in a table that grows; and the frequencies of each scaling, in f32 as
//! Hugging Face's `modeling_rope_utils.py` computes them.
//!
//! Each step rounds where the original's does. Powers are rounded correctly, as in PyTorch's scalar build; its
//! vectorised builds differ in the last digit of about one power in eighty, and not all in the same ones.

use std::f64::consts::PI;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use candle_core::{Device, DeviceLocation, Result, Tensor, bail};
use rayon::prelude::*;

use super::RopeAxisLayout;
use super::config::{RopeConfig, RopeScaling};
use crate::position::{AxisPositions, Latest, Positions, latest};

/// The most entries of a table, 32 MB each of cosines and of sines: positions up to 131,072 of heads of 128.
const TABLE_ENTRIES: usize = 1 << 23;

/// The fewest entries that are worth a task of their own.
const TASK_ENTRIES: usize = 1 << 11;

/// Cosines and sines, a row of r/2 for each position.
#[derive(Debug, Default)]
pub(super) struct Angles {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    pub half: usize,
    copies: Mutex<Vec<DeviceAngles>>,
}

impl Angles {
    /// `position` gives that of a row for a pair.
    fn of(rows: usize, position: impl Fn(usize, usize) -> f32 + Sync, frequencies: &[f32], factor: f32) -> Self {
        let half = frequencies.len();
        let (mut cos, mut sin) = (vec![0.0; rows * half], vec![0.0; rows * half]);
        let compute = |(row, (cos, sin)): (usize, (&mut [f32], &mut [f32]))| {
            for (i, &frequency) in frequencies.iter().enumerate() {
                let (s, c) = f64::from(position(row, i) * frequency).sin_cos();
                (cos[i], sin[i]) = (c as f32 * factor, s as f32 * factor);
            }
        };
        if cos.len() <= TASK_ENTRIES {
            cos.chunks_mut(half).zip(sin.chunks_mut(half)).enumerate().for_each(compute);
        } else {
            let rows = cos.par_chunks_mut(half).zip(sin.par_chunks_mut(half)).enumerate();
            rows.with_min_len(TASK_ENTRIES.div_ceil(half)).for_each(compute);
        }
        Self::given(cos, sin, half)
    }

    /// Rows of `half` cosines and sines.
    pub fn given(cos: Vec<f32>, sin: Vec<f32>, half: usize) -> Self {
        Self { cos, sin, half, copies: Mutex::default() }
    }

    /// On a device, where they are copied once.
    pub fn on(&self, device: &Device) -> Result<DeviceAngles> {
        let location = device.location();
        let mut copies = self.copies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(copy) = copies.iter().find(|copy| copy.location == location) {
            return Ok(copy.clone());
        }
        let shape = (self.rows(), self.half);
        let [cos, sin] = [&self.cos, &self.sin].map(|entries| Tensor::from_slice(entries, shape, device));
        let copy = DeviceAngles { location, cos: cos?, sin: sin? };
        copies.push(copy.clone());
        Ok(copy)
    }

    pub fn rows(&self) -> usize {
        self.cos.len().checked_div(self.half).unwrap_or(0)
    }

    /// The cosines and sines of one row.
    #[inline]
    pub fn row(&self, row: usize) -> (&[f32], &[f32]) {
        let row = row * self.half..(row + 1) * self.half;
        (&self.cos[row.clone()], &self.sin[row])
    }
}

/// Cosines and sines on a device, (rows, r/2) each in f32.
#[derive(Debug, Clone)]
pub(super) struct DeviceAngles {
    location: DeviceLocation,
    pub cos: Tensor,
    pub sin: Tensor,
}

/// Where the angles of one call stand.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub angles: Arc<Angles>,
    /// The row of each position of the call, in the positions' order.
    pub index: Arc<[u32]>,
}

/// The tables of one config, which grow with the positions that are asked for. Shared between layers and threads.
#[derive(Debug)]
pub(super) struct Tables {
    pub config: RopeConfig,
    pub head_dim: usize,
    /// For calls within the original context, and beyond it.
    regular: [RwLock<Arc<Angles>>; 2],
    /// For positions that no table holds.
    latest: Latest<(ContextRange, Positions), Arc<Angles>>,
    latest_on_axes: Latest<AxisPositions, Arc<Angles>>,
    /// A table that was given and does not grow.
    given: Option<Arc<Angles>>,
}

impl Tables {
    /// Empty tables of a config that fits the heads.
    pub fn new(config: &RopeConfig, head_dim: usize) -> Self {
        Self {
            config: config.clone(),
            head_dim,
            regular: Default::default(),
            latest: Latest::default(),
            latest_on_axes: Latest::default(),
            given: None,
        }
    }

    /// A table with a row for each position up to its end.
    pub fn given(config: &RopeConfig, head_dim: usize, angles: Angles) -> Self {
        Self { given: Some(Arc::new(angles)), ..Self::new(config, head_dim) }
    }

    /// For positions on the config's axes.
    pub fn rows_on_axes(&self, positions: &AxisPositions) -> Result<Rows> {
        let rows = positions.rows();
        let compute = || {
            let axis_of = self.config.axes().map(|axes| axes.axis_of_pairs()).unwrap_or_default();
            let position = |row: usize, pair: usize| positions.at(axis_of[pair], row);
            Ok(self.angles(ContextRange::of(self.config.scaling(), positions.length()), rows, position))
        };
        let angles = latest(&self.latest_on_axes, |own| own == positions, compute, |_| Some(positions.clone()))?;
        Ok(Rows { angles, index: (0..rows as u32).collect() })
    }

    /// # Errors
    /// For a position past the end of a given table.
    pub fn rows(&self, positions: &Positions) -> Result<Rows> {
        if let Some(angles) = &self.given {
            if positions.length > angles.rows() {
                let (last, rows) = (positions.length - 1, angles.rows());
                bail!("[rope] position {last} is past the given tables of {rows} positions")
            }
            return Ok(Rows { angles: angles.clone(), index: positions.entries.as_slice().into() });
        }
        let range = ContextRange::of(self.config.scaling(), positions.length);
        let table = match range {
            ContextRange::Short => Some(&self.regular[0]),
            ContextRange::Long => Some(&self.regular[1]),
            ContextRange::DynamicNtk(_) => None,
        };
        if let Some(angles) = table.and_then(|table| self.table(table, range, positions)) {
            return Ok(Rows { angles, index: positions.entries.as_slice().into() });
        }
        let entries = &positions.entries;
        let compute = || Ok(self.angles(range, entries.len(), |row, _| entries[row] as f32));
        let is_same = |(own, of): &(ContextRange, Positions)| (own, of) == (&range, positions);
        let angles = latest(&self.latest, is_same, compute, |_| Some((range, positions.clone())))?;
        Ok(Rows { angles, index: (0..entries.len() as u32).collect() })
    }

    /// A table that reaches to the last position, unless most of it would be computed for a few far positions.
    fn table(&self, table: &RwLock<Arc<Angles>>, range: ContextRange, positions: &Positions) -> Option<Arc<Angles>> {
        let angles = table.read().unwrap_or_else(PoisonError::into_inner).clone();
        let (length, rows) = (positions.length, angles.rows());
        if length <= rows {
            return Some(angles);
        }
        let most = TABLE_ENTRIES / (self.config.rotary_dim(self.head_dim) / 2);
        if length > most || length > (4 * positions.entries.len()).max(2 * rows).max(256) {
            return None;
        }
        // Not under the lock: a thread that computes rows may meanwhile take up other work that wants the table.
        let grown = self.angles(range, length.next_power_of_two().min(most), |row, _| row as f32);
        let mut current = table.write().unwrap_or_else(PoisonError::into_inner);
        if grown.rows() > current.rows() {
            *current = grown;
        }
        Some(current.clone())
    }

    fn angles(&self, range: ContextRange, rows: usize, position: impl Fn(usize, usize) -> f32 + Sync) -> Arc<Angles> {
        let frequencies = frequencies(&self.config, self.head_dim, range);
        Arc::new(Angles::of(rows, position, &frequencies, attention_factor(self.config.scaling()) as f32))
    }
}

/// Which frequencies a call has, by its length: its largest position + 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ContextRange {
    /// Those of every call, or of calls within the original context.
    Short,
    /// Those of all calls beyond the original context.
    Long,
    /// Those of calls of exactly this length.
    DynamicNtk(usize),
}

impl ContextRange {
    fn of(scaling: &RopeScaling, length: usize) -> Self {
        match scaling {
            RopeScaling::Dynamic { original_context, .. } if length > *original_context => Self::DynamicNtk(length),
            RopeScaling::LongRope { original_context, .. } if length > *original_context => Self::Long,
            _ => Self::Short,
        }
    }
}

/// The angle between one position and the next for each pair, (r/2,). The config fits the heads.
fn frequencies(config: &RopeConfig, head_dim: usize, range: ContextRange) -> Vec<f32> {
    let r = config.rotary_dim(head_dim);
    let base = config.base() as f32;
    let plain = || periods(base, r).map(f32::recip);
    match config.scaling() {
        RopeScaling::None => match config.axes().map(|axes| (axes.layout(), axes.sections())) {
            Some((RopeAxisLayout::Axial, sections)) => {
                sections.iter().flat_map(|section| periods(base, 2 * section).map(f32::recip)).collect()
            }
            Some((RopeAxisLayout::AxialDealt, sections)) => {
                let dealt = |axis: usize| plain().skip(axis).step_by(sections.len()).take(sections[axis]);
                (0..sections.len()).flat_map(dealt).collect()
            }
            _ => plain().collect(),
        },
        RopeScaling::Linear { factor } => plain().map(|frequency| frequency / *factor as f32).collect(),
        RopeScaling::Dynamic { factor, original_context } => {
            let ContextRange::DynamicNtk(length) = range else {
                return plain().collect();
            };
            let stretch = *factor as f32 * length as f32 / *original_context as f32 - (factor - 1.0) as f32;
            let base = base * power(stretch, r as f64 / (r as f64 - 2.0));
            periods(base, r).map(f32::recip).collect()
        }
        &RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let context = original_context as f64;
            let scale = |frequency: f32| {
                // PyTorch divides a number by a tensor as its product with the reciprocals.
                let wavelength = frequency.recip() * (2.0 * PI) as f32;
                if wavelength > (context / low_freq_factor) as f32 {
                    return frequency / factor as f32;
                }
                if wavelength < (context / high_freq_factor) as f32 {
                    return frequency;
                }
                let range = (high_freq_factor - low_freq_factor) as f32;
                let smooth = (wavelength.recip() * context as f32 - low_freq_factor as f32) / range;
                (1.0 - smooth) * frequency / factor as f32 + smooth * frequency
            };
            plain().map(scale).collect()
        }
        &RopeScaling::Yarn { factor, original_context, beta_fast, beta_slow, truncate, .. } => {
            let boundary = |rotations: f64| {
                let numerator = r as f64 * (original_context as f64 / (rotations * 2.0 * PI)).ln();
                numerator / (2.0 * config.base().ln())
            };
            let (mut low, mut high) = (boundary(beta_fast), boundary(beta_slow));
            if truncate {
                (low, high) = (low.floor(), high.ceil());
            }
            (low, high) = (low.max(0.0), high.min(r as f64 - 1.0));
            if low == high {
                high += 0.001;
            }
            let scale = |(i, period): (usize, f32)| {
                let ramp = ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let kept = 1.0 - ramp;
                (factor as f32 * period).recip() * (1.0 - kept) + period.recip() * kept
            };
            periods(base, r).enumerate().map(scale).collect()
        }
        RopeScaling::LongRope { short_factor, long_factor, .. } => {
            let divisors = if range == ContextRange::Long { long_factor } else { short_factor };
            let scale = |(period, &divisor): (f32, &f64)| (divisor as f32 * period).recip();
            periods(base, r).zip(divisors).map(scale).collect()
        }
        RopeScaling::Proportional { factor, proportion } => {
            let rotated = (proportion * r as f64 / 2.0).floor() as usize;
            let scale = |(i, frequency)| {
                if i < rotated { frequency / *factor as f32 } else { 0.0 }
            };
            plain().enumerate().map(scale).collect()
        }
    }
}

/// The factor on cosines and sines.
fn attention_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { attention_factor: Some(given), .. }
        | RopeScaling::LongRope { attention_factor: Some(given), .. } => given,
        RopeScaling::Yarn { factor, mscale, mscale_all_dim, .. } => match (mscale, mscale_all_dim) {
            (Some(one), Some(all)) if one != 0.0 && all != 0.0 => yarn_mscale(factor, one) / yarn_mscale(factor, all),
            _ => yarn_mscale(factor, 1.0),
        },
        RopeScaling::LongRope { factor: Some(factor), original_context, .. } if factor > 1.0 => {
            (1.0 + factor.ln() / (original_context as f64).ln()).sqrt()
        }
        _ => 1.0,
    }
}

/// The factor by which DeepSeek corrects the scale of its scores.
pub(crate) fn score_factor(scaling: &RopeScaling) -> f64 {
    match *scaling {
        RopeScaling::Yarn { factor, mscale_all_dim: Some(all), .. } => yarn_mscale(factor, all).powi(2),
        _ => 1.0,
    }
}

/// YaRN's correction of the size of the scores.
fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
}

/// `base^(2i/r)` for each pair.
fn periods(base: f32, r: usize) -> impl Iterator<Item = f32> {
    (0..r).step_by(2).map(move |i| power(base, (i as f32 / r as f32).into()))
}

fn power(base: f32, exponent: f64) -> f32 {
    f64::from(base).powf(exponent) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(scaling: RopeScaling) -> Tables {
        Tables::new(&RopeConfig::new(10_000.0).with_scaling(scaling), 8)
    }

    /// The cosines of each position, whichever way they were found.
    fn cosines(tables: &Tables, positions: &Positions) -> Vec<f32> {
        let Rows { angles, index } = tables.rows(positions).expect("no table is given");
        index.iter().flat_map(|&row| angles.row(row as usize).0.to_vec()).collect()
    }

    #[test]
    fn a_table_is_computed_once_and_grows_by_doubling() -> Result<()> {
        let tables = tables(RopeScaling::None);
        let first = tables.rows(&Positions::starting_at(&[0], 100)?)?.angles;
        assert_eq!(first.rows(), 128);
        let within = tables.rows(&Positions::starting_at(&[127], 1)?)?;
        assert!(Arc::ptr_eq(&first, &within.angles) && *within.index == [127]);
        let next = tables.rows(&Positions::starting_at(&[128], 1)?)?.angles;
        assert_eq!((next.rows(), &next.cos[..128 * 4]), (256, first.cos.as_slice()));
        Ok(())
    }

    #[test]
    fn far_positions_alone_are_computed_alone_and_for_all_layers() -> Result<()> {
        let tables = tables(RopeScaling::None);
        let far = Positions::starting_at(&[100_000, 1 << 23], 1)?;
        let rows = tables.rows(&far)?;
        assert_eq!((rows.angles.rows(), &*rows.index), (2, [0, 1].as_slice()));
        assert!(Arc::ptr_eq(&rows.angles, &tables.rows(&far)?.angles));
        let long = Positions::starting_at(&[0], 100_001)?;
        assert_eq!(cosines(&tables, &far)[..4], cosines(&tables, &long)[100_000 * 4..]);
        Ok(())
    }

    #[test]
    fn frequencies_follow_the_length_of_the_call() -> Result<()> {
        let dynamic = tables(RopeScaling::Dynamic { factor: 2.0, original_context: 8 });
        let long = RopeScaling::LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![2.0; 4],
            original_context: 8,
            factor: None,
            attention_factor: None,
        };
        let (long, none) = (tables(long), tables(RopeScaling::None));
        let within = Positions::starting_at(&[0], 8)?;
        for tables in [&dynamic, &long] {
            assert_eq!(cosines(tables, &within), cosines(&none, &within));
        }
        let half = cosines(&none, &Positions::starting_at(&[2], 1)?);
        assert_eq!(cosines(&long, &Positions::starting_at(&[0], 9)?)[4 * 4..][..4], half);
        // Position 3 in calls of two lengths, then in the first again.
        let [nine, ten] = [9, 10].map(|t| Positions::starting_at(&[0], t));
        let at_3 = |positions: &Positions| cosines(&dynamic, positions)[3 * 4..][..4].to_vec();
        let (nine, ten) = (nine?, ten?);
        assert!(at_3(&nine) != at_3(&ten) && at_3(&nine) != at_3(&within));
        assert_eq!(at_3(&nine), at_3(&nine));
        Ok(())
    }

    #[test]
    fn threads_share_one_table() -> Result<()> {
        let tables = tables(RopeScaling::None);
        let starting_at = |thread: usize, t: usize| Positions::starting_at(&[thread], t).expect("few positions");
        std::thread::scope(|scope| {
            let work = |thread| {
                let tables = &tables;
                scope.spawn(move || (1..300).map(|t| cosines(tables, &starting_at(thread, t))).next_back())
            };
            let threads: Vec<_> = (0..4).map(work).collect();
            for (thread, found) in threads.into_iter().enumerate() {
                let found = found.join().expect("no panic").expect("the last of many");
                assert_eq!(found, cosines(&tables, &starting_at(thread, 299)));
            }
        });
        Ok(())
    }
}
