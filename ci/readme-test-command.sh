#!/usr/bin/env bash
# Runs the test command of the README.
set -euo pipefail
command=$(sed -n '/<!-- the test command -->/,/^```$/{/^cargo/p}' README.md)
[ "$(printf '%s\n' "$command" | grep -c .)" = 1 ] || {
    echo "README.md does not mark one test command" >&2
    exit 1
}
echo "$command"
eval "$command"
