#!/usr/bin/env bash
# `rust-version` is true if no dependency asks for a newer compiler, and if the one at hand is not older.
set -euo pipefail
stated=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
newest() { sort -V | tail -n 1; }
wanted=$(cargo metadata --format-version 1 --all-features --filter-platform x86_64-unknown-linux-gnu --locked |
    grep -o '"rust_version":"[^"]*"' | cut -d'"' -f4 | newest)
have=$(rustc --version | awk '{print $2}')
[ "$(printf '%s\n%s\n' "$wanted" "$stated" | newest)" = "$stated" ] || {
    echo "a dependency needs Rust $wanted, but Cargo.toml states $stated" >&2
    exit 1
}
[ "$(printf '%s\n%s\n' "$stated" "$have" | newest)" = "$have" ] || {
    echo "this is Rust $have, but Cargo.toml states $stated" >&2
    exit 1
}
echo "stated $stated, newest of the dependencies $wanted, here $have"
