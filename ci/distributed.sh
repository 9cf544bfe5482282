#!/usr/bin/env bash
# Checks `crates/distributed/` and runs its tests, which start 1, 2 and 4 processes with mpirun. apt installs MPI and
# libclang if they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! bash ci/install.sh mpi >/dev/null; then
    echo "ci/distributed.sh: there is no MPI here and apt cannot install it: distributed/ is NOT tested" >&2
    exit 0
fi
# `.ci/run` sets up a substitute for CUDA.
features=mpi
[ -z "${CUDARC_CUDA_VERSION-}" ] || features=mpi,nccl
cargo clippy -p candle-attention-distributed --all-targets --features "$features" -- -D warnings
cargo test -p candle-attention-distributed --features mpi
