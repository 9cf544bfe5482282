#!/usr/bin/env bash
# What `cargo publish` would upload: complete, small, and without what only the repository needs.
set -euo pipefail
list=$(cargo package --list --allow-dirty)
for needed in Cargo.toml README.md CHANGELOG.md docs/attention.png LICENSE-MIT LICENSE-APACHE src/lib.rs models/frontend_48/model.safetensors; do
    grep -qx "$needed" <<<"$list" || { echo "the package lacks $needed" >&2; exit 1; }
done
for unwanted in '^\.ci/' '^ci/' '^target/'; do
    if grep -q "$unwanted" <<<"$list"; then echo "the package holds $unwanted" >&2; exit 1; fi
done
size=$(du -sb models | cut -f1)
[ "$size" -lt 3000000 ] || { echo "models/ has $size bytes, expected less than 3 MB" >&2; exit 1; }
echo "$(wc -l <<<"$list") files, models/ $size bytes"
