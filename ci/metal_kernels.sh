#!/usr/bin/env bash
# Checks the Metal kernels without a Mac: the emulator runs them on a CPU and compares them with loops in f64.
#
# usage: bash ci/metal_kernels.sh [quick|all|mutations]
#
# quick, the default, runs a few specialisations, and all every one. mutations puts mistakes into the kernels and checks
# that the tests notice them; it takes some minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v "${CXX:-g++}" >/dev/null; then
    echo "ci/metal_kernels.sh: there is no ${CXX:-g++}: the kernels are NOT run by the emulator" >&2
    exit 0
fi
case ${1:-quick} in
quick) bash crates/metal/emulator/run_tests.sh --quick ;;
all) bash crates/metal/emulator/run_tests.sh ;;
mutations) bash crates/metal/emulator/mutations.sh ;;
*) echo "ci/metal_kernels.sh: expected quick, all or mutations, found $*" >&2 && exit 2 ;;
esac
