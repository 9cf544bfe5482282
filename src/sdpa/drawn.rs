//! Random calls for the tests of the adapters.

use candle_core::{DType, Device, Result, Tensor};
use proptest::prelude::*;
use proptest::sample::select;

use super::reference;
use super::validate::Call;
use crate::mask::{PlacedDims, Placement};
use crate::{AttentionMask, OutputOrder, SdpaOptions, ValidLens};

/// How q, k or v lies in memory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Layout {
    Contiguous,
    /// (B, T, H, D), as a projection gives it.
    HeadsTransposed,
    /// The first positions of a longer buffer.
    CacheHead,
    /// Positions from the middle of a longer buffer of transposed heads.
    CacheMiddle,
    /// A part of wider rows, from a multiple of 8 and from an odd number.
    WideRows,
    OddRows,
    /// (B, H, D, T): the last dimension is not contiguous.
    ColumnMajor,
    /// One sequence, and one head, for all.
    OneBatch,
    OneHead,
}

const LAYOUTS: [Layout; 9] = [
    Layout::Contiguous,
    Layout::HeadsTransposed,
    Layout::CacheHead,
    Layout::CacheMiddle,
    Layout::WideRows,
    Layout::OddRows,
    Layout::ColumnMajor,
    Layout::OneBatch,
    Layout::OneHead,
];

impl Layout {
    pub fn tensor(self, [b, h, t, d]: [usize; 4], dtype: DType) -> Result<Tensor> {
        let draw = |dims: [usize; 4]| Tensor::randn(0f32, 1., &dims, &Device::Cpu)?.to_dtype(dtype);
        match self {
            Self::Contiguous => draw([b, h, t, d]),
            Self::HeadsTransposed => draw([b, t, h, d])?.transpose(1, 2),
            Self::CacheHead => draw([b, h, t + 3, d])?.narrow(2, 0, t),
            Self::CacheMiddle => draw([b, t + 3, h, d])?.narrow(1, 2, t)?.transpose(1, 2),
            Self::WideRows => draw([b, h, t, d + 16])?.narrow(3, 8, d),
            Self::OddRows => draw([b, h, t, d + 2])?.narrow(3, 1, d),
            Self::ColumnMajor => draw([b, h, d, t])?.transpose(2, 3),
            Self::OneBatch => draw([1, h, t, d])?.broadcast_as((b, h, t, d)),
            Self::OneHead => draw([b, 1, t, d])?.broadcast_as((b, h, t, d)),
        }
    }
}

/// One constraint of a mask.
#[derive(Debug, Clone, Copy)]
pub(super) enum Constraint {
    Causal,
    UpperLeft,
    Offset(usize),
    Window(usize),
    Band(usize, usize),
    Lens(u64),
    Starts(u64),
    OneLength(usize),
    Prefix(u64),
    LensByQuery(u64),
    Keep(u64),
    Bias(u64),
}

impl Constraint {
    fn mask(self, [b, h, t_q, t_kv]: [usize; 4]) -> Result<AttentionMask> {
        let none = AttentionMask::none;
        let row = |seed: u64| -> Vec<usize> { (0..b).map(|b| spread(seed, b) % (t_kv + 2)).collect() };
        Ok(match self {
            Self::Causal => AttentionMask::causal(),
            Self::UpperLeft => AttentionMask::causal_upper_left(),
            Self::Offset(n) => AttentionMask::causal_with_offset(n),
            Self::Window(w) => none().with_window(w),
            Self::Band(left, right) => none().with_band(left, right),
            Self::Lens(seed) => none().with_valid_lens(row(seed)),
            Self::Starts(seed) => none().with_starts(row(seed)),
            Self::OneLength(len) => none().with_valid_lens(vec![len; b]),
            Self::Prefix(seed) => AttentionMask::causal().with_prefix(row(seed)),
            Self::LensByQuery(seed) => {
                let rows = (0..b).map(|b| (0..t_q).map(|i| spread(seed, b * t_q + i) % (t_kv + 2)).collect());
                none().with_valid_lens(ValidLens::from(rows.collect::<Vec<Vec<usize>>>()))
            }
            Self::Keep(seed) => {
                let keep: Vec<u8> = (0..t_q * t_kv).map(|n| u8::from(!spread(seed, n).is_multiple_of(3))).collect();
                let keep = Tensor::from_vec(keep, (t_q, t_kv), &Device::Cpu)?;
                none().with_keep(&if seed.is_multiple_of(2) { keep } else { keep.broadcast_as((b, h, t_q, t_kv))? })
            }
            Self::Bias(seed) => {
                let bias: Vec<f32> = (0..t_q * t_kv).map(|n| (spread(seed, n) % 7) as f32).collect();
                none().with_bias(&Tensor::from_vec(bias, (t_q, t_kv), &Device::Cpu)?)
            }
        })
    }
}

/// A number that looks like no other.
fn spread(seed: u64, n: usize) -> usize {
    let mixed = (seed ^ (n as u64 + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 33) as usize
}

/// A call that is not yet tensors.
#[derive(Debug, Clone)]
pub(super) struct Drawn {
    pub b: usize,
    pub h_kv: usize,
    pub group: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub d_v: usize,
    pub layouts: [Layout; 3],
    pub masks: Vec<Constraint>,
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    pub alibi: bool,
    pub sinks: bool,
    /// Sequences that stand at positions of their own, with padding, as beside a cache; where from is drawn.
    pub placed: Option<u64>,
    pub dtype: DType,
}

/// The tensors of a [`Drawn`] call.
#[derive(Clone)]
pub(super) struct Arguments {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

impl Drawn {
    pub fn arguments(&self) -> Result<Arguments> {
        let &Self { b, h_kv, group, t_q, t_kv, d, d_v, .. } = self;
        let h = h_kv * group;
        let shapes = [[b, h, t_q, d], [b, h_kv, t_kv, d], [b, h_kv, t_kv, d_v]];
        let draw = |n: usize| self.layouts[n].tensor(shapes[n], self.dtype);
        let placements = self.placed.map(|seed| self.placements(seed));
        let longest = placements.iter().flatten().map(|placed| placed.end).max().unwrap_or(t_kv);
        let mut mask = AttentionMask::none();
        for constraint in &self.masks {
            mask = mask.and(&constraint.mask([b, h, t_q, longest])?);
        }
        if let Some(placements) = placements {
            mask = mask.placed(&placements, PlacedDims { h, t_q, rows: t_kv }, &Device::Cpu)?;
        }
        let heads = |most: f64| Tensor::rand(-most / 4.0, most, h, &Device::Cpu)?.to_dtype(DType::F32);
        let mut options = SdpaOptions::default();
        if let Some(scale) = self.scale {
            options = options.with_scale(scale);
        }
        if let Some(softcap) = self.softcap {
            options = options.with_softcap(softcap);
        }
        if self.alibi {
            options = options.with_alibi_slopes(&heads(1.0)?);
        }
        if self.sinks {
            options = options.with_sinks(&heads(2.0)?);
        }
        Ok(Arguments { q: draw(0)?, k: draw(1)?, v: draw(2)?, mask, options })
    }
}

impl Drawn {
    /// The last of some of the queries stands at the last of some of the keys.
    fn placements(&self, seed: u64) -> Vec<Placement> {
        let of = |b: usize| {
            let (start, len) = (spread(seed, 3 * b) % self.t_q, 1 + spread(seed, 3 * b + 1) % self.t_kv);
            let end = start + 1 + spread(seed, 3 * b + 2) % (self.t_q - start);
            Placement { query: len as i128 - end as i128, tokens: start..end, keys: 0..len, end: len }
        };
        (0..self.b).map(of).collect()
    }
}

impl Arguments {
    pub fn call(&self) -> Result<Call<'_>> {
        Call::new("test", (&self.q, &self.k, &self.v), &self.mask, &self.options)
    }

    /// Holds a context to the reference path's numbers and to the order of memory that was asked for.
    pub fn check(&self, context: &Tensor) -> std::result::Result<(), String> {
        let expected = reference::attend(&self.call().map_err(|e| e.to_string())?).map_err(|e| e.to_string())?.context;
        let lies = match self.options.output_order {
            OutputOrder::Bhtd => context.is_contiguous(),
            OutputOrder::Bthd => context.transpose(1, 2).is_ok_and(|context| context.is_contiguous()),
        };
        if !lies {
            return Err(format!("strides {:?} in {:?}", context.stride(), self.options.output_order));
        }
        close(context, &expected)
    }

    pub fn in_order(mut self, order: OutputOrder) -> Self {
        self.options = self.options.with_output_order(order);
        self
    }
}

/// Both sides compute in f32 at least, and round once to the dtype; a sum of products in f32 errs by its terms.
pub(super) fn close(got: &Tensor, expected: &Tensor) -> std::result::Result<(), String> {
    if (got.dims(), got.dtype()) != (expected.dims(), expected.dtype()) {
        return Err(format!("{:?} in {:?}, expected {:?}", got.dims(), got.dtype(), expected.dims()));
    }
    let relative = match got.dtype() {
        DType::BF16 => 2f32.powi(-7),
        DType::F16 => 2f32.powi(-10),
        _ => 1e-4,
    };
    let numbers = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (got, expected) = (numbers(got).map_err(|e| e.to_string())?, numbers(expected).map_err(|e| e.to_string())?);
    for (n, (got, expected)) in got.into_iter().zip(expected).enumerate() {
        let off = (got - expected).abs();
        if off.is_nan() || off > relative * (expected.abs() + 0.1) {
            return Err(format!("entry {n} is {got}, expected {expected}"));
        }
    }
    Ok(())
}

fn constraint(most: usize) -> impl Strategy<Value = Constraint> {
    let common = prop_oneof![
        4 => Just(Constraint::Causal),
        1 => Just(Constraint::UpperLeft),
        1 => (0..most).prop_map(Constraint::Offset),
        2 => (1..most).prop_map(Constraint::Window),
        2 => (0..most, 0..most).prop_map(|(left, right)| Constraint::Band(left, right)),
        2 => any::<u64>().prop_map(Constraint::Lens),
        2 => any::<u64>().prop_map(Constraint::Starts),
        2 => (0..most).prop_map(Constraint::OneLength),
    ];
    let rare =
        (any::<u64>(), select(&[Constraint::Prefix, Constraint::LensByQuery, Constraint::Keep, Constraint::Bias][..]));
    prop_oneof![9 => common, 1 => rare.prop_map(|(seed, of)| of(seed))]
}

/// Calls of up to `most` positions, of the given dtypes and widths.
pub(super) fn drawn(most: usize, dtypes: &'static [DType], widths: &'static [usize]) -> impl Strategy<Value = Drawn> {
    let length = move || prop_oneof![1 => Just(1), 4 => 1..=most];
    let lengths = prop_oneof![2 => (length(), length()), 1 => length().prop_map(|t| (t, t))];
    let layout = || select(&LAYOUTS[..]);
    let now_and_then = |p| proptest::bool::weighted(p);
    (
        (1..=3usize, 1..=2usize, 1..=3usize, lengths, select(widths)),
        [layout(), layout(), layout()],
        proptest::collection::vec(constraint(most), 0..=2),
        (proptest::option::weighted(0.2, 0.05..1.5f64), proptest::option::weighted(0.15, 0.5..9.0f64)),
        (now_and_then(0.2), now_and_then(0.03), proptest::option::weighted(0.2, any::<u64>())),
        select(dtypes),
    )
        .prop_map(
            |((b, h_kv, group, (t_q, t_kv), d), layouts, masks, (scale, softcap), (alibi, sinks, placed), dtype)| {
                Drawn {
                    b,
                    h_kv,
                    group,
                    t_q,
                    t_kv,
                    d,
                    d_v: d,
                    layouts,
                    masks,
                    scale,
                    softcap,
                    alibi,
                    sinks,
                    placed,
                    dtype,
                }
            },
        )
}
