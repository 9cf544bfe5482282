//! Instruction sets: which the machine has and which a call uses, what one provides, and how a call reaches it.

use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;
use std::sync::OnceLock;

use super::arch;
use super::product::{Bf16Pairs, CodeBlocks, Columns, F16Rows, Format, Multiply, Product, Words, multiply_rows};
use super::vector::Vector;

/// An instruction set that the CPU kernels are compiled for.
///
/// The best one that the processor has is chosen once; `CANDLE_ATTENTION_CPU=avx2` in the environment chooses another
/// for the whole process, a caller may choose one for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum InstructionSet {
    /// Plain Rust, on every processor.
    Scalar,
    /// Arm's 128-bit vectors.
    Neon,
    /// NEON with bf16 dot products.
    NeonBf16,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 (F, BW, DQ, VL).
    Avx512,
    /// AVX-512 with bf16 dot products.
    Avx512Bf16,
    /// Tile matrix products in bf16, beside AVX-512; the operating system has to grant them.
    Amx,
}

/// The variable that chooses an instruction set for the process.
const VARIABLE: &str = "CANDLE_ATTENTION_CPU";

impl InstructionSet {
    /// Every instruction set of every processor, the slowest first.
    pub const ALL: [Self; 7] =
        [Self::Scalar, Self::Neon, Self::NeonBf16, Self::Avx2, Self::Avx512, Self::Avx512Bf16, Self::Amx];

    /// The instruction sets that this processor has, the slowest first; [`InstructionSet::Scalar`] is always among
    /// them.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|instruction_set| instruction_set.is_available()).collect()
    }

    /// Whether this processor has the instruction set.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => has_avx512(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => has_avx512() && is_x86_feature_detected!("avx512bf16"),
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512Bf16.is_available() && arch::amx::is_granted(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonBf16 => Self::Neon.is_available() && std::arch::is_aarch64_feature_detected!("bf16"),
            _ => false,
        }
    }

    /// The instruction set for a call: the one asked for, else the environment's, else the fastest for products over
    /// bf16 or over other types.
    ///
    /// # Errors
    /// If this processor lacks the instruction set, or the environment names none.
    pub fn choose(asked: Option<Self>, is_bf16: bool) -> Result<Self, UnsupportedInstructionSet> {
        if let Some(instruction_set) = asked {
            return if instruction_set.is_available() {
                Ok(instruction_set)
            } else {
                Err(UnsupportedInstructionSet::Unavailable(instruction_set))
            };
        }
        static FROM_ENVIRONMENT: OnceLock<Result<Option<InstructionSet>, UnsupportedInstructionSet>> = OnceLock::new();
        match FROM_ENVIRONMENT.get_or_init(from_environment) {
            Ok(Some(instruction_set)) => Ok(*instruction_set),
            Ok(None) => Ok(Self::fastest(is_bf16)),
            Err(error) => Err(error.clone()),
        }
    }

    fn fastest(is_bf16: bool) -> Self {
        // Once: a virtual machine answers what processor it has by a trap, and the projections of a token ask each
        // time.
        static FASTEST: OnceLock<[InstructionSet; 2]> = OnceLock::new();
        let of = |is_bf16: bool| {
            let worth = |instruction_set: &Self| match instruction_set {
                // Beside bf16 they are NEON and AVX-512.
                Self::NeonBf16 | Self::Avx512Bf16 | Self::Amx if !is_bf16 => false,
                Self::Avx512Bf16 => !has_slow_dot_products(),
                _ => true,
            };
            Self::available().into_iter().rfind(worth).unwrap_or(Self::Scalar)
        };
        FASTEST.get_or_init(|| [false, true].map(of))[usize::from(is_bf16)]
    }
}

fn from_environment() -> Result<Option<InstructionSet>, UnsupportedInstructionSet> {
    let Some(value) = std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) else { return Ok(None) };
    let value = value.to_string_lossy();
    match value.parse::<InstructionSet>() {
        Ok(instruction_set) if instruction_set.is_available() => Ok(Some(instruction_set)),
        Ok(instruction_set) => {
            Err(UnsupportedInstructionSet::Environment(format!("is {instruction_set}, which this processor lacks")))
        }
        Err(_) => Err(UnsupportedInstructionSet::Environment(format!("is {value:?}, which is no instruction set"))),
    }
}

/// Why there is no instruction set for a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UnsupportedInstructionSet {
    /// The processor lacks it.
    Unavailable(InstructionSet),
    /// No instruction set has this name.
    Unknown(String),
    /// What is wrong with `CANDLE_ATTENTION_CPU`.
    Environment(String),
}

impl fmt::Display for UnsupportedInstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let available = names(&InstructionSet::available());
        match self {
            Self::Unavailable(instruction_set) => {
                write!(f, "this processor lacks the instruction set {instruction_set}, expected one of {available}")
            }
            Self::Unknown(name) => {
                write!(f, "{name:?} is no instruction set, expected one of {}", names(&InstructionSet::ALL))
            }
            Self::Environment(what) => write!(f, "{VARIABLE} {what}, expected one of {available}"),
        }
    }
}

impl std::error::Error for UnsupportedInstructionSet {}

fn names(instruction_sets: &[InstructionSet]) -> String {
    instruction_sets.iter().map(InstructionSet::to_string).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}").to_lowercase())
    }
}

impl FromStr for InstructionSet {
    type Err = UnsupportedInstructionSet;

    fn from_str(name: &str) -> Result<Self, UnsupportedInstructionSet> {
        let known = Self::ALL.into_iter().find(|instruction_set| instruction_set.to_string() == name);
        known.ok_or_else(|| UnsupportedInstructionSet::Unknown(name.into()))
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

/// What the processor says of itself under `leaf`, the first part of it.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "unsafe in older versions of Rust that are allowed")]
pub(crate) fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) }
}

/// Intel's bf16 dot products take four cycles for what a multiply-add in f32 does in two: 150 GFLOP/s against 284 on
/// two cores of a Xeon (family 6, model 167). AMD's take half of the time.
fn has_slow_dot_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let leaf = cpuid(0);
        (leaf.ebx, leaf.edx, leaf.ecx) == (0x756e_6547, 0x4965_6e69, 0x6c65_746e)
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// The constants of a [`Kernel`], which are described there, for plans and sizes, which need not be compiled for each.
#[derive(Clone, Copy)]
pub struct Layout {
    pub lanes: usize,
    pub elements: usize,
    pub rows: usize,
    pub depth: usize,
    pub panel: usize,
    pub block: usize,
}

impl Layout {
    /// Returns the constants of an instruction set's kernel for words of one f32, or of its kernel for bf16.
    ///
    /// # Panics
    /// If the processor lacks the instruction set.
    pub fn new(instruction_set: InstructionSet, is_bf16: bool) -> Self {
        struct CopyLayout<'a>(&'a mut Option<Layout>);
        impl SimdTask for CopyLayout<'_> {
            unsafe fn run<K: Kernel>(self) {
                *self.0 = Some(K::LAYOUT);
            }
        }
        let mut layout = None;
        if is_bf16 {
            dispatch_bf16(instruction_set, CopyLayout(&mut layout));
        } else {
            dispatch_f32(instruction_set, CopyLayout(&mut layout));
        }
        layout.expect("a task that is dispatched runs")
    }
}

/// What an instruction set does for one type of operand. Matrices consist of 32-bit words: an f32, or a pair of bf16
/// along the depth of the product, so that one description serves both.
///
/// # Safety
/// Every method needs a processor that has the instruction set.
pub trait Kernel: Sized {
    /// The instruction set's vector of f32, which is its kernel for words of one f32, or that of the instruction set
    /// that shares it. A processor that has the instruction set has that kernel's too.
    type Vector: Vector;
    /// Elements in a word: 1 for f32, 2 for bf16.
    const ELEMENTS: usize;
    /// Whether a word is a pair of bf16. A branch on one constant, as this one or a `const` block, that is not taken is
    /// not compiled for the kernel.
    const IS_BF16: bool = Self::ELEMENTS == 2;
    /// The rows of a group of A, which a register tile takes at once.
    const ROWS: usize;
    /// The rows of A and C come in multiples of this; what is left of a group takes smaller tiles.
    const MIN_ROWS: usize = 1;
    /// The words of depth come in multiples of this.
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
    };

    /// Sets up tile registers for products on this thread, until the result is dropped. Tasks that call
    /// [`multiply`](Self::multiply) do this first.
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
    unsafe fn run_simd(task: impl SimdTask);

    /// `sum + a · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// The processor has the instruction set.
    #[inline(always)]
    unsafe fn add_product(sum: Self::Vector, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        // SAFETY: as this method's contract.
        unsafe { a.mul_add(b, sum) }
    }

    /// Adds the products of rows of A, from `a` on, with the words of B to a tile of sums, for an instruction set that
    /// has its own loop for as many, where the compiler keeps the sums elsewhere than in registers. Whether it has.
    ///
    /// # Safety
    /// The processor has the instruction set, and the product's pointers are valid for the tile.
    #[inline(always)]
    unsafe fn accumulate_words(_sums: &mut [Self::Vector], _product: &Product, _a: *const f32) -> bool {
        false
    }

    /// [`multiply`](Self::multiply), in a function that is compiled for the instruction set.
    ///
    /// # Safety
    /// As there.
    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &Product) {
        // SAFETY: as this method's contract.
        unsafe { multiply_rows::<Self, B>(product, 0) }
    }

    /// `C = A B`, or `C = C · factors + A B`.
    ///
    /// # Safety
    /// The processor has the instruction set, its tiles are configured, and the product's pointers are valid for its
    /// sizes.
    unsafe fn multiply(product: &Product) {
        // SAFETY: as this method's contract.
        unsafe {
            match product.format {
                _ if const { Self::IS_BF16 } => Self::run_simd(Multiply(product, PhantomData::<Words>)),
                Format::F32 => Self::run_simd(Multiply(product, PhantomData::<Words>)),
                Format::BF16 => Self::run_simd(Multiply(product, PhantomData::<Bf16Pairs>)),
                Format::F16 => Self::run_simd(Multiply(product, PhantomData::<F16Rows>)),
                Format::Codes { bits: 4, has_minimums: false } => {
                    Self::run_simd(Multiply(product, PhantomData::<CodeBlocks<4, false>>));
                }
                Format::Codes { bits: 4, has_minimums: true } => {
                    Self::run_simd(Multiply(product, PhantomData::<CodeBlocks<4, true>>));
                }
                Format::Codes { has_minimums: false, .. } => {
                    Self::run_simd(Multiply(product, PhantomData::<CodeBlocks<8, false>>));
                }
                Format::Codes { has_minimums: true, .. } => {
                    Self::run_simd(Multiply(product, PhantomData::<CodeBlocks<8, true>>));
                }
            }
        }
    }
}

/// Tile registers that are set up, and how they are given back.
#[allow(dead_code, reason = "few processors have any")]
pub struct Tiles(pub(super) unsafe fn());

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: they were set up.
        unsafe { (self.0)() }
    }
}

/// Work that is written once and compiled for each kernel. `run` is `#[inline(always)]` where it computes, so that it
/// becomes part of a function that is compiled for the instruction set.
pub trait SimdTask {
    /// # Safety
    /// The processor has the instruction set of K.
    unsafe fn run<K: Kernel>(self);
}

/// What every [`Kernel`] of a set of instructions has: a function that is compiled for them. It is not inlined, so that
/// a task is compiled once, wherever it is started.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! compiled_for {
    ($features:literal) => {
        unsafe fn run_simd(task: impl crate::cpu::SimdTask) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn compiled<K: crate::cpu::Kernel>(task: impl crate::cpu::SimdTask) {
                // SAFETY: the processor has the instruction set, whose instructions this function is compiled for.
                unsafe { task.run::<K>() }
            }
            // SAFETY: the processor has the instruction set, by the contract of `run_simd`.
            unsafe { compiled::<Self>(task) }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use compiled_for;

/// Runs a task on an instruction set's kernel for words of one f32.
///
/// # Panics
/// If the processor lacks the instruction set.
pub(crate) fn dispatch_f32(instruction_set: InstructionSet, task: impl SimdTask) {
    assert!(instruction_set.is_available(), "the processor lacks the instruction set {instruction_set}");
    // SAFETY: the processor has the instruction set, and each of the wider ones includes what its match arm runs.
    unsafe {
        match instruction_set {
            InstructionSet::Scalar => arch::scalar::Scalar::run_simd(task),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => arch::avx2::Avx2::run_simd(task),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 | InstructionSet::Avx512Bf16 | InstructionSet::Amx => {
                arch::avx512::Avx512::run_simd(task)
            }
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon | InstructionSet::NeonBf16 => arch::neon::Neon::run_simd(task),
            _ => unreachable!("instruction sets of other processors are not available"),
        }
    }
}

/// Runs a task on an instruction set's kernel for pairs of bf16, or for f32 if it has none.
///
/// # Panics
/// If the processor lacks the instruction set.
pub(crate) fn dispatch_bf16(instruction_set: InstructionSet, task: impl SimdTask) {
    assert!(instruction_set.is_available(), "the processor lacks the instruction set {instruction_set}");
    match instruction_set {
        // SAFETY: the processor has the instruction set.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512Bf16 => unsafe { arch::avx512::Avx512Bf16::run_simd(task) },
        // SAFETY: the processor has the instruction set.
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Amx => unsafe { arch::amx::Amx::run_simd(task) },
        // SAFETY: the processor has the instruction set.
        #[cfg(target_arch = "aarch64")]
        InstructionSet::NeonBf16 => unsafe { arch::neon::NeonBf16::run_simd(task) },
        _ => dispatch_f32(instruction_set, task),
    }
}
