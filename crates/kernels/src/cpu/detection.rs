//! The features of this processor and its operating system.

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[cfg(target_arch = "x86_64")]
pub(super) fn has_avx512_bf16() -> bool {
    has_avx512() && is_x86_feature_detected!("avx512bf16")
}

/// Returns whether the processor has AMX in bf16 and the operating system lets this process use it.
#[cfg(target_arch = "x86_64")]
pub(super) fn has_amx() -> bool {
    static GRANTED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *GRANTED.get_or_init(|| has_avx512_bf16() && has_amx_bf16() && request_amx())
}

#[cfg(target_arch = "x86_64")]
fn has_amx_bf16() -> bool {
    // Leaf 7, EDX: bit 22 is AMX-BF16, bit 24 AMX-TILE.
    const NEEDED: u32 = 1 << 22 | 1 << 24;
    let leaves = cpuid(0).eax;
    leaves >= 7 && cpuid(7).edx & NEEDED == NEEDED
}

/// Requests the state of tile registers from Linux, once for the process and its threads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request_amx() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: a system call that reads no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn request_amx() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
pub(super) fn has_neon() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

#[cfg(target_arch = "aarch64")]
pub(super) fn has_neon_bf16() -> bool {
    has_neon() && std::arch::is_aarch64_feature_detected!("bf16")
}

/// Returns the processor's description under `leaf`, its first part.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "unsafe in older versions of Rust that are allowed")]
fn cpuid(leaf: u32) -> std::arch::x86_64::CpuidResult {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::__cpuid_count(leaf, 0) }
}

/// Returns whether bf16 dot products are slower than multiply-adds in f32, which is so on Intel: four cycles for two
/// cycles' work, 150 GFLOP/s against 284 on two cores of a Xeon (family 6, model 167). AMD's take half of the time.
pub(super) fn has_slow_dot_products() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        // The bytes of "GenuineIntel".
        let leaf = cpuid(0);
        (leaf.ebx, leaf.edx, leaf.ecx) == (0x756e_6547, 0x4965_6e69, 0x6c65_746e)
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}
