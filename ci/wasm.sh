#!/usr/bin/env bash
# Type-checks the crate for wasm32-unknown-unknown, as a dependency of a program. Every program has to choose the
# source of random seeds: https://docs.rs/getrandom/0.3/#webassembly-support.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$PWD/target/wasm-check
mkdir -p "$program"
cat >"$program/Cargo.toml" <<TOML
[workspace]
[package]
name = "wasm-check"
version = "0.0.0"
edition = "2024"
[lib]
path = "lib.rs"
[dependencies]
candle-attention = { path = "$PWD" }
getrandom = { version = "0.3", features = ["wasm_js"] }
TOML
echo 'pub use candle_attention::MultiHeadAttention;' >"$program/lib.rs"
cp Cargo.lock "$program/Cargo.lock"
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$PWD/target}
CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUSTFLAGS='--cfg getrandom_backend="wasm_js"' \
    cargo check --manifest-path "$program/Cargo.toml" --target wasm32-unknown-unknown
