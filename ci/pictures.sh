#!/usr/bin/env bash
# The pictures of the README as link definitions with their bytes, which come before the README's own in the documentation, so
# that docs.rs shows them. `bash ci/pictures.sh` writes docs/pictures.md, `--check` says whether it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
definitions() {
    printf '[attention]: data:image/png;base64,%s\n' "$(base64 <docs/attention.png | tr -d '\n')"
    printf '[induction]: data:image/png;base64,%s\n' "$(base64 <docs/induction_heads.png | tr -d '\n')"
    printf '[speed]: data:image/svg+xml;base64,%s\n' "$(base64 <docs/benchmarks.svg | tr -d '\n')"
}
if [ "${1-}" = --check ]; then
    definitions | cmp - docs/pictures.md || { echo "docs/pictures.md is out of date: bash ci/pictures.sh" >&2; exit 1; }
else
    definitions >docs/pictures.md
fi
