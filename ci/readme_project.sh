#!/usr/bin/env bash
# Does what a reader of README.md does: makes an empty project with its commands, pastes its programs and runs them.
#
# Cargo makes the project and resolves its dependencies. The programs are compiled with the libraries that cargo
# compiled for the examples, and with no other than the project's dependencies, so that nothing is compiled twice.
set -euo pipefail
cd "$(dirname "$0")/.."
repository=$PWD
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$repository/target}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Prints the code of the fence below a marker of README.md.
fence() { sed -n "\|^<!-- $1 -->\$|,/^\`\`\`\$/p" "$repository/README.md" | sed '1,2d;$d'; }

cargo build --quiet --example tokenize_attend --message-format=json >"$folder/artifacts.json"
export CARGO_NET_OFFLINE=true
ln -s "$repository" "$folder/candle-attention"
cd "$folder"
commands=$(fence "a new project")
grep -q '^cargo add candle-attention --path ' <<<"$commands" || { echo "README.md shows no commands for a new project" >&2; exit 1; }
eval "$commands" >"$folder/cargo.log" 2>&1 || { cat "$folder/cargo.log" >&2; exit 1; }
cp "$repository/Cargo.lock" Cargo.lock

# Compiles a program of the project: `compile NAME SOURCE`.
compile() {
    cargo metadata --format-version 1 >"$folder/metadata.json"
    python3 - "$folder/metadata.json" "$folder/artifacts.json" >"$folder/arguments" <<'PYTHON'
"""Prints the arguments of rustc: the dependencies of the package `attend`, and where libraries are."""
import json, sys

metadata, artifacts = sys.argv[1:]
package = next(package for package in json.load(open(metadata))["packages"] if package["name"] == "attend")
libraries = {dependency["name"].replace("-", "_") for dependency in package["dependencies"]}
print("--edition", package["edition"], sep="\n")
for line in open(artifacts):
    message = json.loads(line)
    for path in message.get("linked_paths", []):
        print("-L", path, sep="\n")
    name = message.get("target", {}).get("name", "").replace("-", "_")
    for file in message.get("filenames", []):
        if name in libraries and file.endswith(".rlib"):
            libraries.remove(name)
            print("--extern", f"{name}={file}", sep="\n")
if libraries:
    sys.exit(f"no library was compiled for {', '.join(sorted(libraries))}")
PYTHON
    local arguments=()
    while IFS= read -r argument; do arguments+=("$argument"); done <"$folder/arguments"
    rustc --crate-name "$1" --out-dir "$folder" -L "dependency=$CARGO_TARGET_DIR/debug/deps" "${arguments[@]}" "$2"
}

# Runs a program and compares each line that it prints with the comment behind its `println!`, if there is one.
run() {
    "$folder/$1" >printed
    sed -n 's|^ *println!(.*);\( // \)\{0,1\}||p' "$2" >shown
    echo "$1 prints" && cat printed
    diff shown <(awk 'NR == FNR { shown[FNR] = $0; next } { print shown[FNR] == "" ? "" : $0 }' shown printed) || {
        echo "README.md shows other output of $2" >&2
        exit 1
    }
}

fence src/main.rs >src/main.rs
compile attend_main src/main.rs
run attend_main src/main.rs

mkdir src/bin
fence src/bin/weights.rs >src/bin/weights.rs
cp "$repository/models/torch_mha/model.safetensors" attention.safetensors
ln -s "$repository/tests/hf/models/qwen3" qwen3
compile weights src/bin/weights.rs
run weights src/bin/weights.rs
