#!/usr/bin/env bash
# Checks that no dependency needs a newer compiler than `rust-version`, except for the feature `hub`. Clippy's
# `incompatible_msrv` checks the code. The installed compiler must build every feature.
set -euo pipefail
cd "$(dirname "$0")/.."
stated=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
newest() { sort -V | tail -n 1; }
wanted() {
    cargo metadata --format-version 1 --filter-platform x86_64-unknown-linux-gnu --locked --features "$1" |
        grep -o '"rust_version":"[^"]*"' | cut -d'"' -f4 | newest
}
at_most() { [ "$(printf '%s\n%s\n' "$1" "$2" | newest)" = "$2" ]; }
without_hub=$(wanted plot,cuda,metal) with_hub=$(wanted plot,cuda,metal,hub)
have=$(rustc --version | awk '{print $2}')
at_most "${without_hub%.0}" "$stated" || { echo "a dependency needs Rust $without_hub, but Cargo.toml states $stated" >&2; exit 1; }
at_most "$with_hub" "$have" || { echo "this is Rust $have, but a dependency of the feature hub needs $with_hub" >&2; exit 1; }
echo "stated $stated, newest of the dependencies $without_hub, with the feature hub $with_hub, here $have"
