#!/usr/bin/env bash
# Does what a reader of README.md does: makes an empty project with its commands, pastes its programs and runs them.
#
# The project is in a temporary folder, next to a copy of this workspace that consists of links. It is a member of the
# copy when it is compiled, with the same lock file and profile, so that everything below it is compiled once for all
# checks. What the project needs besides this crate is what README.md adds to it.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
export CARGO_TARGET_DIR=$repository/target
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Prints the code of the fence below a marker of README.md.
fence() { sed -n "\|^<!-- $1 -->\$|,/^\`\`\`\$/p" "$repository/README.md" | sed '1,2d;$d'; }

copy=$folder/candle-attention
mkdir "$copy"
for entry in src crates examples tests benches models docs README.md; do ln -s "$repository/$entry" "$copy/$entry"; done
cp Cargo.toml Cargo.lock "$copy"

export CARGO_NET_OFFLINE=true
cd "$folder"
commands=$(fence "a new project")
grep -q '^cargo add candle-attention --path ' <<<"$commands" || { echo "README.md shows no commands for a new project" >&2; exit 1; }
eval "$commands" >"$folder/cargo.log" 2>&1 || { cat "$folder/cargo.log" >&2; exit 1; }
sed -i.bak 's|^members = \[|members = ["../attend", |' "$copy/Cargo.toml"
sed -i.bak 's|^\[package\]$|[package]\nworkspace = "../candle-attention"|' Cargo.toml

# Builds the programs and a bench of the copy: then dependencies have the features that they have for the examples.
build() { cargo build --quiet -p attend --bins -p candle-attention --bench norm; }

# Runs a program and compares each line that it prints with the comment behind its `println!`, if there is one.
run() {
    "$CARGO_TARGET_DIR/debug/$1" >printed
    sed -n 's|^ *println!(.*);\( // \)\{0,1\}||p' "$2" >shown
    echo "$1 prints" && cat printed
    diff shown <(awk 'NR == FNR { shown[FNR] = $0; next } { print shown[FNR] == "" ? "" : $0 }' shown printed) || {
        echo "README.md shows other output of $2" >&2
        exit 1
    }
}

fence src/main.rs >src/main.rs
build
run attend src/main.rs

# The crate that README.md names in its text.
added=$(grep -o '`cargo add [a-z_]*`' "$repository/README.md" | tr -d '`')
eval "$added" 2>"$folder/cargo.log" || { cat "$folder/cargo.log" >&2; exit 1; }
mkdir src/bin
fence src/bin/weights.rs >src/bin/weights.rs
cp "$repository/models/torch_mha/model.safetensors" attention.safetensors
ln -s "$repository/tests/hf/models/qwen3" qwen3
build
run weights src/bin/weights.rs
