#!/usr/bin/env bash
# Several processes: checks `crates/distributed/` and runs its tests, which start 1, 2 and 4 processes with mpirun.
# Where there is no MPI or no libclang, apt installs them.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v mpirun >/dev/null || ! command -v mpicc >/dev/null || ! ls /usr/lib/llvm*/lib/libclang.so* >/dev/null 2>&1; then
    as_root=()
    [ "$(id -u)" = 0 ] || as_root=(sudo)
    if ! { "${as_root[@]}" apt-get update --quiet &&
        "${as_root[@]}" apt-get install --yes --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev; }; then
        echo "ci/distributed.sh: there is no MPI here and apt cannot install it: distributed/ is NOT tested" >&2
        exit 0
    fi
fi
# `.ci/run` has a stand-in for CUDA.
features=mpi
[ -z "${CUDARC_CUDA_VERSION-}" ] || features=mpi,nccl
cargo clippy -p candle-attention-distributed --all-targets --features "$features" -- -D warnings
cargo test -p candle-attention-distributed --features mpi
