#!/usr/bin/env bash
# Runs what waits for Metal on a stand-in for Candle's Metal backend: the CPU behind the limits of Metal, which
# `ci/metal_standin/limits.rs` lists.
#
#   bash ci/metal_standin.sh              # the tests on the device, and a short `device_check`
#   bash ci/metal_standin.sh cargo test --features metal --test attention metal::
#
# A command runs in `target/metal-standin`, a workspace of links that takes Candle from the copies with the stand-in.
# The build shares the folder `target` with all others: the kernels and most dependencies are compiled once.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD copy=$PWD/target/metal-standin
export CARGO_TARGET_DIR=$repository/target

# The version whose sources the limits were read from.
version=0.11.1
for crate in candle-core candle-nn candle-metal-kernels; do
    locked=$(sed -n "/^name = \"$crate\"\$/{n;s/^version = \"\(.*\)\"\$/\1/p}" Cargo.lock)
    if [ "$locked" != "$version" ]; then
        echo "Cargo.lock has $crate $locked, and the limits of ci/metal_standin were read from $version: compare them" \
            "with the sources of $locked, then change the version in ci/metal_standin.sh" >&2
        exit 1
    fi
done

mkdir -p "$copy"
stamp="$version $(cat ci/metal_standin/* | cksum)"
if [ "$(cat "$copy/stamp" 2>/dev/null)" != "$stamp" ]; then
    metadata=$(cargo metadata --format-version 1 --locked)
    for crate in candle-core candle-nn; do
        manifest=$(grep -o "\"manifest_path\":\"[^\"]*/$crate-$version/Cargo.toml\"" <<<"$metadata" | cut -d'"' -f4 | head -n 1)
        rm -rf "${copy:?}/$crate"
        cp -R "$(dirname "$manifest")" "$copy/$crate"
        chmod -R u+w "$copy/$crate"
    done
    python3 ci/metal_standin/patch.py "$copy/candle-core" "$copy/candle-nn"
    echo "$stamp" >"$copy/stamp"
fi
for entry in src crates examples tests benches models docs README.md; do
    ln -sfn "$repository/$entry" "$copy/$entry"
done
cp Cargo.toml "$copy"
cat >>"$copy/Cargo.toml" <<'TOML'

[patch.crates-io]
candle-core = { path = "candle-core" }
candle-nn = { path = "candle-nn" }
TOML
# A package of a folder has no source and no checksum.
sed -E '/^name = "candle-(core|nn)"$/,/^$/{/^(source|checksum) = /d}' Cargo.lock >"$copy/Cargo.lock"
cd "$copy"
if [ $# -gt 0 ]; then exec "$@"; fi

# Compiling Candle optimised takes longer than its tests do without.
level=profile.dev.package
build=(-p candle-attention -p candle-attention-tests -p candle-attention-compare
    --features plot,metal,candle-attention-tests/metal-standin
    --config $level.candle-core.opt-level=0 --config $level.candle-nn.opt-level=0
    --config $level.candle-attention-modules.opt-level=0)
on_each_device=(--test attention --test cache --test errors --test golden)
on_one_device=(--test cache --test hf --test peft --test weights)
examples=(--example causal_lm --example image_embedding --example rerank --example sentence_embedding)
cargo build "${build[@]}" "${on_each_device[@]}" "${on_one_device[@]}" --test examples "${examples[@]}" --bin device_check
# Fewer random cases than on the CPU, whose own tests draw the same ones. The kernels of this crate run on the emulator,
# where each case takes longer. The tests that are skipped first take long there, and run without the kernels below.
export CACHE_CASES=1
long=(extreme_inputs long_sequences heads_biases layer_with_norms layer_with_gate layer_with_clip learned_keys one_key_head)
PROPTEST_CASES=4 cargo test "${build[@]}" "${on_each_device[@]}" -- metal:: "${long[@]/#/--skip=}"
# Whole models would take long on the emulator.
export CANDLE_ATTENTION_METAL_KERNELS=0 PROPTEST_CASES=20
cargo test "${build[@]}" --test attention --test cache -- metal:: --skip launches
export TEST_DEVICE=metal
# `short_calls` makes the calls of `layers::metal` in more orders, which takes long.
cargo test "${build[@]}" "${on_one_device[@]}" -- --skip cpu:: --skip metal:: --skip short_calls
EXAMPLE_BUILD_ARGS=${build[*]} cargo test "${build[@]}" --test examples -- examples_match_transformers attention_map_is_drawn
"$CARGO_TARGET_DIR/debug/device_check" --short --widths 32 --part 1/4 --device metal
