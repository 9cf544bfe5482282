#!/usr/bin/env bash
# Prints the size of the code and of its tests beside the budgets. It fails nothing: what is above a budget has to say what it
# buys. Code lines are lines without comments, blank lines and `#[cfg(test)]` items; files that hold only tests count as tests.
set -euo pipefail
cd "$(dirname "$0")/.."

rust_files() { find "$@" -name '*.rs' 2>/dev/null | sort; }
# The names of modules that are declared `#[cfg(test)] mod name;`, their files or folders.
names=$(grep -rhA1 '^ *#\[cfg(test)\]$' src kernels/src | sed -nE 's/^ *(pub |pub\(crate\) )?mod ([a-z_]+);$/\2/p' | sort -u | paste -sd '|')
is_test="/($names)(\.rs$|/)"
code_files() { rust_files "$@" | grep -vE "$is_test" || true; }
test_files() { rust_files "$@" | grep -E "$is_test" || true; }

# Of formatted code: an item ends at a line of its own indentation that ends in `;` or is a closing brace.
code_lines() {
    xargs -r awk '
        FNR == 1 { in_comment = skipping = 0 }
        { indent = match($0, /[^ ]/) - 1; text = substr($0, indent + 1) }
        in_comment { in_comment = !/\*\//; next }
        skipping { if (indent == skipped && text ~ /[;}]$/) skipping = 0; next }
        text ~ /^#\[cfg\((all\()?test/ { skipping = 1; skipped = indent; next }
        text == "" || text ~ /^\/\// { next }
        text ~ /^\/\*/ { in_comment = !/\*\//; next }
        { count[FILENAME] += 1; total += 1 }
        END { print total + 0 }'
}
lines() { xargs -r cat | wc -l; }
row() { printf '%-44s %8s %8s\n' "$@"; }

sources=(src kernels/src)
row "" "is" "at most"
row "code lines of src and kernels/src" "$(code_files "${sources[@]}" | code_lines)" 13500
for folder in "${sources[@]}"; do row "  $folder" "$(code_files "$folder" | code_lines)" ""; done
row "files of src and kernels/src" "$(rust_files "${sources[@]}" | wc -l)" 110
row "lines of tests" "$(rust_files tests kernels/tests compare/tests | lines)" 16000
for folder in tests kernels/tests compare/tests; do
    [ ! -d "$folder" ] || row "  $folder" "$(rust_files "$folder" | lines)" ""
done
row "lines of test files inside src and kernels/src" "$(test_files "${sources[@]}" | lines)" ""
