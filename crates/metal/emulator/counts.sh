#!/usr/bin/env bash
# Prints a table of the bytes that the Metal kernels read from device memory (MB) and of their products (millions of
# multiplications with an addition), as the emulator counts them, and the same of the `sdpa` of MLX and Candle, from its
# source.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
folder="${CARGO_TARGET_DIR:-$here/../../../target}/emulator/metal-counts"
mkdir -p "$folder"
programs_of() { cargo run --quiet --manifest-path "$here/../Cargo.toml" --example programs -- "$@"; }
programs_of source "$folder"
echo '| call | kernel | MB | products | theirs | MB | products |'
echo '| --- | --- | --- | --- | --- | --- | --- |'
for macros in "-DELEMENT=0 -DHEAD_DIM=64" "-DELEMENT=0 -DHEAD_DIM=128" "-DELEMENT=0 -DHEAD_DIM=256" "-DELEMENT=2 -DHEAD_DIM=128"; do
    options="$(programs_of options <<<"$macros")"
    # shellcheck disable=SC2086 # macros are separate words
    "${CXX:-g++}" -std=c++17 -O1 -w -fno-strict-aliasing -DEMULATOR -I"$here" -I"$folder" -I"$here/../../cuda/emulator" \
        $options "$here/counts.cpp" -o "$folder/counts"
    "$folder/counts"
done
