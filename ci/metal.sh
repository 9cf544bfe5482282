#!/usr/bin/env bash
# Type-checks the feature `metal` with Clippy, on Linux too. Nothing is linked, so nothing runs.
#
# On other systems than Apple's, the bindings of Objective-C need GNUstep's runtime, and the linker does not find
# Apple's framework. A copy of the manifest selects the runtime, and a copy of objc2-metal that does not link the
# framework.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "$(uname -s)" = Darwin ]; then
    exec cargo clippy --lib --features metal -- -D warnings
fi
repository=$PWD copy=$PWD/target/metal-check
export CARGO_TARGET_DIR=$repository/target
rm -rf "$copy" && mkdir -p "$copy"
manifest=$(cargo metadata --format-version 1 --locked --features metal |
    grep -o '"manifest_path":"[^"]*/objc2-metal-[0-9][^"/]*/Cargo.toml"' | cut -d'"' -f4 | head -n 1)
cp -R "$(dirname "$manifest")" "$copy/objc2-metal"
sed -i '/^#\[link(name = "Metal", kind = "framework")\]$/d' "$copy/objc2-metal/src/generated/mod.rs"

for entry in src crates examples tests benches models docs README.md; do ln -s "$repository/$entry" "$copy/$entry"; done
cp Cargo.toml Cargo.lock "$copy"
cat >>"$copy/Cargo.toml" <<'TOML'

[patch.crates-io]
objc2-metal = { path = "objc2-metal" }

[target.'cfg(not(target_vendor = "apple"))'.dependencies]
objc2 = { version = "0.6", features = ["gnustep-2-1"] }
block2 = { version = "0.6", features = ["gnustep-2-1"] }
TOML
cd "$copy"
# GNUstep's runtime names a package that Cargo.lock does not.
cargo fetch --quiet || { echo "the feature metal is not checked: the registry cannot be reached" >&2; exit 0; }
# The launches of kernels are compiled for Apple's systems, and for this check.
export RUSTFLAGS="${RUSTFLAGS-} --cfg metal_check"
cargo clippy -p candle-attention-metal -p candle-attention-core -p candle-attention -p attention-oracle --lib \
    --features metal -- -D warnings
