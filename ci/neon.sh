#!/usr/bin/env bash
# Tests the Arm kernels on x86-64 Linux: builds for aarch64, and runs under QEMU's user mode, once as an early 64-bit
# Arm processor and once as a processor with all features of QEMU, bf16 dot products among them. On Arm, the tests run
# without QEMU.
#
# usage: [PRECISION=1] bash ci/neon.sh [CASES]
#
# CASES is the number of random calls for each property, 60 by default. PRECISION=1 compares errors with PyTorch's too.
#
# If the machine has no compiler, linker, C library and emulator, they come from Debian's archive. They are unpacked
# into a cache (NEON_CACHE, by default ~/.cache/candle-attention-neon) and not installed. rustup adds Rust's library for
# aarch64. If something is not available, the script prints why it tests nothing, and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
export PROPTEST_CASES=${1:-60} RUST_BACKTRACE=${RUST_BACKTRACE:-0}
target=aarch64-unknown-linux-gnu
cache=${NEON_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/candle-attention-neon}
root=$cache/root

skip() {
    echo "the Arm kernels are not tested: $*" >&2
    exit 0
}

has() { command -v "$1" >/dev/null; }

fetch() {
    if ! has apt-get || ! has dpkg-deb; then skip "there is neither an aarch64 toolchain with QEMU nor apt-get"; fi
    mkdir -p "$cache"/{lists,apt/archives}/partial "$root"
    local apt=(apt-get -q -o Debug::NoLocking=1 -o APT::Sandbox::User= -o Dir::State::lists="$cache/lists" -o Dir::Cache="$cache/apt")
    "${apt[@]}" update &>"$cache/log" || skip "the package archive cannot be reached, see $cache/log"
    "${apt[@]}" install -y --download-only --no-install-recommends \
        gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user &>>"$cache/log" || skip "packages are missing, see $cache/log"
    local package
    for package in "$cache"/apt/archives/*.deb; do dpkg-deb --extract "$package" "$root"; done
}

# Writes a command that finds its libraries in the cache.
wrap() {
    printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec %q %s "$@"\n' "$root/usr/lib/x86_64-linux-gnu" "$root/usr/bin/$1" "$2" >"$cache/$1"
    chmod +x "$cache/$1"
}

case $(uname -m) in aarch64 | arm64) native=true ;; *) native=false ;; esac
if $native; then
    # This processor may have no bf16 dot products.
    processors=("this processor") instruction_sets=(neon)
else
    [ "$(uname -sm)" = "Linux x86_64" ] || skip "this is $(uname -sm), expected Linux on x86_64 or Arm"
    if [ ! -d "$(rustc --print target-libdir --target $target)" ]; then
        if ! has rustup || ! rustup target add $target; then skip "Rust's library for $target cannot be had"; fi
    fi
    gcc=aarch64-linux-gnu-gcc qemu=qemu-aarch64 library=/usr/aarch64-linux-gnu
    if ! has $gcc || ! has $qemu; then
        [ -e "$cache/complete" ] || fetch
        if ! has $gcc; then
            wrap $gcc "--sysroot=$(printf %q "$root")"
            gcc=$cache/$gcc library=$root$library
        fi
        if ! has $qemu; then
            wrap $qemu ""
            qemu=$cache/$qemu
        fi
        "$qemu" --version >/dev/null && "$gcc" --version >/dev/null || skip "what was unpacked into $root does not run"
        touch "$cache/complete"
    fi
    export CARGO_BUILD_TARGET=$target CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=$gcc
    export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$qemu -L $library"
    processors=(cortex-a53 max) instruction_sets=(neon neonbf16)
fi

kernels=()
for name in attention delta guard; do
    [ ! -d "tests/$name" ] || kernels+=(--test "$name")
done
skips=()
# The comparison with PyTorch's errors takes a quarter of an hour under QEMU.
[ -n "${PRECISION-}" ] || $native || skips+=(--skip precision::)
if ! $native && [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ]; then
    # These tests start their own executable, which this machine cannot run without QEMU.
    skips+=(--skip environment:: --skip guard_page_and_canary --skip guard_page_before)
fi

echo "== a build without optimisation, which inlines less"
cargo rustc -p candle-attention-kernels --lib -- -C opt-level=0
for processor in "${processors[@]}"; do
    echo "== the kernels on $processor"
    QEMU_CPU=$processor cargo test -p candle-attention-kernels --lib
    # Candle 0.11.1's quantized products use dot products of bytes, which the early processor does not have.
    own=()
    [ "$processor" != cortex-a53 ] || own=(--skip gguf_)
    QEMU_CPU=$processor cargo test "${kernels[@]}" -- "${skips[@]}" "${own[@]}"
done
for instruction_set in "${instruction_sets[@]}"; do
    echo "== everything that computes, on $instruction_set"
    # Layers in half precision are skipped: on Arm, Candle's products in f16 sum in f16.
    CANDLE_ATTENTION_CPU=$instruction_set QEMU_CPU=max cargo test --test golden --test attention -- --skip half_precision --skip flash:: --skip linear:: --skip kernel --skip precision:: --skip threads:: --skip environment::
done
