#!/usr/bin/env bash
# Prints the size of each package beside its budget in ci/budgets.txt, and fails where one is above. Code lines are
# lines without comments, blank lines and `#[cfg(test)]` items; files that hold only tests are not counted as code.
set -euo pipefail
cd "$(dirname "$0")/.."

rust_files() { find "$@" -name '*.rs' | sort; }
# The names of modules that are declared `#[cfg(test)] mod name;`, their files or folders.
names=$(grep -rhA1 '^ *#\[cfg(test)\]$' src crates/*/src | sed -nE 's/^ *(pub |pub\(crate\) )?mod ([a-z_]+);$/\2/p' | sort -u | paste -sd '|')
code_files() { rust_files "$@" | grep -vE "/($names)(\.rs$|/)" || true; }

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
        { total += 1 }
        END { print total + 0 }'
}

status=0
printf '%-28s %-6s %8s %8s\n' "" "" is "at most"
while read -r name kind at_most folders; do
    case $name in '' | '#'*) continue ;; esac
    case $kind in
    code) is=$(code_files $folders | code_lines) ;;
    lines) is=$(rust_files $folders | xargs -r cat | wc -l) ;;
    files) is=$(code_files $folders | wc -l) ;;
    text) is=$(cat $folders | wc -l) ;;
    *) echo "ci/budgets.txt: $kind is none of code, lines, files and text" >&2; exit 1 ;;
    esac
    note=
    [ "$is" -le "$at_most" ] || { note=" above its budget"; status=1; }
    printf '%-28s %-6s %8s %8s%s\n' "$name" "$kind" "$is" "$at_most" "$note"
done <ci/budgets.txt
exit "$status"
