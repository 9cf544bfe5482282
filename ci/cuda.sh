#!/usr/bin/env bash
# Checks the CUDA kernels without a GPU: the emulator runs them on a CPU and compares them with loops in f64, and NVRTC
# compiles every specialisation for each compute capability. Registers and memory are limited by
# crates/cuda/registers.txt.
#
# usage: bash ci/cuda.sh [quick|all|update]
#
# quick, the default, runs a few cases of each kernel, and compiles one specialisation of each kernel and element type.
# all runs and compiles everything, which takes long. update compiles everything and writes the table.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-quick}
case $what in quick | all | update) ;; *) echo "ci/cuda.sh: expected quick, all or update, found $what" >&2; exit 2 ;; esac

compile() {
    if ! bash ci/install.sh nvrtc >/dev/null; then
        echo "ci/cuda.sh: pip cannot install NVRTC, which needs Linux on x86-64: the kernels are NOT compiled" >&2
        return 0
    fi
    local options=(--nvrtc "${NVRTC_FOLDER:-target/nvrtc/nvidia/cu13/lib}")
    [ "$what" = all ] || options+=("--$what")
    cargo run --quiet -p candle-attention-cuda --example specializations | python3 ci/cuda_registers.py "${options[@]}"
}

emulate() {
    if ! command -v "${CXX:-g++}" >/dev/null; then
        echo "ci/cuda.sh: there is no ${CXX:-g++}: the kernels are NOT run by the emulator" >&2
        return 0
    fi
    local selection=()
    [ "$what" != quick ] || selection=(--quick)
    bash crates/cuda/emulator/run_tests.sh "${selection[@]}"
    bash crates/cuda/emulator/run_delta_tests.sh "${selection[@]}"
}

echo "== NVRTC"
compile
[ "$what" != update ] || exit 0
echo "== the emulator"
emulate
