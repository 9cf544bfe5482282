//! AMX: products of tiles, 16 rows of 32 bf16 times 16 columns.

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;

use candle_attention::cpu::InstructionSet;

use super::Loop;

/// The products in a step.
const PRODUCTS: f64 = 4.0;

pub(super) const AMX_BF16: Loop = Loop {
    name: "AMX tdpbf16ps, bf16",
    instruction_set: InstructionSet::Amx,
    bf16: true,
    available,
    flops_per_step: PRODUCTS * 2.0 * 16.0 * 16.0 * 32.0,
    run: |steps| {
        // SAFETY: `available` says that the processor has AMX and that Linux lets this process use it, and is asked
        // first.
        unsafe { run(steps) }
    },
};

/// Returns whether the processor has AMX in bf16 and Linux grants it, for all threads that start from now on.
fn available() -> bool {
    const BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    let highest = __cpuid_count(0, 0).eax;
    highest >= 7 && __cpuid_count(7, 0).edx & BF16_AND_TILES == BF16_AND_TILES && granted()
}

/// Asks for AMX by `arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA)`. Without it the first tile instruction ends the
/// process.
#[cfg(target_os = "linux")]
fn granted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const XTILEDATA: i64 = 18;
    let result: i64;
    // SAFETY: a system call with plain numbers as arguments, which reads and writes no memory of the process; the
    // instruction overwrites rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}

/// The operand of `ldtilecfg`: palette 1, and the bytes of a row and the number of rows of each tile.
#[repr(C, align(64))]
struct Shapes([u8; 64]);

/// Computes four tiles of sums from two tiles of rows and two of columns, as a matrix product does.
///
/// # Safety
/// The processor has AMX in bf16, and the system has granted it to the process.
unsafe fn run(steps: u64) {
    if steps == 0 {
        return;
    }
    let mut shapes = Shapes([0; 64]);
    shapes.0[0] = 1;
    for tile in 0..8 {
        shapes.0[16 + 2 * tile] = 64;
        shapes.0[48 + tile] = 16;
    }
    // SAFETY: `shapes` is the 64 bytes that ldtilecfg reads, with sizes that palette 1 allows. The instructions touch
    // no other memory, the tiles are declared as overwritten, and tilerelease leaves the thread without tiles, as it
    // was.
    unsafe {
        asm!(
            "ldtilecfg [{shapes}]",
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            "tilezero tmm4",
            "tilezero tmm5",
            "tilezero tmm6",
            "tilezero tmm7",
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {steps}",
            "jnz 2b",
            "tilerelease",
            shapes = in(reg) &raw const shapes,
            steps = inout(reg) steps => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}
