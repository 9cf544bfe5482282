//! Checks of arguments: the shape, dtype and device of a tensor, the range of a number, and whether a size can be
//! allocated. Each error names the operation and the argument.

use std::fmt;
use std::ops::RangeInclusive;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::rowwise::to_vec;
use Dim::{Any, Is, Named};

/// The dtypes in which attention is computed. Candle's other floats lack what it needs: an infinity, or conversions.
pub const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

/// Returns the dtypes in which attention is computed on a device: Metal has no f64.
pub fn floats_on(device: &Device) -> &'static [DType] {
    if device.is_metal() { &FLOATS[..3] } else { &FLOATS }
}

/// Returns the text of a list of dtypes in an error: `F32, F16 or BF16`.
fn dtypes_text(dtypes: &[DType]) -> String {
    let mut names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { last } else { format!("{} or {last}", names.join(", ")) }
}

/// Returns the text of the dtypes in which attention is computed on a device, for an error.
pub fn floats_text(device: &Device) -> String {
    let on_metal = if device.is_metal() { " on Metal" } else { "" };
    format!("{}{on_metal}", dtypes_text(floats_on(device)))
}

/// Returns the dtype in which scores and weights of inputs in `dtype` are computed: f64 for f64, and f32 otherwise.
pub fn accumulation_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// One dimension of an expected shape.
#[derive(Debug, Clone, Copy)]
pub enum Dim {
    /// A dimension of any size, with its name in errors. A leading `..` matches any number of dimensions.
    Any(&'static str),
    /// A dimension of this size.
    Is(usize),
    /// A dimension of this size, which errors show with its name: `H = 4`.
    Named(&'static str, usize),
}

/// Returns whether a shape matches an expected one, `(B, T, 64)` for example.
fn fits(expected: &[Dim], found: &[usize]) -> bool {
    if let [Any(".."), last @ ..] = expected {
        return found.len() >= last.len() && fits(last, &found[found.len() - last.len()..]);
    }
    let is_right = |(dim, size): (&Dim, &usize)| match dim {
        Any(_) => true,
        Is(right) | Named(_, right) => size == right,
    };
    found.len() == expected.len() && expected.iter().zip(found).all(is_right)
}

/// Returns the text of an expected shape in an error.
fn shape_text(dims: &[Dim]) -> String {
    let names: Vec<_> = dims.iter().map(Dim::to_string).collect();
    format!("({}{})", names.join(", "), if dims.len() == 1 { "," } else { "" })
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Any(name) => f.write_str(name),
            Is(size) => size.fmt(f),
            Named(name, size) => write!(f, "{name} = {size}"),
        }
    }
}

/// An argument of an operation, with its name in errors. Each check returns the argument again, or an error with what
/// was expected and what was found.
#[derive(Clone, Copy)]
pub struct Expect<'a> {
    op: &'a str,
    name: &'a str,
    is_plural: bool,
    tensor: &'a Tensor,
}

impl<'a> Expect<'a> {
    /// Creates the checks of an argument whose name is singular: `weight`, `input`.
    pub fn one(op: &'a str, name: &'a str, tensor: &'a Tensor) -> Self {
        Self { op, name, is_plural: false, tensor }
    }

    /// Creates the checks of an argument whose name is plural: `queries`, `ids`.
    pub fn many(op: &'a str, name: &'a str, tensor: &'a Tensor) -> Self {
        Self { is_plural: true, ..Self::one(op, name, tensor) }
    }

    /// Checks that the tensor has this shape.
    pub fn shape(self, expected: &[Dim]) -> Result<Self> {
        self.shape_of(&[expected])
    }

    /// Checks that the tensor has dimensions of these sizes.
    pub fn sizes(self, expected: &[usize]) -> Result<Self> {
        self.shape(&expected.iter().map(|&size| Is(size)).collect::<Vec<_>>())
    }

    /// Checks that the tensor has one of these shapes.
    pub fn shape_of(self, expected: &[&[Dim]]) -> Result<Self> {
        if expected.iter().any(|dims| fits(dims, self.tensor.dims())) {
            return Ok(self);
        }
        let texts: Vec<_> = expected.iter().map(|dims| shape_text(dims)).collect();
        self.fail("shape", self.tensor.dims(), texts.join(" or "))
    }

    /// Checks that the tensor has the dtype of another one. `whose` names the other in errors: `the weights'`.
    pub fn dtype(self, expected: DType, whose: &str) -> Result<Self> {
        if self.tensor.dtype() == expected {
            return Ok(self);
        }
        self.fail("dtype", self.tensor.dtype(), format!("{whose} {expected:?}"))
    }

    /// Checks that the tensor has one of these dtypes. `reason` follows the dtypes in errors: nothing, or ` with a
    /// weight in F16`.
    pub fn dtype_of(self, expected: &[DType], reason: impl fmt::Display) -> Result<Self> {
        if expected.contains(&self.tensor.dtype()) {
            return Ok(self);
        }
        self.fail("dtype", self.tensor.dtype(), format!("{}{reason}", dtypes_text(expected)))
    }

    /// Checks that the tensor has a dtype in which attention is computed on its device. `reason` follows the dtypes in
    /// errors.
    pub fn float(self, reason: impl fmt::Display) -> Result<Self> {
        let device = self.tensor.device();
        if floats_on(device).contains(&self.tensor.dtype()) {
            return Ok(self);
        }
        self.fail("dtype", self.tensor.dtype(), format!("{}{reason}", floats_text(device)))
    }

    /// Checks that the tensor does not have the dtype and the rank of token ids, (T,) or (B, T), which were meant to be
    /// embedded first.
    pub fn embeddings(self) -> Result<Self> {
        let dtype = self.tensor.dtype();
        if !dtype.is_int() || self.tensor.rank() > 2 {
            return Ok(self);
        }
        let Self { op, name, is_plural, tensor } = self;
        let are = if is_plural { "are" } else { "is" };
        let dims = tensor.dims();
        bail!(
            "[{op}] {name} {are} integers {dims:?} of {dtype:?}, as token ids are; expected their embeddings, which an \
             `EmbeddingLayer` or `candle_nn::Embedding` returns"
        )
    }

    /// Checks that the tensor is on the device of another one, which errors call `other`: `the weights`.
    pub fn same_device(self, other: &str, device: &Device) -> Result<Self> {
        if self.tensor.device().same_device(device) {
            return Ok(self);
        }
        let Self { op, name, is_plural, tensor } = self;
        let are = if is_plural { "are" } else { "is" };
        let found = tensor.device().location();
        let expected = device.location();
        bail!("[{op}] {name} {are} on {found:?}, expected the device of {other}, {expected:?}")
    }

    /// Returns the entries of an integer tensor, in the order of its dimensions, after checking that none is negative.
    /// The entries are copied from their device.
    pub fn counts(self) -> Result<Vec<usize>> {
        let Self { op, name, tensor, .. } = self;
        if tensor.dtype().is_float() {
            return self.fail("dtype", tensor.dtype(), "integers".into());
        }
        // Of a view that repeats its entries, memory for all of them.
        let bytes = [tensor.dims(), &[size_of::<i64>()]].concat();
        check_memory(op, format_args!("{name} of shape {:?}", tensor.dims()), &bytes)?;
        let count = |(at, number): (usize, i64)| match usize::try_from(number) {
            Ok(count) => Ok(count),
            Err(_) => bail!("[{op}] entry {at} of {name} is {number}, expected zero or more"),
        };
        to_vec(tensor)?.into_iter().enumerate().map(count).collect()
    }

    fn fail<T>(self, what: &str, found: impl fmt::Debug, expected: String) -> Result<T> {
        let Self { op, name, is_plural, .. } = self;
        let have = if is_plural { "have" } else { "has" };
        bail!("[{op}] {name} {have} {what} {found:?}, expected {expected}")
    }
}

/// Checks that keys and values, (B, T_kv, ..) each, have the same length and the batch size `b` of the queries. Without
/// queries, `b` is `None` and the two batch sizes have to be equal.
pub fn check_keys_and_values(op: &str, b: Option<usize>, keys: &Tensor, values: &Tensor) -> Result<()> {
    let b_k = keys.dim(0)?;
    let t_k = keys.dim(1)?;
    let b_v = values.dim(0)?;
    let t_v = values.dim(1)?;
    if let Some(b) = b
        && b != b_k
    {
        let repeat =
            if b_k == 1 { format!("; `repeat(({b}, 1, 1))` uses one sequence for all") } else { String::new() };
        bail!("[{op}] keys {:?} have batch size {b_k}, expected the queries' {b}{repeat}", keys.dims())
    }
    if b_v != b_k {
        bail!("[{op}] values {:?} have batch size {b_v}, expected the keys' {b_k}", values.dims())
    }
    if t_v != t_k {
        bail!("[{op}] values {:?} have length {t_v}, expected a value for each of {t_k} keys", values.dims())
    }
    Ok(())
}

/// Checks that a size is from 1 to `u32::MAX`, so that the product of two sizes fits a tensor's shape.
pub fn size(op: &str, name: &str, size: impl Into<Option<usize>>) -> Result<()> {
    let size = size.into();
    expect(op, name, size, |size: usize| size > 0, "at least 1")?;
    expect(op, name, size, |size: usize| size <= u32::MAX as usize, format_args!("at most {}", u32::MAX))
}

/// Checks that a number is in a range.
pub fn within(op: &str, name: &str, number: usize, range: RangeInclusive<usize>) -> Result<()> {
    let is_right = |candidate| range.contains(&candidate);
    match (range.start(), range.end()) {
        (0, most) => expect(op, name, number, is_right, format_args!("at most {most}")),
        (least, most) => expect(op, name, number, is_right, format_args!("{least} to {most}")),
    }
}

/// Checks that a number is a probability, from 0 to 1.
pub fn probability(op: &str, name: &str, p: f64) -> Result<()> {
    expect(op, name, p, |p| (0.0..=1.0).contains(&p), "a probability from 0 to 1")
}

/// Checks that a number is neither infinite nor NaN.
pub fn finite(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    expect(op, name, number, f64::is_finite, "a finite number")
}

/// Checks that a number is finite and above zero.
pub fn above_zero(op: &str, name: &str, number: impl Into<Option<f64>>) -> Result<()> {
    expect(op, name, number, |number: f64| number.is_finite() && number > 0.0, "a finite number above zero")
}

/// Checks the epsilon that a norm adds to a mean square or a variance: finite in f32, and zero or more.
pub fn epsilon(op: &str, name: &str, eps: impl Into<Option<f64>>) -> Result<()> {
    let is_right = |number: f64| (number as f32).is_finite() && number >= 0.0;
    expect(op, name, eps, is_right, "a finite number of zero or more")
}

/// Checks a number with `is_right`, if there is one. `expected` says in the error what `is_right` checks.
///
/// # Errors
/// `[op] name is .., expected ..`.
pub fn expect<T: Copy + fmt::Debug>(
    op: &str,
    name: &str,
    number: impl Into<Option<T>>,
    is_right: impl Fn(T) -> bool,
    expected: impl fmt::Display,
) -> Result<()> {
    match number.into() {
        Some(number) if !is_right(number) => bail!("[{op}] {name} is {number:?}, expected {expected}"),
        _ => Ok(()),
    }
}

/// Checks that a list has one entry for each of `n` things, such as sequences or heads.
///
/// # Errors
/// `[op] name has .. entries, expected one for each of n things`.
pub fn check_entries(op: &str, name: impl fmt::Display, found: usize, n: usize, things: &str) -> Result<()> {
    if found != n {
        bail!("[{op}] {name} has {found} entries, expected one for each of {n} {things}")
    }
    Ok(())
}

/// The number of bytes from which the allocator is tried before Candle allocates. Allocators do not refuse smaller
/// requests in practice.
const LARGE: u64 = 1 << 32;

/// Returns whether the bytes of a tensor with these dimensions can be addressed.
///
/// A dimension of 0 counts as 1: Candle computes strides and the shapes of views from products of some of the
/// dimensions, which overflow next to a 0 too.
pub fn is_addressable(dims: &[usize]) -> bool {
    // The largest element has eight bytes.
    let most = isize::MAX as usize / 8;
    let product = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim.max(1)));
    product.is_some_and(|product| product <= most)
}

/// Returns whether a tensor with these dimensions can be allocated. Candle aborts the program when the allocator
/// refuses, so this function first tries to allocate one byte per element.
pub fn fits_in_memory(dims: &[usize]) -> bool {
    is_addressable(dims)
        && match dims.iter().product::<usize>() {
            count if (count as u64) < LARGE => true,
            count => Vec::<u8>::new().try_reserve_exact(count).is_ok(),
        }
}

/// Checks that a tensor with these dimensions can be allocated.
///
/// # Errors
/// If it cannot: `what` does not fit in memory.
pub fn check_memory(op: &str, what: impl fmt::Display, dims: &[usize]) -> Result<()> {
    if !fits_in_memory(dims) {
        bail!("[{op}] {what} does not fit in memory")
    }
    Ok(())
}

/// Returns a vector with one `value` for each element of a tensor with these dimensions; `None` if it cannot be
/// allocated.
pub fn filled<T: Clone>(dims: &[usize], value: T) -> Option<Vec<T>> {
    if !is_addressable(dims) {
        return None;
    }
    let count = dims.iter().product();
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    values.resize(count, value);
    Some(values)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expect_errors_name_the_expected_and_the_found() -> Result<()> {
        let xs = Tensor::zeros((2, 3), DType::F32, &Device::Cpu)?;
        let input = Expect::one("op", "input", &xs);
        for shape in [[Any(".."), Is(3)].as_slice(), &[Any("B"), Is(3)], &[Any(".."), Any("B"), Any("T")]] {
            input.shape(shape)?;
        }
        input.shape_of(&[&[Any("T")], &[Any("B"), Any("T")]])?.dtype_of(&[DType::F64, DType::F32], "")?;
        let text = |result: Result<Expect>| result.err().expect("an error").to_string();
        let cases = [
            (input.shape(&[Is(2)]), "[op] input has shape [2, 3], expected (2,)"),
            (input.shape(&[Named("H", 4)]), "[op] input has shape [2, 3], expected (H = 4,)"),
            (input.shape(&[Any(".."), Any("B"), Is(4)]), "[op] input has shape [2, 3], expected (.., B, 4)"),
            (
                input.shape(&[Any(".."), Any("B"), Any("T"), Is(3)]),
                "[op] input has shape [2, 3], expected (.., B, T, 3)",
            ),
            (
                Expect::many("op", "keys", &xs).shape_of(&[&[Any("T")], &[Any("B"), Is(2)]]),
                "[op] keys have shape [2, 3], expected (T,) or (B, 2)",
            ),
            (input.dtype(DType::F16, "the weight's"), "[op] input has dtype F32, expected the weight's F16"),
            (
                input.dtype_of(&[DType::U8, DType::U32, DType::I64], " for ids"),
                "[op] input has dtype F32, expected U8, U32 or I64 for ids",
            ),
        ];
        for (result, expected) in cases {
            let found = text(result);
            assert!(found.starts_with(expected), "{found}");
        }
        Ok(())
    }
}
