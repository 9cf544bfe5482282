#!/usr/bin/env bash
# Makes a folder of programs to carry to a machine with a GPU, where `bash run.sh` checks and times everything.
#
# usage: bash ci/gpu_bundle.sh [FOLDER]     (target/gpu_bundle by default)
#
# The folder needs nothing there but a driver for CUDA 13, CUDA's libraries and Python with PyTorch, whose wheels bring
# those libraries. The machine that makes the folder needs no GPU and no CUDA: nvcc comes from PyPI (106 MB) and
# compiles Candle's own kernels, except those for mixtures of experts in quantized models, which end the program.
set -euo pipefail
cd "$(dirname "$0")/.."
bundle=${1:-target/gpu_bundle}
[ "$(uname -sm)" = "Linux x86_64" ] || { echo "ci/gpu_bundle.sh: this is $(uname -sm), expected Linux on x86_64" >&2; exit 1; }

tools=$PWD/target/cuda-tools
if [ ! -e "$tools/complete" ]; then
    python3 -m pip install --quiet --no-deps --only-binary=:all: --upgrade --target "$tools" nvidia-cuda-nvcc==13.0.88 \
        nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    chmod +x "$tools"/nvidia/cu13/{bin,nvvm/bin}/*
    touch "$tools/complete"
fi
export REAL_NVCC=$tools/nvidia/cu13/bin/nvcc
source ci/stand-in-cuda.sh

# A separate folder, since other builds use an nvcc that compiles nothing. No path of this machine stays in a program.
export CARGO_TARGET_DIR=$PWD/target/gpu-build
export RUSTFLAGS="--remap-path-prefix=$PWD=. --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
# The CPU kernels do not run there, so they need not be optimised, which takes minutes.
cargo build --release --config profile.release.strip=true \
    --config profile.release.package.candle-attention-kernels.opt-level=0 \
    -p candle-attention-compare --features cuda --bin device_check --bin device_times

rm -rf "$bundle"
mkdir -p "$bundle"
for program in device_check device_times; do
    if grep -aqF "$PWD" "$CARGO_TARGET_DIR/release/$program"; then
        echo "ci/gpu_bundle.sh: $program has paths of this machine" >&2
        exit 1
    fi
    # Most of a program is the text of Candle's kernels, which shrinks to a tenth.
    gzip -9 <"$CARGO_TARGET_DIR/release/$program" >"$bundle/$program.gz"
done
cp ci/gpu_bundle/run.sh crates/compare/src/bin/device_check/in_parallel.py \
    crates/compare/src/bin/device_times/{beside_pytorch,pytorch_times}.py "$bundle"
mkdir "$bundle/models"
for model in models/*/io.safetensors; do cp -R "$(dirname "$model")" "$bundle/models"; done
# The commit whose numbers the tables are.
git describe --always --dirty --abbrev=12 >"$bundle/commit.txt"

size=$(du -sm "$bundle" | cut -f1)
[ "$size" -lt 60 ] || { echo "ci/gpu_bundle.sh: $bundle has $size MB, expected less than 60" >&2; exit 1; }
echo "$bundle: $size MB"
