//! The traits in which algorithms are written: a vector register, the kernel of an instruction set, and tasks that are
//! compiled for each kernel.

use super::panel::{Format, PanelProduct};

/// The most lanes that a vector of any instruction set has.
pub(crate) const MAX_LANES: usize = 16;

/// A vector of [`LANES`](Vector::LANES) f32, and the kernel for words of one f32.
///
/// # Safety
/// Every method needs a processor that has the instruction set, and belongs (inlined) into a function that is
/// compiled for it. A pointer must be valid for `LANES` elements. No pointer has to be aligned.
pub trait Vector: Copy + Kernel<Vector = Self> {
    /// The number of f32 in a vector, at most [`MAX_LANES`].
    const LANES: usize;
    /// A truth value for each lane.
    type Mask: Copy;
    /// Whether a table of sixteen numbers is read in one instruction, so that codes of 5 and 6 bits that are split are
    /// as fast as codes of 8 bits.
    const HAS_FAST_TABLES: bool = false;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// Loads bf16 from their bits.
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Loads whole numbers from 0 to 255.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// Loads the two bf16 of each of `LANES` words.
    unsafe fn load_pairs(from: *const f32) -> WordHalves<Self>;
    /// Loads bytes and takes 4 bits of each from bit `shift` on, 0 or 4: the code c is the number c - 7.5.
    unsafe fn load_nibbles(from: *const u8, shift: u32) -> Self;
    /// Loads bytes as the highest bits of words whose other bits are zeros.
    unsafe fn load_highest_bytes(from: *const u8) -> Self;
    /// Takes the highest 1, 2, 4 or 8 bits of each word. Where `IS_SIGNED`, the bits are in two's complement, and the
    /// number is multiplied by 2^(32 - BITS), since the bits stay at the top of the word: that takes one mask. Moving
    /// them down with their sign would take a second shift, which AMD's processors run on half of their ports.
    unsafe fn take_bits<const BITS: u32, const IS_SIGNED: bool>(self) -> TakenBits<Self>;
    /// Takes the highest 4 bits of each word as the index of a number of a table of sixteen.
    unsafe fn take_entries(self, table: *const f32) -> TakenBits<Self>;
    /// Takes each 4 bits of each word as the index of a byte of a table of sixteen. Only instruction sets without
    /// [fast tables](Self::HAS_FAST_TABLES) have it.
    unsafe fn look_up_bytes(self, _table: *const i8) -> TableBytes<Self> {
        unreachable!("this instruction set takes entries of tables of f32")
    }
    /// Takes the highest 8 bits of each word as a float of 8 bits. The bits below its sign move down by `SHIFT` to
    /// their places in an f32: the exponent's bias is then another one, so that the number is divided by
    /// [`Float8::factor`](super::code_format::Float8::factor).
    unsafe fn take_float8<const SHIFT: u32>(self) -> TakenBits<Self>;
    /// Stores bf16, rounded to the nearest, ties to even.
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn store_f16(self, to: *mut u16);
    /// Stores pairs of bf16, this vector's in the lower half of each word and `high`'s in the upper half. Only
    /// instruction sets that multiply pairs of bf16 have it.
    unsafe fn store_pairs(self, _high: Self, _to: *mut f32) {
        unreachable!("this instruction set multiplies no pairs")
    }
    /// Stores bf16, two in a word. Only instruction sets that multiply pairs of bf16 have it.
    unsafe fn store_halves(self, _to: *mut f32) {
        unreachable!("this instruction set multiplies no pairs")
    }

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// Returns `self · factor + addend`, rounded once (twice on the scalar instruction set where the processor has no
    /// FMA).
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// Returns the larger number of each lane, or `other`'s if either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// Compares lane by lane: false if either number is NaN.
    unsafe fn less_than(self, other: Self) -> Self::Mask;
    /// Returns `yes` where the mask is set, and `no` elsewhere.
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// Adds up all lanes, always in the same order.
    unsafe fn sum(self) -> f32;
    /// Adds up the lanes of each vector: lane n is the sum of vector n. Vectors past `LANES` are not read.
    unsafe fn sum_each(vectors: &[Self; MAX_LANES]) -> Self;

    /// Returns 2 to the power `self`, for `self` up to 127, to 3e-7 of itself, four ulp at most: 0 below the smallest
    /// normal number, NaN for NaN.
    ///
    /// `2^x = 2^n · 2^f`, where n is the nearest integer and f is within ±½, and 2^f is a polynomial of f
    /// ([`EXP2`](super::functions::EXP2)).
    unsafe fn exp2(self) -> Self;

    /// Prefetches the cache line at an address, which need not be valid.
    unsafe fn prefetch(at: *const u8) {
        let _ = at;
    }

    /// Transposes a square of `LANES` by `LANES` 32-bit words. Strides count words.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// The two bf16 of each word of a vector, as f32.
#[derive(Clone, Copy)]
pub struct WordHalves<V> {
    /// The lower halves of the words.
    pub low: V,
    /// The upper halves of the words.
    pub high: V,
}

/// The highest bits of each word of a vector.
pub struct TakenBits<V> {
    /// The bits as a number.
    pub number: V,
    /// The words, shifted so that the next bits are the highest. The bits that were shifted in have no meaning.
    pub rest: V,
}

/// The bytes of a table that the eight codes of 4 bits of each word choose.
#[derive(Clone, Copy)]
pub struct TableBytes<V> {
    /// The bytes of the upper code of each byte of a word.
    pub upper: V,
    /// The bytes of the lower codes.
    pub lower: V,
}

/// Returns the bits of an f32 at which [`Vector::take_float8`] puts the bits of a float of 8 bits.
pub(super) const fn float8_mask(shift: u32) -> u32 {
    1 << 31 | 0x7f00_0000 >> shift
}

/// Writes the methods of a [`Vector`], which all have the same attributes and the same reason to be sound.
macro_rules! simd_fns {
    ($(fn $name:ident $(<$(const $parameter:ident: $kind:ty),*>)? ($($args:tt)*) $(-> $out:ty)? $body:block)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "the scalar instruction set's arithmetic is safe")]
        unsafe fn $name $(<$(const $parameter: $kind),*>)? ($($args)*) $(-> $out)? {
            // SAFETY: by the contract of `Vector`, the processor has the instruction set and pointers are valid for a
            // vector.
            unsafe { $body }
        }
    )*};
}
pub(super) use simd_fns;

/// The constants of a [`Kernel`] as plain numbers, for plans and sizes that need not be compiled for each kernel. The
/// constants are described at the trait.
#[derive(Clone, Copy)]
pub struct Layout {
    pub lanes: usize,
    pub elements: usize,
    pub rows: usize,
    pub depth: usize,
    pub panel: usize,
    pub block: usize,
    pub has_fast_tables: bool,
}

/// The operations of an instruction set for one type of operand. Matrices consist of 32-bit words: an f32, or a pair of
/// bf16 along the depth of the product, so that one description serves both.
///
/// # Safety
/// Every method needs a processor that has the instruction set.
pub trait Kernel: Sized {
    /// The vector of f32 of the instruction set, or of the narrower instruction set with the same vectors. It is also
    /// the kernel for words of one f32.
    type Vector: Vector;
    /// The elements in a word: 1 for f32, 2 for bf16.
    const ELEMENTS: usize;
    /// Whether a word is a pair of bf16. A branch on a constant such as this one or a `const` block is not compiled for
    /// the kernels that do not take it.
    const IS_BF16: bool = Self::ELEMENTS == 2;
    /// The rows of a group of A, which a register tile takes at once.
    const ROWS: usize;
    /// The number that the rows of A and C are a multiple of. The last rows of a group take smaller tiles.
    const MIN_ROWS: usize = 1;
    /// The number that the words of depth are a multiple of.
    const DEPTH: usize = 1;
    /// The vectors of a panel's columns.
    const VECTORS: usize;
    /// The columns of a panel, at most [`MAX_COLUMNS`](super::MAX_COLUMNS).
    const PANEL: usize = Self::VECTORS * <Self::Vector as Vector>::LANES;

    /// The keys that are scored before the next softmax; a multiple of `ROWS`, and of `DEPTH` words.
    const BLOCK: usize = 128;

    const LAYOUT: Layout = Layout {
        lanes: <Self::Vector as Vector>::LANES,
        elements: Self::ELEMENTS,
        rows: Self::ROWS,
        depth: Self::DEPTH,
        panel: Self::PANEL,
        block: Self::BLOCK,
        has_fast_tables: <Self::Vector as Vector>::HAS_FAST_TABLES,
    };

    /// Configures tile registers for products on this thread, until the result is dropped. Tasks that multiply call
    /// this first.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn configure_tiles() -> Option<Tiles> {
        None
    }

    /// Runs a task in a function that is compiled for the instruction set.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn run_simd<T: SimdTask>(task: T) -> T::Output;

    /// Returns `sum + a · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// The processor has the instruction set.
    #[inline(always)]
    unsafe fn add_product(sum: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: as this method's contract.
        unsafe { a.mul_add(b, sum) }
    }

    /// Adds the products of rows of A, from `a` on, with the words of B to a tile of sums, if the kernel has its own
    /// loop for tiles of this size. Returns whether it has one. A kernel has one where the compiler would keep the sums
    /// in memory instead of registers.
    ///
    /// # Safety
    /// The processor has the instruction set, and the product's pointers are valid for the tile.
    #[inline(always)]
    unsafe fn accumulate_words(_sums: &mut [Self::Vector], _product: &PanelProduct, _a: *const f32) -> bool {
        false
    }

    /// Computes a product whose right operand is stored as `B` says. It is inlined into a function that is compiled for
    /// the instruction set; [`multiply`](super::multiply) calls it so.
    ///
    /// # Safety
    /// As [`multiply`](super::multiply).
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct);
}

/// A guard of configured tile registers, which it releases when it is dropped.
#[allow(dead_code, reason = "only kernels for x86-64 have tile registers")]
pub struct Tiles {
    pub(super) release: unsafe fn(),
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tile registers are configured.
        unsafe { (self.release)() }
    }
}

/// Work that is written once and compiled for each kernel. `run` is `#[inline(always)]` where it computes, so that it
/// becomes part of a function that is compiled for the instruction set.
pub trait SimdTask {
    /// The result of the task.
    type Output;

    /// Runs the task.
    ///
    /// # Safety
    /// The processor has the instruction set of K.
    unsafe fn run<K: Kernel>(self) -> Self::Output;
}

/// Writes [`Kernel::run_simd`] for a list of processor features: a function that is compiled for them. It is not
/// inlined, so that a task is compiled once, wherever it is started.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! compiled_for {
    ($features:literal) => {
        #[inline(never)]
        #[target_feature(enable = $features)]
        unsafe fn run_simd<T: crate::cpu::SimdTask>(task: T) -> T::Output {
            // SAFETY: the processor has the instruction set, whose instructions this function is compiled for.
            unsafe { task.run::<Self>() }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use compiled_for;

/// The steps of depth of a panel that are stored together.
#[derive(Clone, Copy)]
pub struct ColumnBlock<'a> {
    /// The first word of the block: of its scales if it has any, and of its numbers otherwise.
    pub at: *const f32,
    /// The number of columns of the panel.
    pub panel: usize,
    /// The format of the panel.
    pub format: &'a Format,
}

/// A format of the columns of B.
pub trait Columns {
    /// The steps of depth that a register stores.
    const STEPS: usize = 1;
    /// The steps of depth that are stored together. The depth of a product is a multiple of it.
    const BLOCK: usize = Self::STEPS;
    /// The bytes of `STEPS` steps of a column.
    const BYTES: usize = size_of::<f32>();
    /// Whether the columns are words that are multiplied as they are.
    const IS_WORDS: bool = false;
    /// Whether every panel has all columns in memory, and products compute all of them. There are many formats of
    /// codes, for each of which fewer tiles are compiled then.
    const HAS_WHOLE_PANELS: bool = false;
    /// Whether products read panels of any number of columns, as kernels of other instruction sets have them.
    const HAS_ANY_PANEL: bool = false;
    /// The [`Vector::HAS_FAST_TABLES`] of the instruction sets that use the format, or `None` if all use it.
    const FAST_TABLES: Option<bool> = None;

    /// The scales of a vector of columns.
    type Scales<V: Vector>: Copy;
    /// `STEPS` steps of a vector of columns.
    type Loaded<V: Vector>: Copy;

    /// Returns the address of a block's numbers.
    fn numbers(block: &ColumnBlock) -> *const f32 {
        block.at
    }

    /// Returns the number of steps of a block that share scales, a multiple of `STEPS`.
    fn group(_block: &ColumnBlock) -> usize {
        Self::BLOCK
    }

    /// Loads the scales of a group of the block's steps, of a vector of columns from a column on.
    ///
    /// # Safety
    /// As [`Vector::load`], for the scales of the block from the column on.
    unsafe fn scales<V: Vector>(block: &ColumnBlock, group: usize, column: usize) -> Self::Scales<V>;

    /// Loads `STEPS` steps of a vector of columns, whose scales are `scales`, from words `b` of a block and a column of
    /// a panel of `panel` columns on.
    ///
    /// # Safety
    /// As [`Vector::load`], for `STEPS` steps of the block from the column on.
    unsafe fn load<V: Vector>(b: *const f32, column: usize, panel: usize, scales: &Self::Scales<V>) -> Self::Loaded<V>;

    /// Returns the numbers of the first of the remaining steps, and removes that step.
    ///
    /// # Safety
    /// As [`Vector`].
    unsafe fn take<V: Vector>(loaded: &mut Self::Loaded<V>, scales: &Self::Scales<V>) -> V;
}

/// Work that is written once and compiled for each format of columns.
pub trait WithColumns {
    /// Runs the work.
    ///
    /// # Safety
    /// The columns have the format B.
    unsafe fn run<B: Columns>(self);
}

/// Returns whether only instruction sets with other vectors than V use the format B.
pub(crate) const fn is_of_others<B: Columns, V: Vector>() -> bool {
    matches!(B::FAST_TABLES, Some(of_users) if of_users != V::HAS_FAST_TABLES)
}
