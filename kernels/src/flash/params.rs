//! One call, as the kernel reads it: sizes, strided rows, ranges of keys, and what changes the scores.

use std::ops::Range;

use crate::cpu::Element;

/// In which order the context lies in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputOrder {
    /// Contiguous as (B, H, T, D).
    #[default]
    Bhtd,
    /// Contiguous as (B, T, H, D), as a layer merges its heads: transposed and reshaped to (B, T, H·D) without a copy.
    Bthd,
}

/// The dimensions of a call, by the letters of the glossary.
#[derive(Debug, Clone, Copy)]
pub struct Dims {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

impl Dims {
    /// The query heads that share a key head.
    pub fn group(&self) -> usize {
        self.h / self.h_kv
    }

    /// The query rows that share a key head: row `i · group + g` is query i of the g-th head of the group, so that
    /// neighbours see nearly the same keys.
    pub fn rows(&self) -> usize {
        self.t_q * self.group()
    }
}

/// A view into the elements of a tensor, read where it lies.
#[derive(Clone, Copy)]
pub struct Strided<'a, T, const N: usize> {
    data: &'a [T],
    start: usize,
    strides: [usize; N],
}

impl<'a, T, const N: usize> Strided<'a, T, N> {
    /// A view of `data` from `start` on, with these strides, of which every index within `dims` lies in the data; `None` if
    /// one does not. A dimension whose stride is 0 stands for one entry, repeated.
    pub fn new(data: &'a [T], start: usize, strides: [usize; N], dims: [usize; N]) -> Option<Self> {
        let mut last = start;
        for (&dim, &stride) in dims.iter().zip(&strides) {
            last = last.checked_add(dim.saturating_sub(1).checked_mul(stride)?)?;
        }
        (dims.contains(&0) || last < data.len()).then_some(Self { data, start, strides })
    }

    /// The elements from an index on. The index lies within the dimensions of the view.
    #[inline(always)]
    pub fn at(&self, index: [usize; N]) -> *const T {
        let offset: usize = (0..N).map(|n| index[n] * self.strides[n]).sum();
        self.data.as_ptr().wrapping_add(self.start + offset)
    }

    pub fn stride(&self, dimension: usize) -> usize {
        self.strides[dimension]
    }
}

impl<'a, T> Strided<'a, T, 4> {
    /// The first element of each row along the last dimension.
    pub fn first_of_last(&self) -> Strided<'a, T, 3> {
        let [a, b, c, _] = self.strides;
        Strided { data: self.data, start: self.start, strides: [a, b, c] }
    }
}

/// Where results go.
#[derive(Clone, Copy)]
pub struct Output<E> {
    /// Rows of D_v elements, one beside another.
    pub(super) context: *mut E,
    order: OutputOrder,
    /// (B, H, T_q).
    pub(super) lse: Option<*mut f32>,
}

impl<E> Output<E> {
    /// A context in this order, which [`run`](super::run) makes room for, and a log-sum-exp for each query, (B, H, T_q).
    pub fn new(order: OutputOrder, lse: Option<*mut f32>) -> Self {
        Self { context: std::ptr::null_mut(), order, lse }
    }
}

// SAFETY: each row is written by the one task that owns it, and read after all of them.
unsafe impl<E> Sync for Output<E> {}
// SAFETY: as above.
unsafe impl<E> Send for Output<E> {}

/// ALiBi's slopes (H,) and the positions of the queries (B, T_q).
#[derive(Clone, Copy)]
pub struct Alibi<'a> {
    pub slopes: &'a [f32],
    pub positions: &'a [f32],
}

impl Alibi<'_> {
    /// The position at which a query of sequence `b` stands.
    pub fn position(&self, dims: &Dims, b: usize, query: usize) -> f32 {
        self.positions[b * dims.t_q + query]
    }
}

/// What happens to a score before the softmax, and to its sum after.
pub struct Scores<'a> {
    pub scale: f64,
    pub softcap: Option<f32>,
    pub alibi: Option<Alibi<'a>>,
    /// (B, H, T_q, T_kv).
    pub bias: Option<Strided<'a, f32, 4>>,
    /// (B, H, T_q, T_kv), 0 hides.
    pub keep: Option<Strided<'a, u8, 4>>,
    /// (H,).
    pub sinks: Option<&'a [f32]>,
}

/// How scores leave the product of queries and keys and reach the exponential, which takes powers of two.
#[derive(Clone, Copy)]
pub struct Units {
    /// Folded into the queries.
    pub query: f32,
    /// Multiplied to the products before softcap and biases.
    pub product: f32,
    /// From there to powers of two; above 0, so that the largest stays the largest.
    pub power: f32,
}

impl Scores<'_> {
    /// Whether something other than a factor stands between the product and the softmax.
    pub fn change(&self) -> bool {
        self.softcap.is_some() || self.alibi.is_some() || self.bias.is_some()
    }

    /// The scale is split into a power of two and what is left, between 1 and 2: the power changes no digit of a query, and
    /// the rest is multiplied to the products, whose rounding it does not add to. `pairs` says that queries stay bf16, where
    /// a small one would lose digits to a power too.
    pub fn units(&self, pairs: bool) -> Units {
        use std::f64::consts::LOG2_E;
        let magnitude = self.scale.abs();
        let sign = 1f64.copysign(self.scale);
        let (query, rest) = match (magnitude == 0.0, pairs) {
            (true, _) => (0.0, 1.0),
            (false, true) => (sign, magnitude),
            (false, false) => {
                let power = magnitude.log2().floor().clamp(-126.0, 127.0).exp2();
                (sign * power, magnitude / power)
            }
        };
        let whole = (rest * LOG2_E) as f32;
        if self.change() || !whole.is_normal() {
            return Units { query: query as f32, product: rest as f32, power: LOG2_E as f32 };
        }
        Units { query: query as f32, product: 1.0, power: whole }
    }
}

/// One call.
pub struct Problem<'a, E> {
    pub dims: Dims,
    /// (B, H, T_q), rows of D.
    pub q: Strided<'a, E, 3>,
    /// (B, H_kv, T_kv), rows of D.
    pub k: Strided<'a, E, 3>,
    /// (B, H_kv, T_kv), rows of D_v.
    pub v: Strided<'a, E, 3>,
    /// The keys that each query of each sequence sees: (B, T_q).
    pub ranges: &'a [Range<usize>],
    pub scores: Scores<'a>,
    pub output: Output<E>,
}

/// A row of queries: which query of which head.
#[derive(Clone, Copy)]
pub struct Row {
    pub head: usize,
    pub query: usize,
}

impl<E: Element> Problem<'_, E> {
    /// The row of a key head, see [`Dims::rows`].
    pub fn row(&self, kv_head: usize, row: usize) -> Row {
        let group = self.dims.group();
        Row { head: kv_head * group + row % group, query: row / group }
    }

    /// Where the context of a row begins.
    ///
    /// # Safety
    /// The row belongs to the problem, for whose context there is room.
    #[inline(always)]
    pub(super) unsafe fn context_row(&self, b: usize, Row { head, query }: Row) -> *mut E {
        let Dims { h, t_q, d_v, .. } = self.dims;
        let row = match self.output.order {
            OutputOrder::Bhtd => (b * h + head) * t_q + query,
            OutputOrder::Bthd => (b * t_q + query) * h + head,
        };
        // SAFETY: the caller's promise.
        unsafe { self.output.context.add(row * d_v) }
    }

    pub fn range(&self, b: usize, query: usize) -> &Range<usize> {
        &self.ranges[b * self.dims.t_q + query]
    }
}
