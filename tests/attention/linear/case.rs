//! One projection, drawn at random or written out, and its results by plain loops in f64.

use std::ops::Range;

use attention_oracle::attention::linear_with_sizes;
use candle_attention::PackedLinear;
use candle_attention::cpu::InstructionSet;
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Activation;
use proptest::prelude::*;
use proptest::sample::select;

pub use crate::array::Layout;
use crate::array::{Array, Random};
pub use crate::common::bits;
use crate::common::property::within;
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

/// The layouts of a weight before it is packed: GPT-2 has it transposed, and a packed projection has parts.
pub const OF_WEIGHTS: [Layout; 4] = [Layout::Contiguous, Layout::ColumnMajor, Layout::CacheMiddle, Layout::NarrowRows];

/// An operation that follows a product in the same pass.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Then {
    Nothing,
    Residual,
    Activation(Activation),
    /// And a residual.
    Both(Activation),
    /// Times the product of another weight.
    Gate(Activation),
}

impl Then {
    pub fn activation(self) -> Option<Activation> {
        match self {
            Self::Activation(own) | Self::Both(own) | Self::Gate(own) => Some(own),
            Self::Nothing | Self::Residual => None,
        }
    }
}

pub const ACTIVATIONS: [Activation; 6] = [
    Activation::Gelu,
    Activation::NewGelu,
    Activation::GeluPytorchTanh,
    Activation::Silu,
    Activation::Swish,
    Activation::Relu,
];

/// The sizes, dtypes and layouts of a case.
#[derive(Debug, Clone)]
pub struct Product {
    pub types: Types,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub bias: bool,
    /// The rank of the input. For one row, it may be 1.
    pub rank: usize,
    pub layout: Layout,
    pub of_weight: Layout,
    pub then: Then,
    /// The beginning and end of some of the rows and of the columns, as fractions of all.
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
            rank: 2,
            layout: Layout::Contiguous,
            of_weight: Layout::Contiguous,
            then: Then::Nothing,
            part: (0.3, 0.8),
            size: 1.0,
            seed: (rows * 10_000 + inputs * 100 + outputs) as u64,
        }
    }

    /// Draws uniform entries. Entries that no view reaches are NaN.
    pub fn case(&self) -> Case {
        let mut random = Random::new(self.seed);
        let (of_weight, of_input) = self.types;
        let mut filled = |array: Array, most, dtype| array.uniform(&mut random, most, dtype);
        let divisor = |n: usize| [5, 3, 2].into_iter().find(|d| n.is_multiple_of(*d)).unwrap_or(1);
        let h = if self.rank > 2 { divisor(self.rows) } else { 1 };
        let b = if self.rank > 3 { divisor(self.rows / h) } else { 1 };
        let rows = self.rows / (b * h);
        let xs = self.layout.array([b, h, rows, self.inputs]);
        let weight = [1, 1, self.outputs, self.inputs];
        let has_residual = matches!(self.then, Then::Residual | Then::Both(_));
        Case {
            types: self.types,
            then: self.then,
            rank: if self.rows == 1 { self.rank } else { self.rank.max(2) },
            bias: self.bias.then(|| filled(Array::new(&[self.outputs]), 2.0 * self.size, of_weight)),
            weight: filled(self.of_weight.array(weight), self.size, of_weight),
            xs: filled(xs, 1.0, of_input),
            // With gaps between its rows.
            residual: has_residual.then(|| filled(Layout::NarrowRows.array([b, h, rows, self.outputs]), 1.0, of_input)),
            up: matches!(self.then, Then::Gate(_)).then(|| filled(self.of_weight.array(weight), self.size, of_weight)),
        }
    }

    /// Returns a range of some of `of` rows or columns.
    pub fn some(&self, of: usize) -> Range<usize> {
        let at = |fraction: f64| (fraction * of as f64).round() as usize;
        let start = at(self.part.0);
        let end = at(self.part.1);
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

/// Draws random products, of sizes at the edges of vectors, panels, tiles and blocks.
pub fn products() -> impl Strategy<Value = Product> {
    let limits = prop_oneof![20 => Just(300_000), 1 => Just(8_000_000)];
    let sizes = ((select(&ROWS[..]), select(&INPUTS[..]), select(&OUTPUTS[..])), limits, 0..3usize);
    let sizes = sizes.prop_map(|((rows, inputs, outputs), most, first)| {
        let fits = |tried: [usize; 3]| tried.iter().product::<usize>() <= most;
        within([rows, inputs, outputs], [&ROWS, &INPUTS, &OUTPUTS], first, fits)
    });
    let layouts = (1..=4usize, select(&Layout::ALL[..]), select(&OF_WEIGHTS[..]));
    let numbers = (any::<bool>(), (0.0..=1.0, 0.0..=1.0), select(&[1.0, 1.0, 1.0, 1.0 / 64.0, 16.0][..]));
    (select(&TYPES[..]), sizes, layouts, numbers, any::<u64>().no_shrink()).prop_map(
        |(types, [rows, inputs, outputs], (rank, layout, of_weight), (bias, part, size), seed)| {
            let plain = Product::plain(types, rows, (inputs, outputs));
            Product { bias, rank, layout, of_weight, part, size, seed, ..plain }
        },
    )
}

/// A weight, a bias and an input, and what follows them, as numbers.
#[derive(Debug, Clone)]
pub struct Case {
    pub types: Types,
    pub then: Then,
    rank: usize,
    /// (1, 1, out, in)
    pub weight: Array,
    pub bias: Option<Array>,
    /// (.., .., .., in)
    pub xs: Array,
    /// (.., .., .., out)
    pub residual: Option<Array>,
    /// (1, 1, out, in)
    pub up: Option<Array>,
}

/// The tensors of a case.
pub struct Tensors {
    pub weight: Tensor,
    pub bias: Option<Tensor>,
    pub xs: Tensor,
    pub residual: Option<Tensor>,
    pub up: Option<Tensor>,
}

/// The outputs in f64, and the sums of the magnitudes of all that was added for each.
pub struct Expected {
    pub ys: Vec<f64>,
    sizes: Vec<f64>,
    terms: usize,
}

impl Case {
    pub fn tensors(&self) -> Result<(Tensor, Option<Tensor>, Tensor)> {
        let all = self.tensors_of(self.types, &mut |_, tensor| Ok(tensor))?;
        Ok((all.weight, all.bias, all.xs))
    }

    /// Builds the tensors with `leaf` applied to each buffer, for example to make it a variable.
    pub fn tensors_of(
        &self,
        (of_weight, of_input): Types,
        leaf: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<Tensors> {
        let mut of_rank = |name: &str, array: &Array, dtype: DType, rank: usize| {
            let whole = array.look(&leaf(name, array.leaf(dtype, &CPU)?)?);
            (rank..array.rank()).try_fold(whole?, |tensor, _| tensor.squeeze(0))
        };
        Ok(Tensors {
            weight: of_rank("weight", &self.weight, of_weight, 2)?,
            bias: self.bias.as_ref().map(|bias| of_rank("bias", bias, of_weight, 1)).transpose()?,
            xs: of_rank("xs", &self.xs, of_input, self.rank)?,
            residual: self.residual.as_ref().map(|own| of_rank("residual", own, of_input, self.rank)).transpose()?,
            up: self.up.as_ref().map(|up| of_rank("up", up, of_weight, 2)).transpose()?,
        })
    }

    pub fn packed(&self, instruction_set: InstructionSet) -> Result<PackedLinear> {
        let (weight, bias, _) = self.tensors()?;
        PackedLinear::with_instruction_set(&weight, bias.as_ref(), Some(instruction_set))
    }

    pub fn input(&self) -> Result<Tensor> {
        Ok(self.tensors()?.2)
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
    /// Returns the largest error of a correctly rounded sum. Sums of f32 are off by an ulp of the magnitude at every
    /// term in the worst case, and in practice by the root of that; the output is rounded once more.
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

    /// Compares an output (.., out) with these numbers.
    pub fn compare(&self, found: &Tensor) -> Result<()> {
        compare("outputs", found, (found.dims(), found.dtype()), &self.ys, |at| self.bound(at, found.dtype()))
    }
}

/// Compares the whole product with f64. Compares bits of some columns, from the whole weight and from a separate one,
/// of the product of a copy of the input, of single rows, and of the weight after a round trip. Runs on every
/// instruction set.
pub fn check(product: &Product) -> Result<()> {
    let case = product.case();
    let expected = case.expected()?;
    InstructionSet::available().into_iter().try_for_each(|instruction_set| {
        check_instruction_set(product, &case, &expected, instruction_set)
            .map_err(|error| error.context(instruction_set.to_string()))
    })
}

fn check_instruction_set(
    product: &Product,
    case: &Case,
    expected: &Expected,
    instruction_set: InstructionSet,
) -> Result<()> {
    let (weight, bias, xs) = case.tensors()?;
    let packed = PackedLinear::with_instruction_set(&weight, bias.as_ref(), Some(instruction_set))?;
    let ys = packed.forward(&xs)?;
    let mut dims = xs.dims().to_vec();
    dims[xs.rank() - 1] = product.outputs;
    if ys.dims() != dims || ys.dtype() != xs.dtype() || !ys.is_contiguous() {
        bail!("{ys:?}, expected {dims:?}");
    }
    expected.compare(&ys)?;

    let columns = product.some(product.outputs);
    let some = packed.forward_columns(&xs, columns.clone())?;
    let narrowed = ys.narrow(xs.rank() - 1, columns.start, columns.len())?;
    if some.dims() != narrowed.dims() || some.dtype() != ys.dtype() || bits(&some) != bits(&narrowed) {
        bail!("columns {columns:?} differ from those of the whole");
    }
    let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len());
    let own_bias = bias.as_ref().map(own).transpose()?;
    let alone =
        PackedLinear::with_instruction_set(&own(&weight)?, own_bias.as_ref(), Some(instruction_set))?.forward(&xs)?;
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
        let part = packed.forward(&xs.narrow(0, rows.start, rows.len())?)?;
        if bits(&part) != bits(&whole.narrow(0, rows.start, rows.len())?) {
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
