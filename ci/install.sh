#!/usr/bin/env bash
# Installs what the checks need beside Rust, where it is missing: MPI and libclang, Chromium, and the packages of
# tests/page. What cannot be installed is named by the check that needs it.
set -uo pipefail
cd "$(dirname "$0")/.."

as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
install() {
    "${as_root[@]}" apt-get update --quiet &&
        "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet "$@"
}

if ! command -v mpirun || ! command -v mpicc || ! ls /usr/lib/llvm*/lib/libclang.so*; then
    install --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev
fi
[ -n "${CHROMIUM-}" ] || command -v chromium || command -v google-chrome || install chromium
cd tests/page
[ node_modules/.package-lock.json -nt package-lock.json ] || npm ci --silent --no-audit --no-fund
