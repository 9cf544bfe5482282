#!/bin/bash
# Runs the tests of all kernels but attention's on the emulator: run_delta_tests.sh [--quick]. It needs a C++ compiler
# and cargo, and neither a GPU nor CUDA. With `--quick`, one specialisation of each element type.
set -euo pipefail
cd "$(dirname "$0")"
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
specializations() { cargo run --quiet -p candle-attention-cuda --example specializations -- "$@"; }
specializations headers "$build/headers"
failed=0
# test <source> <flags>
test() {
    local source=$1 macros
    shift
    macros="$*"
    [ "$source" != delta_tests.cpp ] || macros=$(specializations options <<<"$macros")
    "${CXX:-c++}" -std=c++20 -O1 -w -DEMULATOR -I. -I../kernels -I"$build/headers" $macros "$source" -o "$build/test"
    echo "$source $*"
    "$build/test" || failed=1
}
test delta_tests.cpp -DELEMENT=2 -DKEY_WIDTH=37 -DVALUE_WIDTH=45 -DCHUNK=32 -DSCAN_WARPS=2 -DSCAN_STAGES=2
test delta_tests.cpp -DELEMENT=1 -DKEY_WIDTH=32 -DVALUE_WIDTH=16 -DCHUNK=16 -DSCAN_WARPS=1
test row_tests.cpp -DELEMENT=0 -DNORM_WIDTH=75 -DCONVOLUTION_WIDTH=4
test row_tests.cpp -DELEMENT=2 -DNORM_WIDTH=128 -DCONVOLUTION_WIDTH=2
for element in 0 1 2; do
    test layer_tests.cpp -DELEMENT=$element
    test quantize_tests.cpp -DELEMENT=$element
done
test linear_tests.cpp -DELEMENT=0 -DLINEAR_ROWS=4
test linear_tests.cpp -DELEMENT=1 -DLINEAR_ROWS=1
test linear_tests.cpp -DELEMENT=2 -DLINEAR_ROWS=2
# The formats: bits, values, group, kinds of scales and of zeros or minimums, as code_numbers.cuh numbers them.
codes() {
    test linear_codes_tests.cpp "-DELEMENT=$1" "-DLINEAR_ROWS=$2" "-DCODE_BITS=$3" "-DCODE_VALUES=$4" "-DCODE_GROUP=$5" "${@:6}"
}
codes 1 4 4 2 32 -DSCALE_NUMBERS=5 -DSCALE_NEST=8 -DOFFSET_NUMBERS=5 -DOFFSET_NEST=8
codes 0 1 6 0 16 -DSCALE_NUMBERS=5 -DSCALE_NEST=16
codes 2 1 3 1 24 -DSCALE_NUMBERS=1 -DOFFSET_NUMBERS=3
codes 2 2 4 3 64 -DSCALE_NUMBERS=4
if [ "${1:-}" != --quick ]; then
    for element in 0 1 2; do test linear_tests.cpp -DELEMENT=$element -DLINEAR_ROWS=8; done
    codes 1 1 8 4 0 -DSCALE_NUMBERS=2
    codes 0 8 8 5 40 -DSCALE_NUMBERS=0
    codes 1 1 5 2 32 -DSCALE_NUMBERS=0 -DOFFSET_NUMBERS=0
    codes 2 8 2 1 16 -DSCALE_NUMBERS=2 -DOFFSET_NUMBERS=2
    codes 0 8 4 1 128 -DSCALE_NUMBERS=0 -DOFFSET_NUMBERS=4
    codes 2 1 8 0 12 -DSCALE_NUMBERS=3
    test delta_tests.cpp -DELEMENT=0 -DKEY_WIDTH=16 -DVALUE_WIDTH=64 -DCHUNK=16 -DSCAN_WARPS=4 -DSCAN_STAGES=2
    test delta_tests.cpp -DELEMENT=1 -DKEY_WIDTH=128 -DVALUE_WIDTH=128 -DCHUNK=32 -DSCAN_WARPS=4 -DSCAN_STAGES=2
    test delta_tests.cpp -DELEMENT=2 -DKEY_WIDTH=128 -DVALUE_WIDTH=64 -DCHUNK=32 -DSCAN_WARPS=4
    test delta_tests.cpp -DELEMENT=2 -DKEY_WIDTH=5 -DVALUE_WIDTH=3 -DCHUNK=16 -DSCAN_WARPS=1
    test delta_tests.cpp -DELEMENT=0 -DKEY_WIDTH=256 -DVALUE_WIDTH=256 -DCHUNK=16 -DSCAN_WARPS=4
    test delta_tests.cpp -DELEMENT=2 -DKEY_WIDTH=192 -DVALUE_WIDTH=100 -DCHUNK=32 -DSCAN_WARPS=3
    test row_tests.cpp -DELEMENT=1 -DNORM_WIDTH=1024 -DCONVOLUTION_WIDTH=16
fi
exit $failed
