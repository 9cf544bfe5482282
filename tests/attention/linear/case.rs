//! One projection, drawn at random or by hand, and what plain loops in f64 make of it.

use std::ops::Range;

use attention_oracle::attention::linear_with_sizes;
use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use proptest::prelude::*;
use proptest::sample::select;

use crate::array::{Array, Random, View};
use crate::common::property::within;
pub use crate::common::{Outcome, bits};
use crate::common::{compare, values};

pub const CPU: Device = Device::Cpu;

/// The weight's type, and the input's.
pub type Types = (DType, DType);

/// Every pair of types that is multiplied.
pub const TYPES: [Types; 5] = [
    (DType::F32, DType::F32),
    (DType::BF16, DType::BF16),
    (DType::F16, DType::F16),
    (DType::BF16, DType::F32),
    (DType::F16, DType::F32),
];

/// How the input lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    Contiguous,
    /// Columns in the middle of wider rows.
    Wider,
    /// Every third row, as one head of several.
    EveryThird,
    /// (a, b, in) of (b, a, in).
    LeadingTransposed,
    /// (rows, in) of (in, rows).
    ColumnMajor,
    /// One row, again and again.
    OneRow,
    /// (a, b, in) of (1, b, in).
    LeadingBroadcast,
    /// (a, 2, b, in).
    RankFour,
    /// (in,), if there is one row.
    RankOne,
}

impl Layout {
    pub const ALL: [Self; 9] = {
        use Layout::*;
        [Contiguous, Wider, EveryThird, LeadingTransposed, ColumnMajor, OneRow, LeadingBroadcast, RankFour, RankOne]
    };

    /// An array of NaN as a view of about so many rows of `width`: as many as the layout allows, one at least.
    fn array(self, rows: usize, width: usize) -> Array {
        let narrow = |dim, start, len| View::Narrow { dim, start, len };
        let a = [5, 3, 2].into_iter().find(|a| rows.is_multiple_of(*a)).unwrap_or(1);
        let b = rows / a;
        match self {
            Self::Contiguous => Array::new(&[rows, width]),
            Self::Wider => Array::new(&[rows, width + 5]).view(narrow(1, 3, width)),
            Self::EveryThird => Array::new(&[rows, 3, width]).view(narrow(1, 1, 1)),
            Self::LeadingTransposed => Array::new(&[b, a, width]).view(View::Transpose(0, 1)),
            Self::ColumnMajor => Array::new(&[width, rows]).view(View::Transpose(0, 1)),
            Self::OneRow => Array::new(&[1, width]).view(View::Broadcast(vec![rows, width])),
            Self::LeadingBroadcast => Array::new(&[1, b, width]).view(View::Broadcast(vec![a, b, width])),
            Self::RankFour if rows.is_multiple_of(2 * a) => Array::new(&[a, 2, b / 2, width]),
            Self::RankFour => Array::new(&[a, 1, b, width]),
            Self::RankOne if rows == 1 => Array::new(&[width]),
            Self::RankOne => Array::new(&[rows, 1, width]),
        }
    }
}

/// How the weight lies in memory before it is packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WeightLayout {
    Contiguous,
    /// (out, in) of (in, out), as GPT-2 has it.
    Transposed,
    /// Rows of a wider and longer matrix, as a part of a packed projection.
    Part,
}

impl WeightLayout {
    pub const ALL: [Self; 3] = [Self::Contiguous, Self::Transposed, Self::Part];

    fn array(self, outputs: usize, inputs: usize) -> Array {
        match self {
            Self::Contiguous => Array::new(&[outputs, inputs]),
            Self::Transposed => Array::new(&[inputs, outputs]).view(View::Transpose(0, 1)),
            Self::Part => Array::new(&[outputs + 2, inputs + 3])
                .view(View::Narrow { dim: 0, start: 1, len: outputs })
                .view(View::Narrow { dim: 1, start: 2, len: inputs }),
        }
    }
}

/// What a case is made of.
#[derive(Debug, Clone)]
pub struct Product {
    pub types: Types,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub bias: bool,
    pub layout: Layout,
    pub weight_layout: WeightLayout,
    /// Where some of the rows and of the columns begin and end, as fractions of all.
    pub part: (f64, f64),
    /// The largest entry of the weight.
    pub size: f64,
    pub seed: u64,
}

impl Product {
    pub fn plain(types: Types, rows: usize, (inputs, outputs): (usize, usize)) -> Self {
        Self {
            types,
            rows,
            inputs,
            outputs,
            bias: (rows + outputs).is_multiple_of(2),
            layout: Layout::Contiguous,
            weight_layout: WeightLayout::Contiguous,
            part: (0.3, 0.8),
            size: 1.0,
            seed: (rows * 10_000 + inputs * 100 + outputs) as u64,
        }
    }

    /// Entries are uniform, and what no view reaches is NaN.
    pub fn case(&self) -> Case {
        let mut random = Random::new(self.seed);
        let (of_weight, of_input) = self.types;
        let mut filled = |array: Array, most, dtype| array.uniform(&mut random, most, dtype);
        let bias = self.bias.then(|| filled(Array::new(&[self.outputs]), 2.0 * self.size, of_weight));
        Case {
            types: self.types,
            weight: filled(self.weight_layout.array(self.outputs, self.inputs), self.size, of_weight),
            bias,
            xs: filled(self.layout.array(self.rows, self.inputs), 1.0, of_input),
        }
    }

    /// Some of so many rows or columns.
    pub fn some(&self, of: usize) -> Range<usize> {
        let at = |fraction: f64| (fraction * of as f64).round() as usize;
        let (start, end) = (at(self.part.0), at(self.part.1));
        start.min(end)..start.max(end)
    }
}

/// Groups of 2, 4, 8 and 16 rows, and tasks of 192.
pub const ROWS: [usize; 27] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 31, 32, 33, 191, 192, 193, 400];

/// Vectors of 4, 8 and 16 elements, pairs, and blocks of 192 words of one element or two.
pub const INPUTS: [usize; 36] = [
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 257, 383,
    384, 385, 511, 577, 767, 768, 769, 1031,
];

/// Panels of 12, 16, 24, 32 and 48 columns.
pub const OUTPUTS: [usize; 33] = [
    1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 101,
    144, 145, 199,
];

/// Random products: sizes at the edges of vectors, panels, tiles and blocks.
pub fn products() -> impl Strategy<Value = Product> {
    let most = prop_oneof![20 => Just(300_000), 1 => Just(8_000_000)];
    let sizes = ((select(&ROWS[..]), select(&INPUTS[..]), select(&OUTPUTS[..])), most, 0..3usize);
    let sizes = sizes.prop_map(|((rows, inputs, outputs), most, first)| {
        let fits = |sizes: [usize; 3]| sizes.iter().product::<usize>() <= most;
        within([rows, inputs, outputs], [&ROWS, &INPUTS, &OUTPUTS], first, fits)
    });
    let layouts = (select(&Layout::ALL[..]), select(&WeightLayout::ALL[..]));
    let numbers = (any::<bool>(), (0.0..=1.0, 0.0..=1.0), select(&[1.0, 1.0, 1.0, 1.0 / 64.0, 16.0][..]));
    (select(&TYPES[..]), sizes, layouts, numbers, any::<u64>().no_shrink()).prop_map(
        |(types, [rows, inputs, outputs], (layout, weight_layout), (bias, part, size), seed)| Product {
            types,
            rows,
            inputs,
            outputs,
            bias,
            layout,
            weight_layout,
            part,
            size,
            seed,
        },
    )
}

/// A weight, a bias and an input, as numbers.
#[derive(Debug, Clone)]
pub struct Case {
    pub types: Types,
    pub weight: Array,
    pub bias: Option<Array>,
    pub xs: Array,
}

/// The outputs in f64, and the sums of the magnitudes of all that was added for each.
pub struct Expected {
    pub ys: Vec<f64>,
    sizes: Vec<f64>,
    terms: usize,
}

impl Case {
    pub fn tensors(&self) -> Result<(Tensor, Option<Tensor>, Tensor)> {
        let (of_weight, of_input) = self.types;
        let bias = self.bias.as_ref().map(|bias| bias.tensor(of_weight, &CPU)).transpose()?;
        Ok((self.weight.tensor(of_weight, &CPU)?, bias, self.xs.tensor(of_input, &CPU)?))
    }

    pub fn packed(&self, tier: Tier) -> Result<PackedLinear> {
        let (weight, bias, _) = self.tensors()?;
        PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))
    }

    pub fn input(&self) -> Result<Tensor> {
        self.xs.tensor(self.types.1, &CPU)
    }

    pub fn forward(&self, tier: Tier) -> Result<Tensor> {
        self.packed(tier)?.forward(&self.input()?)
    }

    pub fn expected(&self) -> Result<Expected> {
        let (weight, bias, xs) = self.tensors()?;
        let (outputs, inputs) = weight.dims2()?;
        let rows = xs.dims()[..xs.rank() - 1].iter().product();
        let bias = bias.map_or(vec![0.0; outputs], |bias| values(&bias));
        let (ys, sizes) = linear_with_sizes(&values(&xs), &values(&weight), &bias, rows);
        Ok(Expected { ys, sizes, terms: inputs + 1 })
    }
}

impl Expected {
    /// How far a correctly rounded sum may be off: sums of f32 err by an ulp of the magnitude at every one of the terms
    /// at the very worst, and in practice by its root; the output is rounded once more.
    pub fn bound(&self, at: usize, dtype: DType) -> f64 {
        let f32_ulp = 2f64.powi(-23);
        let sum = (8.0 + (self.terms as f64).sqrt()) * f32_ulp * self.sizes[at] + f64::from(f32::MIN_POSITIVE);
        let (ulp, least) = match dtype {
            DType::BF16 => (2f64.powi(-8), 0.0),
            // Numbers below 2^-14 have a fixed spacing.
            DType::F16 => (2f64.powi(-11), 2f64.powi(-24)),
            _ => (0.0, 0.0),
        };
        sum + (self.ys[at].abs() + sum) * ulp + least
    }

    /// Holds an output (.., out) to these numbers.
    pub fn compare(&self, found: &Tensor) -> Outcome {
        compare("outputs", found, (found.dims(), found.dtype()), &self.ys, |at| self.bound(at, found.dtype()))
    }
}

/// The whole product to f64; to the bit, some of its columns, from the whole weight and from one of their own, the
/// product of a copy of the input, and of rows alone; and the weight that comes back. On every tier.
pub fn check(product: &Product) -> Outcome {
    let run = || -> Result<()> {
        let case = product.case();
        let expected = case.expected()?;
        for tier in Tier::available() {
            check_tier(product, &case, &expected, tier).map_err(|error| Error::msg(format!("{tier}: {error}")))?;
        }
        Ok(())
    };
    run().map_err(|error| error.to_string())
}

fn check_tier(product: &Product, case: &Case, expected: &Expected, tier: Tier) -> Result<()> {
    let (weight, bias, xs) = case.tensors()?;
    let packed = PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))?;
    let ys = packed.forward(&xs)?;
    let mut dims = xs.dims().to_vec();
    dims[xs.rank() - 1] = product.outputs;
    if ys.dims() != dims || ys.dtype() != xs.dtype() || !ys.is_contiguous() {
        bail!("{ys:?}, expected {dims:?}");
    }
    expected.compare(&ys).map_err(Error::msg)?;

    let columns = product.some(product.outputs);
    let (some, narrowed) =
        (packed.forward_columns(&xs, columns.clone())?, ys.narrow(xs.rank() - 1, columns.start, columns.len())?);
    if some.dims() != narrowed.dims() || some.dtype() != ys.dtype() || bits(&some) != bits(&narrowed) {
        bail!("columns {columns:?} differ from those of the whole");
    }
    let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len());
    let own_bias = bias.as_ref().map(own).transpose()?;
    let alone = PackedLinear::with_tier(&own(&weight)?, own_bias.as_ref(), Some(tier))?.forward(&xs)?;
    if bits(&alone) != bits(&some) {
        bail!("columns {columns:?} as a weight of their own differ from those among others");
    }

    let xs = xs.force_contiguous()?.reshape((product.rows, product.inputs))?;
    let whole = packed.forward(&xs)?;
    if bits(&whole) != bits(&ys) {
        bail!("a copy of the input gives other bits");
    }
    let last = product.rows.saturating_sub(1);
    for rows in [product.some(product.rows), 0..1.min(product.rows), last..product.rows] {
        let alone = packed.forward(&xs.narrow(0, rows.start, rows.len())?)?;
        if bits(&alone) != bits(&whole.narrow(0, rows.start, rows.len())?) {
            bail!("rows {rows:?} alone differ from those in their batch");
        }
    }

    let linear = packed.to_linear()?;
    let same = |one: Option<&Tensor>, other: Option<&Tensor>| one.map(bits) == other.map(bits);
    if linear.weight().dims() != weight.dims()
        || !same(Some(linear.weight()), Some(&weight))
        || !same(linear.bias(), bias.as_ref())
    {
        bail!("another weight or bias than was packed");
    }
    Ok(())
}
