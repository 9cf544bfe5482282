#!/usr/bin/env bash
# Several processes: checks `crates/distributed/` and runs its tests, which start 1, 2 and 4 processes with mpirun.
# Where there is no MPI or no libclang, apt installs them.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! bash ci/install.sh mpi >/dev/null; then
    echo "ci/distributed.sh: there is no MPI here and apt cannot install it: distributed/ is NOT tested" >&2
    exit 0
fi
# `.ci/run` has a stand-in for CUDA.
features=mpi
[ -z "${CUDARC_CUDA_VERSION-}" ] || features=mpi,nccl
cargo clippy -p candle-attention-distributed --all-targets --features "$features" -- -D warnings
cargo test -p candle-attention-distributed --features mpi
