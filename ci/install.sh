#!/usr/bin/env bash
# `bash ci/install.sh mpi page nvrtc` installs programs that checks need besides Rust, if they are missing: MPI and
# libclang; Chromium with the packages of tests/page; NVRTC, the compiler of CUDA kernels, in target/nvrtc, and its
# oldest version in target/nvrtc-oldest. It fails if a program is missing afterwards.
set -uo pipefail
cd "$(dirname "$0")/.."

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
apt() {
    "${as_root[@]}" apt-get update --quiet &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet "$@"
}

has_mpi() { command -v mpirun && command -v mpicc && ls /usr/lib/llvm*/lib/libclang.so*; }
has_chromium() { [ -n "${CHROMIUM-}" ] || command -v chromium || command -v google-chrome; }
has_nvrtc() { [ -n "${NVRTC_FOLDER-}" ] || [ -e target/nvrtc/complete ] && [ -e target/nvrtc-oldest/complete ]; }
pip_into() { python3 -m pip install --quiet --no-deps --only-binary=:all: --upgrade --target "$@" && touch "$1/complete"; }
# 90 MB and 23 MB. The first version is fixed, since another may take other registers.
install_nvrtc() {
    [ -n "${NVRTC_FOLDER-}" ] || [ -e target/nvrtc/complete ] || pip_into target/nvrtc nvidia-cuda-nvrtc==13.0.88 || return
    # One check less without it.
    [ -e target/nvrtc-oldest/complete ] || pip_into target/nvrtc-oldest nvidia-cuda-nvrtc-cu12==12.0.140 || true
}
has_packages() { [ tests/page/node_modules/.package-lock.json -nt tests/page/package-lock.json ]; }

status=0
for what in "$@"; do
    case $what in
    mpi) has_mpi || apt --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev || status=1 ;;
    page)
        has_chromium || apt chromium || status=1
        has_packages || npm --prefix tests/page ci --silent --no-audit --no-fund || status=1
        ;;
    nvrtc) has_nvrtc || install_nvrtc || status=1 ;;
    *) echo "ci/install.sh: expected mpi, page or nvrtc, found $what" >&2; exit 2 ;;
    esac
done
exit "$status"
