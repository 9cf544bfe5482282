#!/usr/bin/env bash
# Puts mistakes into the Metal kernels, one at a time, and checks that the tests on the emulator notice each of them.
# Usage: mutations.sh [words of a name]
set -u
here="$(cd "$(dirname "$0")" && pwd)"
copy="$(mktemp -d)"
trap 'rm -rf "$copy"' EXIT
cargo build --quiet --manifest-path "$here/../Cargo.toml" --example programs || exit 1
cp "${CARGO_TARGET_DIR:-$here/../../../target}/debug/examples/programs" "$copy" || exit 1
"$copy/programs" source "$copy/source" || exit 1
missed=0
only="${1:-}"

# Arguments: a name, the macros that have other values than by default, the text of the source that is replaced, and the
# text that replaces it.
mutate() {
    local name="$1" macros="$2"
    [[ $name == *"$only"* ]] || return
    rm -rf "$copy/mutated" && mkdir "$copy/mutated"
    python3 - "$copy" "$3" "$4" <<'PY' || { echo "$name: the text is not in the source"; missed=1; return; }
import sys
folder, old, new = sys.argv[1:]
text = open(f"{folder}/source/attention.metal").read()
if old not in text:
    sys.exit(1)
open(f"{folder}/mutated/attention.metal", "w").write(text.replace(old, new, 1))
PY
    macros="$("$copy/programs" options <<<"$macros")"
    if ! "${CXX:-g++}" -std=c++17 -O1 -w -fno-strict-aliasing -DEMULATOR -I"$here" -I"$copy/mutated" \
        -I"$here/../../cuda/emulator" $macros "$here/../../cuda/emulator/attention_tests.cpp" -o "$copy/tests" \
        2>"$copy/output"; then
        echo "$name: does not compile: $(grep -m1 error "$copy/output" | cut -c1-140)"
        [[ $name == *"address space"* ]] || missed=1
    elif "$copy/tests" >"$copy/output" 2>&1; then
        echo "$name: NOT NOTICED"
        missed=1
    else
        echo "$name: $(grep -m1 -E 'FAULT|FAIL ' "$copy/output" | cut -c1-140)"
    fi
}

plain="-DELEMENT=0 -DHEAD_DIM=16"
mutate "no barrier before keys are read" "$plain" $'own.index);\n        block_barrier();\n        if (is_attended) {' \
    $'own.index);\n        if (is_attended) {'
mutate "no barrier before values overwrite keys" "$plain" $'block_barrier();\n        load_tile(tile, own.value_rows' \
    'load_tile(tile, own.value_rows'
mutate "no barrier before keys overwrite values" "$plain" $'block_barrier();\n        load_tile(tile, own.key_rows' \
    'load_tile(tile, own.key_rows'
mutate "a barrier in one simdgroup only" "$plain" 'bool is_careful = false;' \
    'bool is_careful = false; if (own.index < 32) block_barrier();'
mutate "a mask that is one key too long" "$plain" 'key >= own.end) return' 'key > own.end) return'
mutate "a mask that begins one key late" "$plain" 'key < own.first ||' 'key <= own.first ||'
mutate "keys of the tile before are skipped" "$plain" 'own.first_key / FORWARD_KEYS * FORWARD_KEYS' \
    '(own.first_key + FORWARD_KEYS - 1) / FORWARD_KEYS * FORWARD_KEYS'
mutate "rows behind the last key are read" "$plain" 'key + row < end' 'key + row < end + 1'
mutate "columns behind the last one are read" "-DELEMENT=2 -DHEAD_DIM=21 -DALIGNED_ROWS=0" \
    'column + e >= width' 'column + e > width'
mutate "keys are not transposed" "$plain" 'key * FORWARD_KEY_PITCH + 8 * d + own.row' \
    '(key - own.column + own.row) * FORWARD_KEY_PITCH + 8 * d + own.column'
mutate "the wrong threads share a row" "$plain" 'larger(x, as_float(shuffle_bits_xor(as_bits(x), 8)))' \
    'larger(x, as_float(shuffle_bits_xor(as_bits(x), 2)))'
mutate "the sum does not shrink with the maximum" "$plain" 'state.sum *= shrink;' ''
mutate "the output does not shrink with the maximum" "$plain" 'output[d].x *= shrink,' ''
mutate "special values reach other queries" "$plain" 'is_careful = true;' 'break;'
mutate "special values are lost" "$plain" 'if (!is_finite(x)) output[d].x += x;' ''
mutate "a sink does not join the sum" "$plain" '+ exp2_approximate((sink - reference) * LOG2_E)' ''
mutate "chunks of negative positions round towards zero" "$plain" 'rest < 0 ? rest + chunk : rest' 'rest'
mutate "lengths of the first sequence for all" "$plain" 'arguments.key_lengths + index' 'arguments.key_lengths'
mutate "the key head of another group" "$plain" 'place.head / (arguments.heads / arguments.key_heads)' \
    'place.head % arguments.key_heads'
mutate "a write to an input" "$plain" 'row_address(arguments.output, arguments.output_strides' \
    'row_address((GLOBAL void*)arguments.queries, arguments.query_strides'
mutate "a bias of the next key" "$plain -DHAS_BIAS=2" 'key * arguments.bias_strides.key' \
    '(key + 1) * arguments.bias_strides.key'
mutate "a boolean mask that is not read" "$plain -DHAS_BOOLEAN_MASK=1" \
    'if (HAS_BOOLEAN_MASK && !load_boolean_mask(arguments, own.modifiers, own.query, key)) return NEGATIVE_INFINITY;' ''
mutate "ALiBi: positions count from the first query" "$plain -DHAS_ALIBI=1" \
    'modifiers.first_position = sequence.first_position;' 'modifiers.first_position = 0;'
mutate "more threadgroup memory than devices have" "$plain" 'SHARED_MEMORY(FORWARD_SHARED_BYTES)' 'SHARED_MEMORY(32784)'
mutate "decode: parts that overlap" "$plain" 'begin + split * share' 'begin + split * (share - 1)'
mutate "decode: sums of simdgroups are not weighted" "$plain" \
    'load_shared(from + 1) * exp2_approximate((load_shared(from) - reference) * scale)' 'load_shared(from + 1)'
mutate "combine: parts are not weighted by their sums" "$plain" 'own.y * exp2_approximate' 'exp2_approximate'
backward="-DELEMENT=2 -DHEAD_DIM=16 -DKERNEL_SET=5"
mutate "backward: no barrier before queries are overwritten" "$backward" \
    $'block_barrier();\n            load_query_tile(' 'load_query_tile('
mutate "backward: no barrier before queries are read" "$backward" \
    $'keys_of_lane, tile);\n            block_barrier();' 'keys_of_lane, tile);'
mutate "backward: no barrier before keys are overwritten" "$backward" \
    $'block_barrier();\n        load_tile_rows(key_tile' 'load_tile_rows(key_tile'
mutate "backward: a mask of queries that is one key too long" "$backward" 'key >= own.end) return 0.0f' \
    'key > own.end) return 0.0f'
mutate "backward: a mask of keys that begins one key late" "$backward" 'own.key < first || own.key >= end' \
    'own.key <= first || own.key >= end'
mutate "backward: tiles of queries are left out" "$backward" 'attended.end <= own.first_key)' \
    'attended.end <= own.first_key + 8)'
mutate "backward: delta of the first head" "$backward" 'delta = load_global(arguments.delta + at)' \
    'delta = load_global(arguments.delta + at % arguments.query_count)'
mutate "backward: the gradient of the log-sum-exp is left out" "$backward" \
    'if (arguments.log_sum_exp_gradient) sum -=' 'if (false) sum -='
mutate "backward: tiles are not transposed" "$backward" '(8 * c + place.column) * pitch + 8 * d + place.row' \
    '(8 * c + place.row) * pitch + 8 * d + place.column'
mutate "backward: the gradient of keys is not scaled" "$backward" 'key_sums, arguments.scale' 'key_sums, 1.0f'
mutate "backward: heads of another group" "$backward" 'own.key_head * own.group + number' 'own.key_head + number'
mutate "backward: numbers that are not finite reach rows that are masked" "$backward" \
    'if (is_careful && !is_finite(numbers.x)) numbers.x = 0;' ''
mutate "backward: gradients of outputs that are not finite are lost" "$backward" \
    'add_special_row(own.place, row, sums.values);' ''
mutate "backward: keys that are not finite are lost" "$backward" 'if (is_careful) add_special_keys(arguments, own, sums);' ''
mutate "backward: a write to an input" "$backward" 'row_address(arguments.query_gradient, arguments.query_gradient_strides' \
    'row_address((GLOBAL void*)arguments.queries, arguments.query_strides'
mutate "backward: the softcap's derivative is left out" "$backward -DHAS_SOFTCAP=1" 'pair.score * derivative' 'pair.score'
mutate "backward: slopes by the position of the neighbour" "$backward -DHAS_ALIBI=1 -DSLOPE_GRADIENT=1" \
    'position + 1 - own.key' 'position - own.key'
mutate "backward: diagonals end one query early" "$backward -DHAS_RELATIVE_BIAS=1 -DRELATIVE_BIAS_GRADIENT=1" \
    'query < end; query++' 'query < end - 1; query++'
mutate "backward: no barrier before diagonals are read" "$backward -DHAS_RELATIVE_BIAS=1 -DRELATIVE_BIAS_GRADIENT=1" \
    $'block_barrier();\n                add_diagonals' 'add_diagonals'
mutate "backward: the bias is summed over one head" "$backward -DHAS_BIAS=1 -DBIAS_GRADIENT=1 -DALIGNED_BIAS=0" \
    'sums_heads ? arguments.heads' 'sums_heads ? 1'
mutate "dropout: words of the next query" "$backward -DHAS_DROPOUT=1" '(u32)(own.first_query + query)' \
    '(u32)(own.first_query + query + 1)'
mutate "dropout: the backward pass keeps all weights" "$backward -DHAS_DROPOUT=1" 'weight_gradient * kept' 'weight_gradient'
codes="-DELEMENT=0 -DHEAD_DIM=64 -DVALUE_DIM=32 -DKEY_CODES=1"
mutate "codes: the scale of a neighbour" "$codes" 'load_scale(own, scales, key + 1, group)' \
    'load_scale(own, scales, key, group)'
mutate "codes: scales of keys that are not attended to" "$codes" 'if (key < own.first_key || key >= own.end_key) return 0.0f;' ''
mutate "codes: special scales are lost" "$codes" 'load_scale(own, own.value_scales, key, column / VALUE_SCALE_COLUMNS);' '1.0f;'
mutate "codes of E4M3: subnormal numbers" "$codes -DCODE_FORMAT=1" '0.001953125f' '0.0078125f'
mutate "codes of 4 bits: the halves of a block are swapped" "$codes -DCODE_FORMAT=2" 'column % 32 >= 16 ? 4 : 0' \
    'column % 32 < 16 ? 4 : 0'
mutate "codes of 4 bits: one scale for a row" "-DELEMENT=2 -DHEAD_DIM=128 -DKEY_CODES=1 -DCODE_FORMAT=2" \
    'group) {
    if (key <' 'group) {
    group = 0;
    if (key <'
mutate "pages: the first page for all keys" "-DELEMENT=1 -DHEAD_DIM=16 -DKEY_PAGES=1" \
    'load_global(rows.pages + (key >> rows.page_shift))' 'load_global(rows.pages)'
mutate "pages: the table of the first sequence" "-DELEMENT=1 -DHEAD_DIM=16 -DKEY_PAGES=1" \
    '(i64)sequence_index * arguments.page_table_width' '0'
mutate "threadgroup memory in the address space of a device" "$plain" 'load_shared(at + 1)' 'load_global(at + 1)'
mutate "device memory in the address space of a threadgroup" "$plain" \
    'load_element(own.queries, column + 1)' \
    'element_to_f32(load_shared((GLOBAL const Element*)own.queries + column + 1))'
((missed == 0)) && echo "the tests notice every mistake"
exit $missed
