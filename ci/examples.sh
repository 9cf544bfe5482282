#!/usr/bin/env bash
# Runs the first command of the README and compares its output with the output that the README shows.
set -euo pipefail
command=$(sed -n '/<!-- the main job -->/,/^```$/{/^cargo/p}' README.md)
[ "$(printf '%s\n' "$command" | grep -c .)" = 1 ] || { echo "README.md does not mark one main job" >&2; exit 1; }
echo "$command"
printed=$(eval "$command")
echo "$printed"
# Times and the device differ from machine to machine.
stable() { grep -vE '^(times|device) '; }
shown=$(sed -n '/<!-- what it prints -->/,/^```$/p' README.md | sed '1,2d;$d')
diff <(stable <<<"$shown") <(stable <<<"$printed") || { echo "README.md shows other output" >&2; exit 1; }
