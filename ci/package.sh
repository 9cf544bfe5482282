#!/usr/bin/env bash
# Checks the files that `cargo publish` would upload of each package: none is missing, the packages are small, and
# files for the repository alone are not among them.
set -euo pipefail
cd "$(dirname "$0")/.."

# Checks that the named files are among the files of a package, and prints their number.
check() {
    local package=$1 list file
    shift
    list=$(cargo package --list --allow-dirty -p "$package")
    for file in Cargo.toml README.md LICENSE-MIT LICENSE-APACHE src/lib.rs "$@"; do
        grep -qx "$file" <<<"$list" || { echo "the package $package lacks $file" >&2; exit 1; }
    done
    if grep -E '^(\.ci|\.github|ci|crates|fuzz|target)/' <<<"$list"; then
        echo "the package $package contains files for the repository alone" >&2
        exit 1
    fi
    echo "$package: $(wc -l <<<"$list") files"
}

for package in call device kernels cuda metal modules core delta checkpoints frontend; do check "candle-attention-$package"; done
check candle-attention CHANGELOG.md models/frontend_48/model.safetensors
size=$(du -sb models | cut -f1)
[ "$size" -lt 3000000 ] || { echo "models/ has $size bytes, expected less than 3 MB" >&2; exit 1; }
echo "models/: $size bytes"
