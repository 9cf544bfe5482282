#!/usr/bin/env bash
# `bash ci/install.sh mpi page` installs programs that checks need besides Rust, if they are missing: MPI and libclang,
# and Chromium with the packages of tests/page. It fails if a program is missing afterwards.
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
has_packages() { [ tests/page/node_modules/.package-lock.json -nt tests/page/package-lock.json ]; }

status=0
for what in "$@"; do
    case $what in
    mpi) has_mpi || apt --no-install-recommends libopenmpi-dev openmpi-bin libclang-dev || status=1 ;;
    page)
        has_chromium || apt chromium || status=1
        has_packages || npm --prefix tests/page ci --silent --no-audit --no-fund || status=1
        ;;
    *) echo "ci/install.sh: expected mpi or page, found $what" >&2; exit 2 ;;
    esac
done
exit "$status"
