#!/usr/bin/env bash
# Checks the CUDA kernels without a GPU: the emulator runs them on a CPU and compares them with loops in f64, and NVRTC
# compiles every specialisation for each compute capability. Registers and memory are limited by
# crates/cuda/registers.txt.
#
# usage: bash ci/cuda.sh [quick|all] [emulator|nvrtc]
#        bash ci/cuda.sh update
#
# quick, the default, runs a few cases of each kernel, and compiles a selection with each kernel and element type, for
# one compute capability each. all runs and compiles everything, which takes long. update compiles everything and writes
# the table.
set -euo pipefail
cd "$(dirname "$0")/.."
selection=${1:-quick} parts=${2:-emulator nvrtc}
usage() {
    echo "ci/cuda.sh: expected quick, all or update, then emulator, nvrtc or nothing, found $*" >&2
    exit 2
}
case $selection in quick | all) ;; update) parts=nvrtc ;; *) usage "$@" ;; esac
case $parts in emulator | nvrtc | "emulator nvrtc") ;; *) usage "$@" ;; esac

compile() {
    if ! bash ci/install.sh nvrtc >/dev/null; then
        echo "ci/cuda.sh: pip cannot install NVRTC, which needs Linux on x86-64: the kernels are NOT compiled" >&2
        return 0
    fi
    local options=(--nvrtc "${NVRTC_FOLDER:-target/nvrtc/nvidia/cu13/lib}")
    if [ -e target/nvrtc-oldest/complete ]; then
        options+=(--oldest target/nvrtc-oldest/nvidia/cuda_nvrtc/lib)
    else
        echo "ci/cuda.sh: pip cannot install NVRTC 12.0: the oldest version compiles nothing" >&2
    fi
    [ "$selection" = all ] || options+=("--$selection")
    cargo run --quiet -p candle-attention-cuda --example specializations | python3 ci/cuda_registers.py "${options[@]}"
}

emulate() {
    if ! command -v "${CXX:-g++}" >/dev/null; then
        echo "ci/cuda.sh: there is no ${CXX:-g++}: the kernels are NOT run by the emulator" >&2
        return 0
    fi
    local options=() tiles=--tiles
    [ "$selection" != quick ] || options=(--quick) tiles=--tile
    bash crates/cuda/emulator/run_tests.sh "${options[@]}"
    cargo run --quiet -p candle-attention-cuda --example specializations -- tiles |
        bash crates/cuda/emulator/run_tests.sh $tiles
    bash crates/cuda/emulator/run_delta_tests.sh "${options[@]}"
}

for part in $parts; do
    echo "== $part, $selection"
    case $part in emulator) emulate ;; nvrtc) compile ;; esac
done
