//! The way from an instruction set to its kernel.

use super::arch;
use super::instruction_set::InstructionSet;
use super::kernel::{Kernel, Layout, SimdTask};

/// Runs a task on an instruction set's kernel for words of one f32.
///
/// # Panics
/// If the processor lacks the instruction set.
pub(crate) fn dispatch_f32<T: SimdTask>(instruction_set: InstructionSet, task: T) -> T::Output {
    assert!(instruction_set.is_available(), "the processor lacks the instruction set {instruction_set}");
    // SAFETY: the processor has the instruction set, and each of the wider ones includes the kernel of its match arm.
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

/// Runs a task on an instruction set's kernel for pairs of bf16, or on its kernel for f32 if it has none.
///
/// # Panics
/// If the processor lacks the instruction set.
pub(crate) fn dispatch_bf16<T: SimdTask>(instruction_set: InstructionSet, task: T) -> T::Output {
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

/// Returns the constants of an instruction set's kernel for words of one f32, or of its kernel for bf16.
///
/// # Panics
/// If the processor lacks the instruction set.
pub(crate) fn kernel_layout(instruction_set: InstructionSet, is_bf16: bool) -> Layout {
    struct LayoutOfKernel;
    impl SimdTask for LayoutOfKernel {
        type Output = Layout;

        unsafe fn run<K: Kernel>(self) -> Layout {
            K::LAYOUT
        }
    }
    if is_bf16 { dispatch_bf16(instruction_set, LayoutOfKernel) } else { dispatch_f32(instruction_set, LayoutOfKernel) }
}
