#!/usr/bin/env bash
# Tests the Metal kernels on the emulator against loops in f64, with a C++ compiler (CXX, by default g++) and cargo. The
# cases and the loops test the CUDA kernels too.
#
#   run_tests.sh            every element type, head dimension and score modifier: some minutes
#   run_tests.sh --quick    a few that use each of them
#   run_tests.sh -DHEAD..   the specialisations whose macros contain the words
#
# JOBS processes run at a time, by default one for each processor. Programs are kept in the target folder.
set -u
here="$(cd "$(dirname "$0")" && pwd)"
programs="${CARGO_TARGET_DIR:-$here/../../../target}/emulator"
source="$programs/metal"
mkdir -p "$programs"
programs_of() { cargo run --quiet --manifest-path "$here/../Cargo.toml" --example programs -- "$@"; }
programs_of source "$source" || exit 1

quick='
-DELEMENT=0 -DHEAD_DIM=32
-DELEMENT=2 -DHEAD_DIM=21 -DVALUE_DIM=30 -DALIGNED_ROWS=0 -DHAS_SOFTCAP=1 -DHAS_ALIBI=1 -DSLOPE_GRADIENT=1
-DELEMENT=1 -DHEAD_DIM=16 -DVALUE_DIM=32 -DHAS_BIAS=2 -DHAS_BOOLEAN_MASK=1 -DHAS_RELATIVE_BIAS=1 -DBIAS_GRADIENT=1 -DRELATIVE_BIAS_GRADIENT=1
-DELEMENT=0 -DHEAD_DIM=16 -DHAS_DROPOUT=1 -DHAS_SOFTCAP=1
-DELEMENT=0 -DHEAD_DIM=32 -DVALUE_DIM=48 -DKEY_CODES=1 -DKEY_PAGES=1
-DELEMENT=1 -DHEAD_DIM=64 -DVALUE_DIM=32 -DKEY_CODES=1 -DCODE_FORMAT=2 -DKEY_PAGES=1
'

all='
-DELEMENT=0 -DHEAD_DIM=64
-DELEMENT=1 -DHEAD_DIM=64
-DELEMENT=2 -DHEAD_DIM=64
-DELEMENT=0 -DHEAD_DIM=80 -DVALUE_DIM=48
-DELEMENT=1 -DHEAD_DIM=96
-DELEMENT=0 -DHEAD_DIM=128
-DELEMENT=1 -DHEAD_DIM=128 -DALIGNED_ROWS=0
-DELEMENT=2 -DHEAD_DIM=128
-DELEMENT=1 -DHEAD_DIM=192 -DVALUE_DIM=128
-DELEMENT=0 -DHEAD_DIM=256
-DELEMENT=2 -DHEAD_DIM=256
-DELEMENT=0 -DHEAD_DIM=75 -DVALUE_DIM=33 -DALIGNED_ROWS=0
-DELEMENT=2 -DHEAD_DIM=64 -DMODIFIES_SCORES=1
-DELEMENT=1 -DHEAD_DIM=64 -DMODIFIES_SCORES=1
-DELEMENT=0 -DHEAD_DIM=64 -DHAS_SOFTCAP=1
-DELEMENT=0 -DHEAD_DIM=64 -DHAS_ALIBI=1 -DSLOPE_GRADIENT=1
-DELEMENT=0 -DHEAD_DIM=64 -DHAS_RELATIVE_BIAS=1 -DRELATIVE_BIAS_GRADIENT=1
-DELEMENT=0 -DHEAD_DIM=64 -DHAS_BIAS=1 -DBIAS_GRADIENT=1
-DELEMENT=0 -DHEAD_DIM=64 -DHAS_BIAS=2
-DELEMENT=1 -DHEAD_DIM=64 -DHAS_BOOLEAN_MASK=1
-DELEMENT=1 -DHEAD_DIM=64 -DHAS_DROPOUT=1
-DELEMENT=2 -DHEAD_DIM=45 -DVALUE_DIM=30 -DALIGNED_ROWS=0 -DHAS_SOFTCAP=1 -DHAS_DROPOUT=1
-DELEMENT=2 -DHEAD_DIM=64 -DHAS_SOFTCAP=1 -DHAS_BIAS=2 -DHAS_BOOLEAN_MASK=1 -DHAS_ALIBI=1 -DHAS_RELATIVE_BIAS=1 -DHAS_DROPOUT=1 -DBIAS_GRADIENT=1 -DSLOPE_GRADIENT=1 -DRELATIVE_BIAS_GRADIENT=1
-DELEMENT=2 -DHEAD_DIM=32 -DHAS_SOFTCAP=1 -DHAS_BIAS=2 -DHAS_BOOLEAN_MASK=1 -DHAS_ALIBI=1 -DHAS_RELATIVE_BIAS=1 -DBIAS_GRADIENT=1 -DSLOPE_GRADIENT=1 -DRELATIVE_BIAS_GRADIENT=1
-DELEMENT=1 -DHEAD_DIM=128 -DHAS_SOFTCAP=1 -DHAS_BIAS=1 -DHAS_BOOLEAN_MASK=1 -DHAS_ALIBI=1 -DHAS_RELATIVE_BIAS=1 -DBIAS_GRADIENT=1 -DSLOPE_GRADIENT=1 -DRELATIVE_BIAS_GRADIENT=1
-DELEMENT=2 -DHEAD_DIM=64 -DKEY_CODES=1
-DELEMENT=1 -DHEAD_DIM=128 -DKEY_CODES=1 -DHAS_SOFTCAP=1 -DHAS_ALIBI=1 -DHAS_BOOLEAN_MASK=1
-DELEMENT=0 -DHEAD_DIM=75 -DVALUE_DIM=33 -DALIGNED_ROWS=0 -DKEY_CODES=1
-DELEMENT=2 -DHEAD_DIM=48 -DVALUE_DIM=80 -DKEY_CODES=1 -DCODE_FORMAT=1
-DELEMENT=0 -DHEAD_DIM=128 -DKEY_CODES=1 -DCODE_FORMAT=1 -DKEY_PAGES=1
-DELEMENT=1 -DHEAD_DIM=21 -DVALUE_DIM=30 -DALIGNED_ROWS=0 -DKEY_CODES=1 -DCODE_FORMAT=1 -DKEY_PAGES=1
-DELEMENT=2 -DHEAD_DIM=128 -DVALUE_DIM=96 -DKEY_CODES=1 -DCODE_FORMAT=2
-DELEMENT=0 -DHEAD_DIM=96 -DVALUE_DIM=192 -DKEY_CODES=1 -DCODE_FORMAT=2 -DKEY_PAGES=1
-DELEMENT=2 -DHEAD_DIM=64 -DVALUE_DIM=64 -DALIGNED_ROWS=0 -DKEY_CODES=1 -DCODE_FORMAT=2
-DELEMENT=1 -DHEAD_DIM=64 -DKEY_PAGES=1
-DELEMENT=0 -DHEAD_DIM=75 -DVALUE_DIM=33 -DALIGNED_ROWS=0 -DKEY_PAGES=1
-DELEMENT=2 -DHEAD_DIM=32 -DKEY_PAGES=1 -DHAS_SOFTCAP=1 -DHAS_ALIBI=1 -DHAS_RELATIVE_BIAS=1
'

# Linear layers whose weights are codes: the element type, the number of rows, bits, values, the group, and the kinds of
# scales and of zeros or minimums, as code_numbers.cuh numbers them.
quick_codes='
-DELEMENT=1 -DELEMENT_BYTES=2 -DLINEAR_ROWS=4 -DCODE_BITS=4 -DCODE_VALUES=2 -DCODE_GROUP=32 -DSCALE_NUMBERS=5 -DSCALE_NEST=8 -DOFFSET_NUMBERS=5 -DOFFSET_NEST=8
-DELEMENT=2 -DELEMENT_BYTES=4 -DLINEAR_ROWS=1 -DCODE_BITS=3 -DCODE_VALUES=1 -DCODE_GROUP=24 -DSCALE_NUMBERS=1 -DOFFSET_NUMBERS=3
'
all_codes='
-DELEMENT=0 -DELEMENT_BYTES=2 -DLINEAR_ROWS=1 -DCODE_BITS=6 -DCODE_VALUES=0 -DCODE_GROUP=16 -DSCALE_NUMBERS=5 -DSCALE_NEST=16
-DELEMENT=2 -DELEMENT_BYTES=4 -DLINEAR_ROWS=2 -DCODE_BITS=4 -DCODE_VALUES=3 -DCODE_GROUP=64 -DSCALE_NUMBERS=4
-DELEMENT=2 -DELEMENT_BYTES=4 -DLINEAR_ROWS=8 -DCODE_BITS=8 -DCODE_VALUES=4 -DCODE_GROUP=0 -DSCALE_NUMBERS=2
-DELEMENT=1 -DELEMENT_BYTES=2 -DLINEAR_ROWS=1 -DCODE_BITS=8 -DCODE_VALUES=5 -DCODE_GROUP=32 -DSCALE_NUMBERS=0
'

kind=metal_tests
# The folder of the Metal kernels comes first: it has the files attention.cu and linear_codes.cu that the tests include.
compile_tests() {
    local tests=attention_tests.cpp
    [[ $1 != *CODE_BITS* ]] || tests=linear_codes_tests.cpp
    "${CXX:-g++}" -std=c++17 -O1 -w -fno-strict-aliasing -DEMULATOR -I"$here" -I"$source" \
        -I"$here/../../cuda/emulator" $1 "$here/../../cuda/emulator/$tests" -o "$2"
}
options_of() { programs_of options; }
export -f compile_tests
export here programs source kind
. "$here/../../cuda/emulator/specializations.sh"

case "${1:-}" in
    --quick) list="$(complete <<<"$quick")" codes="$quick_codes" ;;
    "") list="$(complete <<<"$quick$all")" codes="$quick_codes$all_codes" ;;
    *) list="$(grep -F -e "$1" <<<"$quick$all" | complete)" codes= ;;
esac
# These have no other macros than their names say.
run_list "$list
$(sed 's/..*/&|&/' <<<"$codes")"
