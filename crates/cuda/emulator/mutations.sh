#!/usr/bin/env bash
# Puts mistakes into the kernels, one at a time, and checks that the tests of attention notice each of them.
# Usage: mutations.sh [words of a name]
set -u
here="$(cd "$(dirname "$0")" && pwd)"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cargo build --quiet --manifest-path "$here/../Cargo.toml" --example specializations || exit 1
cp "${CARGO_TARGET_DIR:-$here/../../../target}/debug/examples/specializations" "$copy" || exit 1
"$copy/specializations" headers "$copy/headers" || exit 1
missed=0
only="${1:-}"

# Arguments: a name, the macros that have other values than by default, a file, the text that is replaced, the text that
# replaces it.
mutate() {
    local name="$1" macros="$2" file="$3"
    [[ $name == *"$only"* ]] || return
    rm -rf "$copy/kernels" "$copy/emulator" && cp -r "$here/../kernels" "$here" "$copy"
    python3 - "$copy/kernels/$file" "$4" "$5" <<'PY' || { echo "$name: the text is not in $file"; missed=1; return; }
import sys
path, old, new = sys.argv[1:]
text = open(path).read()
if old not in text:
    sys.exit(1)
open(path, "w").write(text.replace(old, new, 1))
PY
    macros="$("$copy/specializations" options <<<"$macros")"
    if ! "${CXX:-g++}" -std=c++17 -O1 -w -DEMULATOR -I"$copy/kernels" -I"$copy/emulator" -I"$copy/headers" $macros \
        "$copy/emulator/attention_tests.cpp" -o "$copy/tests"; then
        echo "$name: does not compile"
        missed=1
    elif "$copy/tests" >"$copy/output" 2>&1; then
        echo "$name: NOT NOTICED"
        missed=1
    else
        echo "$name: $(grep -m1 -E 'FAULT|FAIL ' "$copy/output" | cut -c1-140)"
    fi
}

forward="-DELEMENT=0 -DHEAD_DIM=32 -DFORWARD_WARPS=2 -DKERNEL_SET=1"
mutate "forward: no barrier before keys are overwritten" "$forward" forward.cuh \
    $'block_barrier();\n            if (n + 1 < last) load_forward_keys(block, next_key, 0);' 'if (n + 1 < last) load_forward_keys(block, next_key, 0);'
mutate "forward: no wait for copies" "$forward" forward.cuh $'        wait_for_copies<0>();\n#if KEY_CODES' '#if KEY_CODES'
mutate "forward: values behind the last key are read" "$forward" forward.cuh \
    'block.value_rows, key, first, end, block.thread' 'block.value_rows, key, first, FORWARD_KEYS, block.thread'
mutate "forward: a mask that is one key too long" "$forward" forward.cuh '8 * c + e >= end' '8 * c + e > end'
mutate "forward: a barrier in one warp only" "$forward" forward.cuh 'bool is_careful = false;' \
    'bool is_careful = false; if (block.warp_row == 0) block_barrier();'
mutate "forward: values are not transposed" "$forward" products.cuh \
    'load_matrices_transposed(fragment.x, at + (k + (lane & 15))' 'load_matrices(fragment.x, at + (k + (lane & 15))'
mutate "forward: special values reach other queries" "$forward" forward.cuh 'is_careful = true;' 'break;'
mutate "forward: the sum does not shrink with the maximum" "$forward" softmax.cuh 'state.sum[tile][r] *= shrink;' ''
mutate "forward: a sink does not join the sum" "$forward" row_results.cuh '+ exp2_approximate((sink - reference) * LOG2_E)' ''
mutate "forward: chunks of negative positions round towards zero" "$forward" masks.cuh 'rest < 0 ? rest + chunk : rest' 'rest'
mutate "forward: lengths of the first sequence for all" "$forward" masks.cuh 'arguments.key_lengths + index' 'arguments.key_lengths'
mutate "forward: a bias of the least float overflows" "-DELEMENT=1 -DHEAD_DIM=32 -DFORWARD_WARPS=2 -DKERNEL_SET=1 -DHAS_BIAS=2" \
    specialization.cuh '#define FORWARD_KERNELS 1' $'#define FORWARD_KERNELS 1\n#undef NATURAL_SCORES\n#define NATURAL_SCORES 0'
mutate "dropout: words of the wrong rows" "$forward -DHAS_DROPOUT=1" dropout_words.cuh 'is_odd ? query + 8 : query' 'query'
mutate "ALiBi: positions count from the first query" "$forward -DHAS_ALIBI=1" modifiers.cuh \
    'modifiers.first_position = sequence.first_position;' 'modifiers.first_position = 0;'

decode="-DELEMENT=0 -DHEAD_DIM=32 -DKERNEL_SET=2"
mutate "decode: one stage too few" "$decode" decode.cuh 'wait_for_copies<DECODE_STAGES - 2>();' 'wait_for_copies<DECODE_STAGES - 1>();'
mutate "decode: no barrier of the warp" "$decode" decode.cuh $'        warp_barrier();\n        load_decode_tile' '        load_decode_tile'
mutate "decode: a write to an input" "$decode" row_results.cuh 'arguments.log_sum_exp) store_global(arguments.log_sum_exp + row' \
    'arguments.log_sum_exp) store_global((float*)arguments.queries + row'
mutate "decode: parts that overlap" "$decode" decode.cuh 'begin + split * share' 'begin + split * (share - DECODE_WARPS)'
mutate "combine: parts are not weighted by their sums" "$decode" combine_rows.cuh 'own.y * exp2_approximate' 'exp2_approximate'
mutate "codes: the scale of a key is left out" "$decode -DKEY_CODES=1" codes.cuh \
    'product * scale : fused' 'product : fused'
mutate "codes: columns of the output are not permuted" "$decode -DKEY_CODES=1" decode.cuh \
    'column_of_codes(d, block.lane_column + e)' '8 * d + block.lane_column + e'
mutate "codes: scales of the next tile" "$forward -DKEY_CODES=1" forward.cuh \
    'FORWARD_KEY_SCALES_AT + (key / FORWARD_KEYS % 2 *' 'FORWARD_KEY_SCALES_AT + ((key / FORWARD_KEYS + 1) % 2 *'
e4m3="-DELEMENT=1 -DHEAD_DIM=32 -DKERNEL_SET=2 -DKEY_CODES=1 -DCODE_FORMAT=1"
mutate "codes of E4M3: the sign is lost" "$e4m3" codes.cuh '(one & 0x80008000u), 0x7b807b80u' '0u, 0x7b807b80u'
mutate "codes of E4M3: an exponent of another bias" "-DELEMENT=0 -DHEAD_DIM=32 -DKERNEL_SET=2 -DKEY_CODES=1 -DCODE_FORMAT=1" \
    codes.cuh 'CODES_OF_E4M3 ? 256.0f : 1.0f' 'CODES_OF_E4M3 ? 128.0f : 1.0f'
bits="-DELEMENT=0 -DHEAD_DIM=128 -DVALUE_DIM=64 -DKEY_CODES=1 -DCODE_FORMAT=2"
mutate "codes of 4 bits: the halves of a block are swapped" "$bits -DKERNEL_SET=2" codes.cuh 'k % 32 == 16 ? 1 : 0' \
    'k % 32 == 0 ? 1 : 0'
mutate "codes of 4 bits: columns of values in the order of 8 bits" "$bits -DKERNEL_SET=2" codes.cuh \
    'if (CODES_OF_BYTE == 2) return columns' 'if (false) return columns'
mutate "codes of 4 bits: the second scale is the first one" "$bits -DKERNEL_SET=1 -DFORWARD_WARPS=2" codes.cuh \
    'from + 4 * n : from' 'from : from'
mutate "codes of 4 bits: the first scale for all weights" "-DELEMENT=1 -DHEAD_DIM=32 -DVALUE_DIM=128 -DKEY_CODES=1 -DCODE_FORMAT=2 -DKERNEL_SET=2" \
    decode.cuh 'if (d == 0 || VALUE_SCALES > 1)' 'if (d == 0)'

fused="-DELEMENT=0 -DHEAD_DIM=32 -DKERNEL_SET=5 -DFUSED_BACKWARD=1 -DKEY_WARPS=4 -DKEY_ROW_TILES=2 -DWARPS_PER_KEYS=2 -DBACKWARD_QUERIES=32"
mutate "backward: no barrier after scores are shared" "$fused" backward_keys.cuh \
    'if (WARPS_PER_KEYS > 1 || RELATIVE_BIAS_GRADIENT) block_barrier();' ''
mutate "backward: blocks in an order that waits for itself" "$fused" key_block.cuh \
    'FUSED_BACKWARD ? place.block : arguments.blocks - 1 - place.block' 'arguments.blocks - 1 - place.block'
mutate "backward: one number for the log-sum-exp" "$fused -DHAS_BIAS=2" row_results.cuh \
    'if (!NATURAL_SCORES) {
        result.statistics.log2_sum += MODIFIES_SCORES ? result.statistics.maximum : result.statistics.maximum * scale;' \
    'if (true) {
        result.statistics.log2_sum += result.statistics.maximum * scale;'
mutate "backward: NaN in queries reaches keys that they do not attend to" "$fused" backward_keys.cuh \
    'if (is_special) {' 'if (false) {'
mutate "forward: infinite keys have no score" "-DELEMENT=2 -DHEAD_DIM=16 -DFORWARD_WARPS=2 -DKERNEL_SET=1" forward.cuh \
    'if (ELEMENT == 2 && is_careful)' 'if (false)'
mutate "backward: delta of the first head" "$fused" key_block.cuh 'arguments.delta + statistics + row' \
    'arguments.delta + statistics % arguments.query_count + row'
mutate "backward: tiles of queries are left out" "$fused" key_block.cuh 'keys.y > block.first_key' 'keys.y > block.first_key + 16'
mutate "backward: diagonals end one query early" "$fused -DHAS_RELATIVE_BIAS=1 -DRELATIVE_BIAS_GRADIENT=1" modifier_gradients.cuh \
    'query < end; query++' 'query < end - 1; query++'
mutate "backward: slopes of a head run into the next" "$fused -DHAS_ALIBI=1 -DSLOPE_GRADIENT=1" modifier_gradients.cuh \
    'gradients.slope = 0;' ''
mutate "backward: the softcap's derivative is left out" "$fused -DHAS_SOFTCAP=1" backward_keys.cuh \
    'if (HAS_PRODUCT_DERIVATIVE)' 'if (false)'
mutate "backward: the bias is summed over one head" "$fused -DHAS_BIAS=1 -DBIAS_GRADIENT=1 -DALIGNED_BIAS=0" gradient_sums.cuh \
    'sums_heads ? arguments.heads' 'sums_heads ? 1'
((missed == 0)) && echo "the tests notice every mistake"
exit $missed
