#!/usr/bin/env bash
# The picture of the crate's front page as a link definition with its bytes, so that docs.rs shows it. `bash
# ci/pictures.sh` writes docs/pictures.md, `--check` says whether it is up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
definitions() {
    printf '[induction]: data:image/png;base64,%s\n' "$(base64 <docs/induction_heads.png | tr -d '\n')"
}
if [ "${1-}" = --check ]; then
    definitions | cmp - docs/pictures.md || { echo "docs/pictures.md is out of date: bash ci/pictures.sh" >&2; exit 1; }
else
    definitions >docs/pictures.md
fi
