//! Random calls: a recipe is small, prints on one line and shrinks; its case has the numbers.

use candle_core::{DType, Device};
use proptest::prelude::*;
use proptest::sample::select;

pub use crate::array::Layout;
use crate::array::{Array, Random, View, round};
pub use crate::common::property::for_all;
use crate::common::property::within;
use crate::oracle::{Alignment, Case, Dims, Lens, Mask, Options, Part};

/// The shape of a boolean mask or a bias, which is broadcast to (B, H, T_q, T_kv).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskShape {
    Scalar,
    Keys,
    Queries,
    Square,
    Sequence,
    Head,
    Whole,
    /// A whole one that is a view with strides of 0.
    Expanded,
    /// A whole one whose keys are not contiguous.
    Transposed,
    /// Heads, queries and keys in the middle of more of each.
    Narrowed,
}

impl MaskShape {
    pub const ALL: [Self; 10] = {
        use MaskShape::*;
        [Scalar, Keys, Queries, Square, Sequence, Head, Whole, Expanded, Transposed, Narrowed]
    };

    fn array(self, dims: &Dims) -> Array {
        let Dims { b, h, t_q, t_kv, .. } = *dims;
        match self {
            Self::Scalar => Array::new(&[]),
            Self::Keys => Array::new(&[t_kv]),
            Self::Queries => Array::new(&[t_q, 1]),
            Self::Square => Array::new(&[t_q, t_kv]),
            Self::Sequence => Array::new(&[b, 1, 1, t_kv]),
            Self::Head => Array::new(&[h, t_q, t_kv]),
            Self::Whole => Array::new(&[b, h, t_q, t_kv]),
            Self::Expanded => Array::new(&[b, 1, 1, t_kv]).view(View::Broadcast(vec![b, h, t_q, t_kv])),
            Self::Transposed => Array::new(&[b, h, t_kv, t_q]).view(View::Transpose(2, 3)),
            Self::Narrowed => Array::new(&[h + 2, t_q + 4, t_kv + 3])
                .view(View::Narrow { dim: 0, start: 1, len: h })
                .view(View::Narrow { dim: 1, start: 3, len: t_q })
                .view(View::Narrow { dim: 2, start: 2, len: t_kv }),
        }
    }
}

/// One constraint, without its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Causal,
    UpperLeft,
    Offset,
    Offsets,
    ValidLens,
    ValidLensPerQuery,
    Starts,
    StartsPerQuery,
    Window,
    LocalWindow,
    Chunk,
    Prefix,
    PrefixPerQuery,
    BoolMask(MaskShape),
    Bias(MaskShape),
}

impl Kind {
    pub fn all() -> Vec<Self> {
        use Kind::*;
        let alignments = [Causal, UpperLeft, Offset, Offsets];
        let intervals = [ValidLens, ValidLensPerQuery, Starts, StartsPerQuery, Window, LocalWindow, Chunk];
        let intervals = alignments.into_iter().chain(intervals).chain([Prefix, PrefixPerQuery]);
        intervals.chain(MaskShape::ALL.map(BoolMask)).chain(MaskShape::ALL.map(Bias)).collect()
    }

    pub fn is_tensor(self) -> bool {
        matches!(self, Self::BoolMask(_) | Self::Bias(_))
    }

    /// Draws an alignment or a part of a mask.
    fn drawn(self, dims: &Dims, dtype: DType, random: &mut Random) -> (Alignment, Option<Part>) {
        let Dims { b, t_q, t_kv, .. } = *dims;
        let part = match self {
            Self::Causal => return (Alignment::Causal, None),
            Self::UpperLeft => return (Alignment::UpperLeft, None),
            Self::Offset => return (Alignment::Offset(random.up_to(t_kv + 1)), None),
            // From masks in which no query attends to a key to masks in which all attend to all.
            Self::Offsets => {
                let mut offset = || random.up_to(t_q + t_kv + 2) as i64 - t_q as i64 - 1;
                return (Alignment::Offsets((0..b).map(|_| offset()).collect()), None);
            }
            Self::ValidLens => Part::ValidLens(lens(random, b, t_kv + 2)),
            Self::Starts => Part::Starts(lens(random, b, t_kv + 1)),
            Self::Prefix => Part::Prefix(lens(random, b, t_kv + 1)),
            Self::ValidLensPerQuery => Part::ValidLens(table(random, [b, t_q], t_kv + 2)),
            Self::StartsPerQuery => Part::Starts(table(random, [b, t_q], t_kv + 1)),
            Self::PrefixPerQuery => Part::Prefix(table(random, [b, t_q], t_kv + 1)),
            Self::Window => Part::Window(1 + random.up_to(t_kv + 1)),
            Self::LocalWindow => Part::LocalWindow(random.up_to(3), random.up_to(3)),
            Self::Chunk => Part::Chunk(1 + random.up_to(t_kv + 1)),
            Self::BoolMask(reach) => {
                Part::BoolMask(reach.array(dims).filled(|| f64::from(u8::from(random.up_to(9) >= 4))))
            }
            Self::Bias(reach) => {
                let number = || if random.chance(0.15) { f64::NEG_INFINITY } else { random.between(-3.0, 3.0) };
                Part::Bias(reach.array(dims).filled(number).rounded(wide(dtype)))
            }
        };
        (Alignment::Free, Some(part))
    }
}

fn lens(random: &mut Random, b: usize, most: usize) -> Lens {
    Lens::PerSequence((0..b).map(|_| random.up_to(most)).collect())
}

fn table(random: &mut Random, [b, t_q]: [usize; 2], most: usize) -> Lens {
    Lens::PerQuery((0..b).map(|_| (0..t_q).map(|_| random.up_to(most)).collect()).collect())
}

/// Which options are set.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Chosen {
    pub scale: bool,
    pub softcap: bool,
    pub alibi: bool,
    pub sinks: bool,
    pub relative_bias: bool,
}

impl Chosen {
    pub const ALL: Self = Self { scale: true, softcap: true, alibi: true, sinks: true, relative_bias: true };

    /// Returns every set of options.
    pub fn sets() -> Vec<Self> {
        let mut sets = vec![Self::default()];
        let mut add = |with: fn(Self) -> Self| sets.extend(sets.clone().into_iter().map(with));
        add(|chosen| Self { scale: true, ..chosen });
        add(|chosen| Self { softcap: true, ..chosen });
        add(|chosen| Self { alibi: true, ..chosen });
        add(|chosen| Self { sinks: true, ..chosen });
        add(|chosen| Self { relative_bias: true, ..chosen });
        sets
    }
}

#[derive(Debug, Clone)]
pub struct Recipe {
    pub dims: Dims,
    pub layouts: [Layout; 3],
    /// Masks that are joined by `and`; one mask has at most one alignment.
    pub masks: Vec<Vec<Kind>>,
    pub uniform_fully_masked_rows: bool,
    pub chosen: Chosen,
    /// Instead of a random one.
    pub scale: Option<f64>,
    /// Whether masked entries of boolean masks, and -inf of biases, are in runs that cover whole tiles.
    pub masks_runs: bool,
    pub dtype: DType,
    /// The seed of the numbers.
    pub seed: u64,
}

/// Returns the dtype of biases, slopes and sinks: that of the scores.
pub fn wide(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

impl Recipe {
    /// Returns a recipe of contiguous tensors without options.
    pub fn plain(dims: Dims, masks: Vec<Vec<Kind>>, dtype: DType) -> Self {
        let layouts = [Layout::Contiguous; 3];
        let chosen = Chosen::default();
        Self {
            dims,
            layouts,
            masks,
            uniform_fully_masked_rows: false,
            chosen,
            scale: None,
            masks_runs: false,
            dtype,
            seed: 0,
        }
    }

    /// Returns a call of one mask, whose tensors mask whole tiles.
    pub fn of_kernel(dims: Dims, mask: Vec<Kind>, dtype: DType) -> Self {
        let seed = (dims.t_q * 1000 + dims.t_kv * 100 + dims.d * 10 + dims.d_v) as u64;
        Self { masks_runs: true, seed, ..Self::plain(dims, vec![mask], dtype) }
    }

    pub fn case(&self) -> Case {
        let mut random = Random::new(self.seed);
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let shapes = [[b, h, t_q, d], [b, h_kv, t_kv, d], [b, h_kv, t_kv, d_v]];
        let mut draw = |n: usize| self.layouts[n].array(shapes[n]).uniform(&mut random, 2.0, self.dtype);
        let q = draw(0);
        let k = draw(1);
        let v = draw(2);
        let masks = self.masks.iter().flat_map(|kinds| self.masks(kinds, &mut random)).collect();
        let mut heads = |low: f64, high: f64| -> Vec<f64> {
            (0..h).map(|_| round(random.between(low, high), wide(self.dtype))).collect()
        };
        let options = Options {
            scale: self.scale.or_else(|| self.chosen.scale.then(|| heads(-1.5, 1.5)[0])),
            softcap: self.chosen.softcap.then(|| heads(0.5, 6.0)[0]),
            alibi_slopes: self.chosen.alibi.then(|| heads(-0.1, 1.0)),
            sinks: self.chosen.sinks.then(|| heads(-4.0, 4.0)),
            relative_bias: self.chosen.relative_bias.then(|| {
                // Of each sequence, or of all.
                let b = if self.seed.is_multiple_of(2) { b } else { 1 };
                let biases = self.layouts[2].array([b, h, 1, (t_q + t_kv).saturating_sub(1)]);
                biases.uniform(&mut random, 2.0, wide(self.dtype))
            }),
        };
        let mut case = Case {
            dims: self.dims,
            q,
            k,
            v,
            masks,
            uniform_fully_masked_rows: self.uniform_fully_masked_rows,
            options,
        };
        if !case.positions_agree() {
            // ALiBi has no position to count from, which is an error.
            case.options.alibi_slopes = None;
        }
        let parts = case.masks.iter_mut().flat_map(|mask| &mut mask.parts).filter(|_| self.masks_runs);
        for part in parts {
            match part {
                Part::BoolMask(mask) => mask_runs(mask, 0.0, &mut random),
                Part::Bias(bias) => mask_runs(bias, f64::NEG_INFINITY, &mut random),
                _ => {}
            }
        }
        case
    }

    fn masks(&self, kinds: &[Kind], random: &mut Random) -> Vec<Mask> {
        let free = || Mask::new(Alignment::Free, []);
        let mut masks = vec![free()];
        for &kind in kinds {
            let (alignment, part) = kind.drawn(&self.dims, self.dtype, random);
            let is_aligned = alignment != Alignment::Free;
            if is_aligned && masks.last().is_some_and(|mask| mask.alignment != Alignment::Free) {
                masks.push(free());
            }
            let mask = masks.last_mut().expect("there is at least one");
            if is_aligned {
                mask.alignment = alignment;
            }
            mask.parts.extend(part);
        }
        masks
    }
}

/// Sets runs of up to 400 entries to `masked`, with runs of other entries between them.
fn mask_runs(array: &mut Array, masked: f64, random: &mut Random) {
    let mut rest = array.data.as_mut_slice();
    while !rest.is_empty() {
        let longest = [40, 400][random.up_to(1)];
        let (attended, tail) = rest.split_at_mut(random.up_to(longest).min(rest.len()));
        if random.chance(0.5) {
            attended.fill(if masked == 0.0 { 1.0 } else { 0.5 });
        }
        let (run, tail) = tail.split_at_mut((1 + random.up_to(longest)).min(tail.len()));
        run.fill(masked);
        rest = tail;
    }
}

/// Draws sizes up to `most`, sometimes 0 or 1.
fn size(most: usize) -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 2 => Just(1), 27 => 1..=most]
}

pub fn dims() -> impl Strategy<Value = Dims> {
    (size(3), 1..=3usize, 1..=3usize, size(7), size(9), 1..=9usize, size(9))
        .prop_map(|(b, h_kv, group, t_q, t_kv, d, d_v)| Dims { b, h: h_kv * group, h_kv, t_q, t_kv, d, d_v })
}

fn recipes_of(dims: impl Strategy<Value = Dims>, dtypes: &'static [DType]) -> impl Strategy<Value = Recipe> {
    let kinds = proptest::collection::vec(select(Kind::all()), 0..=3);
    let layout = || select(&Layout::ALL[..]);
    let chosen = select(Chosen::sets());
    let masks = proptest::collection::vec(kinds, 0..=2);
    let layouts = [layout(), layout(), layout()];
    (dims, layouts, masks, chosen, select(dtypes), any::<u64>().no_shrink()).prop_map(
        |(dims, layouts, masks, chosen, dtype, seed)| Recipe {
            layouts,
            chosen,
            seed,
            ..Recipe::plain(dims, masks, dtype)
        },
    )
}

/// Draws small calls, empty ones among them.
pub fn recipes(dtypes: &'static [DType]) -> impl Strategy<Value = Recipe> {
    (recipes_of(dims(), dtypes), proptest::bool::weighted(0.2))
        .prop_map(|(recipe, uniform_fully_masked_rows)| Recipe { uniform_fully_masked_rows, ..recipe })
}

/// Lengths around multiples of 16, and primes.
pub const LENGTHS: [usize; 34] = [
    1, 2, 3, 5, 7, 8, 11, 13, 15, 16, 17, 29, 31, 32, 33, 47, 48, 49, 53, 63, 64, 65, 97, 101, 127, 128, 129, 191, 211,
    255, 256, 257, 300, 307,
];

pub const WIDTHS: [usize; 17] = [1, 3, 7, 8, 16, 17, 32, 40, 64, 72, 80, 96, 128, 192, 256, 257, 512];

/// Draws sizes at the edges of tiles and vectors, of an amount of work that the oracle can do.
fn kernel_dims() -> impl Strategy<Value = Dims> {
    const LISTS: [&[usize]; 7] = [&[1, 2, 3], &[1, 2, 3], &[1, 2, 3, 8], &LENGTHS, &LENGTHS, &WIDTHS, &WIDTHS];
    // Single queries are what decoding asks.
    let queries = prop_oneof![1 => 1..=3usize, 4 => select(&LENGTHS[..])];
    let [batches, key_heads, groups, _, keys, widths, value_widths] = LISTS.map(select);
    let most = prop_oneof![24 => Just(1_000_000), 1 => Just(12_000_000)];
    let dims = |[b, h_kv, group, t_q, t_kv, d, d_v]: [usize; 7]| Dims { b, h: h_kv * group, h_kv, t_q, t_kv, d, d_v };
    // Multiplications, with something for the questions about each query and key.
    let work = |of: Dims| of.b * of.h * of.t_q * of.t_kv * (of.d + of.d_v + 64);
    ((batches, key_heads, groups, queries, keys, widths, value_widths), most, 0..LISTS.len()).prop_map(
        move |((b, h_kv, group, t_q, t_kv, d, d_v), most, first)| {
            dims(within([b, h_kv, group, t_q, t_kv, d, d_v], LISTS, first, |sizes| work(dims(sizes)) <= most))
        },
    )
}

/// Calls of a kernel's sizes and dtypes.
pub fn kernel_recipes() -> impl Strategy<Value = Recipe> {
    let scale = prop_oneof![3 => Just(None), 1 => select(&[0.0, -0.3, 12.0, -300.0][..]).prop_map(Some)];
    (recipes_of(kernel_dims(), &DTYPES), scale, any::<bool>()).prop_map(|(recipe, scale, masks_runs)| Recipe {
        scale,
        masks_runs,
        ..recipe
    })
}

/// The dtypes that the fused CPU kernel computes in.
pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// Returns the dtypes in which a device attends.
pub fn dtypes(device: &Device) -> &'static [DType] {
    if device.is_metal() {
        &[DType::F32, DType::F16, DType::BF16]
    } else {
        &[DType::F64, DType::F32, DType::F16, DType::BF16]
    }
}
