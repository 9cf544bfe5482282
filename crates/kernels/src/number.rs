//! The types of tensors' elements, and strided views of them.

use half::{bf16, f16};

use crate::cpu::{Format, InstructionSet, MAX_LANES, SimdTask, Vector, dispatch_bf16, dispatch_f32};
use crate::error::Error;

/// The numbers of a tensor.
#[derive(Debug, Clone, Copy)]
pub enum Numbers<'a> {
    /// Floats in f32.
    F32(&'a [f32]),
    /// Floats in bf16.
    BF16(&'a [bf16]),
    /// Floats in f16.
    F16(&'a [f16]),
    /// Bytes: codes, a boolean mask, or bits.
    U8(&'a [u8]),
    /// Whole numbers of 32 bits: the indices of pages.
    U32(&'a [u32]),
}

impl<'a> Numbers<'a> {
    /// Returns the name of the type.
    pub(crate) fn type_name(self) -> &'static str {
        match self {
            Self::F32(_) => f32::NAME,
            Self::BF16(_) => bf16::NAME,
            Self::F16(_) => f16::NAME,
            Self::U8(_) => u8::NAME,
            Self::U32(_) => "u32",
        }
    }

    /// Returns the count of the numbers.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::F32(numbers) => numbers.len(),
            Self::BF16(numbers) => numbers.len(),
            Self::F16(numbers) => numbers.len(),
            Self::U8(numbers) => numbers.len(),
            Self::U32(numbers) => numbers.len(),
        }
    }

    /// Returns the numbers if they have some type; `name` is for errors.
    pub(crate) fn typed<S: Stored>(self, name: &str) -> Result<&'a [S], Error> {
        S::typed(self).ok_or_else(|| {
            Error::Shape(format!("expected {name} in {}, found numbers in {}", S::NAME, self.type_name()))
        })
    }
}

/// A number in memory that the kernels read as f32: an element, or a code of a key or value. Codes of 4 bits are two in
/// one element.
pub trait Stored: Copy + Default + Send + Sync + 'static {
    /// The name of the type, for errors.
    const NAME: &'static str;

    /// Whether numbers are multiplied by the scale of their row or of their group.
    const IS_SCALED: bool;

    /// Whether a row may have a scale for each of several groups of numbers.
    const HAS_GROUPS: bool = false;

    /// The numbers in an element.
    const NUMBERS: usize = 1;

    /// The numbers that are stored together, next to each other: rows have a multiple of them.
    const BLOCK: usize = 1;

    /// Returns the slice of the numbers if they have this type; `None` if they have another.
    fn typed(numbers: Numbers<'_>) -> Option<&[Self]>;

    /// Returns a slice of this type as [`Numbers`].
    fn numbers(typed: &[Self]) -> Numbers<'_>;

    /// Returns whether the number is neither infinite nor NaN.
    fn is_finite(self) -> bool;

    /// Loads a vector of numbers, from the first of a block on.
    ///
    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// Loads a vector of numbers from number `n` of a row on; where elements have several numbers, n is a multiple of
    /// the lanes. `row` may be any block of the row.
    ///
    /// # Safety
    /// As [`Vector::load`], for the numbers from `n` on.
    #[inline(always)]
    unsafe fn load_at<V: Vector>(row: *const Self, n: usize) -> V {
        // SAFETY: as this method's contract.
        unsafe { Self::load(row.add(n)) }
    }
}

/// Codes of keys and values: the code 128 is 0.
impl Stored for u8 {
    const NAME: &'static str = "u8";
    const IS_SCALED: bool = true;

    fn typed(numbers: Numbers<'_>) -> Option<&[Self]> {
        if let Numbers::U8(typed) = numbers { Some(typed) } else { None }
    }

    fn numbers(typed: &[Self]) -> Numbers<'_> {
        Numbers::U8(typed)
    }

    #[inline(always)]
    fn is_finite(self) -> bool {
        true
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: as this method's contract.
        unsafe { V::load_u8(from).sub(V::splat(128.0)) }
    }
}

/// The operations of an element that the algorithms use.
///
/// Code outside of this package that is generic over [`Element`](crate::Element) can name these methods. A method that
/// does not validate its arguments is `unsafe`, or takes a type of which only this package can make a value.
pub trait Number: Stored {
    /// The format of panels of the element.
    const FORMAT: Format;

    fn from_f32(x: f32) -> Self;

    /// Stores a vector, rounded to the element.
    ///
    /// # Safety
    /// As [`Vector::store`].
    unsafe fn store<V: Vector>(vector: V, to: *mut Self);

    /// Runs a task on an instruction set's kernel, over pairs of bf16 if this is bf16 and the instruction set
    /// multiplies them, and returns its result.
    fn dispatch<T: SimdTask>(instruction_set: InstructionSet, task: T) -> T::Output;
}

macro_rules! number {
    ($type:ty { format: $format:ident, load: $load:ident, store: $store:ident, from: $from_f32:expr, run: $dispatch:path }) => {
        impl Stored for $type {
            const NAME: &'static str = stringify!($type);
            const IS_SCALED: bool = false;

            fn typed(numbers: Numbers<'_>) -> Option<&[Self]> {
                if let Numbers::$format(typed) = numbers { Some(typed) } else { None }
            }

            fn numbers(typed: &[Self]) -> Numbers<'_> {
                Numbers::$format(typed)
            }

            #[inline(always)]
            fn is_finite(self) -> bool {
                <$type>::is_finite(self)
            }

            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                // SAFETY: as this method's contract; bf16 and f16 are stored as their bits.
                unsafe { V::$load(from.cast()) }
            }
        }

        impl Number for $type {
            const FORMAT: Format = Format::$format;

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from_f32(x)
            }

            #[inline(always)]
            unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
                // SAFETY: as this method's contract; bf16 and f16 are stored as their bits.
                unsafe { vector.$store(to.cast()) }
            }

            fn dispatch<T: SimdTask>(instruction_set: InstructionSet, task: T) -> T::Output {
                $dispatch(instruction_set, task)
            }
        }
    };
}

number!(f32 { format: F32, load: load, store: store, from: std::convert::identity, run: dispatch_f32 });
number!(bf16 { format: BF16, load: load_bf16, store: store_bf16, from: bf16::from_f32, run: dispatch_bf16 });
number!(f16 { format: F16, load: load_f16, store: store_f16, from: f16::from_f32, run: dispatch_f32 });

/// Loads the first `n` lanes. The other lanes are default elements.
///
/// # Safety
/// The processor has the instruction set of V; `from` is valid for `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn load_first<E: Stored, V: Vector>(from: *const E, n: usize) -> V {
    // SAFETY: as this function's contract; the copy has the elements of the longest vector.
    unsafe {
        if n == V::LANES {
            return E::load(from);
        }
        let mut whole = [E::default(); MAX_LANES];
        std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), n);
        E::load(whole.as_ptr())
    }
}

/// Loads the first `n` lanes from number `at` of a row on. The other lanes are default elements. Where elements have
/// several numbers, `n` is all lanes.
///
/// # Safety
/// The processor has the instruction set of V; the row has the numbers, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Stored, V: Vector>(row: *const S, at: usize, n: usize) -> V {
    // SAFETY: as this function's contract.
    unsafe { if S::NUMBERS > 1 || n == V::LANES { S::load_at(row, at) } else { load_first(row.add(at), n) } }
}

/// Stores the first `n` lanes.
///
/// # Safety
/// The processor has the instruction set of V; `to` is valid for writes of `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn store_first<E: Number, V: Vector>(vector: V, to: *mut E, n: usize) {
    // SAFETY: as this function's contract; the copy has the elements of the longest vector.
    unsafe {
        if n == V::LANES {
            return E::store(vector, to);
        }
        let mut whole = [E::default(); MAX_LANES];
        E::store(vector, whole.as_mut_ptr());
        std::ptr::copy_nonoverlapping(whole.as_ptr(), to, n);
    }
}

/// Copies a row of elements as f32 multiplied by a factor, with zeros up to `padded`.
///
/// # Safety
/// The processor has the instruction set of V; `from` is valid for `width` elements and `to` for writes of `padded`, at
/// least `width`.
#[inline(always)]
pub(crate) unsafe fn widen_row<E: Stored, V: Vector>(
    from: *const E,
    width: usize,
    to: *mut f32,
    padded: usize,
    factor: f32,
) {
    let whole = width / V::LANES * V::LANES;
    // SAFETY: as this function's contract.
    unsafe {
        let factor = V::splat(factor);
        for at in (0..whole).step_by(V::LANES) {
            E::load::<V>(from.add(at)).mul(factor).store(to.add(at));
        }
        if whole < width {
            let rest: V = load_first(from.add(whole), width - whole);
            store_first(rest.mul(factor), to.add(whole), width - whole);
        }
        (width..padded).for_each(|at| to.add(at).write(0.0));
    }
}

/// Copies two rows as pairs, the first row in the lower halves. A missing row becomes zeros, and zeros follow up to
/// `padded` words.
///
/// # Safety
/// The rows are valid for `width` elements of 16 bits, `to` for writes of `padded` words.
#[inline(always)]
pub(crate) unsafe fn pack_row_pair<E>(
    low: Option<*const E>,
    high: Option<*const E>,
    width: usize,
    to: *mut f32,
    padded: usize,
) {
    let to: *mut u32 = to.cast();
    // SAFETY: as this function's contract.
    unsafe {
        let Some(any) = low.or(high) else { return to.write_bytes(0, padded) };
        // Instead of a missing row the other one is read, and its elements are masked.
        let low_mask = if low.is_some() { u16::MAX } else { 0 };
        let high_mask = if high.is_some() { u16::MAX } else { 0 };
        let low_row = low.unwrap_or(any).cast::<u16>();
        let high_row = high.unwrap_or(any).cast::<u16>();
        for d in 0..width {
            let low_half = u32::from(*low_row.add(d) & low_mask);
            let high_half = u32::from(*high_row.add(d) & high_mask);
            *to.add(d) = low_half | high_half << 16;
        }
        to.add(width).write_bytes(0, padded - width);
    }
}

/// A strided view of a slice. A dimension whose stride is 0 repeats one entry.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a, T, const N: usize> {
    /// The elements, the first of which is entry (0, .., 0).
    pub data: &'a [T],
    /// The distance between neighbouring entries along each dimension, in elements.
    pub strides: [usize; N],
}

impl<T, const N: usize> Strided<'_, T, N> {
    /// Checks that the slice has every entry within `dims`, each of `width` elements.
    pub(crate) fn check(&self, what: &str, dims: [usize; N], width: usize) -> Result<(), Error> {
        let last = dims
            .iter()
            .zip(&self.strides)
            .try_fold(0usize, |last, (&dim, &stride)| last.checked_add(dim.saturating_sub(1).checked_mul(stride)?));
        let end = last.and_then(|last| last.checked_add(width));
        // Entries without elements may have any place.
        if width == 0 || dims.contains(&0) || end.is_some_and(|end| end <= self.data.len()) {
            return Ok(());
        }
        let strides = self.strides;
        let found = self.data.len();
        Err(Error::Shape(format!(
            "{what} of {dims:?} entries of {width} elements with strides {strides:?} ends past the {found} \
             elements of its slice"
        )))
    }

    /// Returns the place of an entry within the dimensions that were checked.
    #[inline(always)]
    pub(crate) fn at(&self, index: [usize; N]) -> *const T {
        // Wrapping, since rows without elements may have any stride.
        let offset = (0..N).fold(0usize, |offset, n| offset.wrapping_add(index[n].wrapping_mul(self.strides[n])));
        self.data.as_ptr().wrapping_add(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::pack_row_pair;

    #[test]
    fn pack_row_pair_with_missing_row_writes_zeros() {
        let low_elements = [1u16, 2, 0xffff];
        let high_elements = [3u16, 4, 0x8000];
        let low_row = low_elements.as_ptr();
        let high_row = high_elements.as_ptr();
        for (low, high, expected) in [
            (Some(low_row), Some(high_row), [0x0003_0001, 0x0004_0002, 0x8000_ffff]),
            (Some(low_row), None, [1, 2, 0xffff]),
            (None, Some(high_row), [0x0003_0000, 0x0004_0000, 0x8000_0000]),
            (None, None, [0; 3]),
        ] {
            let mut words = [1f32; 5];
            // SAFETY: the rows have three elements, and there are five words.
            unsafe { pack_row_pair(low, high, 3, words.as_mut_ptr(), 5) };
            assert_eq!(words.map(f32::to_bits), [expected[0], expected[1], expected[2], 0, 0]);
        }
    }
}
