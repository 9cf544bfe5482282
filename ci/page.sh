#!/usr/bin/env bash
# Checks the page of attention weights in a browser: its script is linted, its decoding runs in Node, and a Chromium
# without a network opens pages that a test writes, and compares them with the weights of the reference path.
set -euo pipefail
cd "$(dirname "$0")/.."

missing() { echo "ci/page.sh: $*" >&2; exit 1; }
command -v node npm >/dev/null || missing "there is no Node.js with npm, expected version 20 or later"
bash ci/install.sh page >/dev/null ||
    missing "there is no Chromium that apt-get can install, unless CHROMIUM names one, or npm has no packages of tests/page"
CHROMIUM=${CHROMIUM:-$(command -v chromium || command -v google-chrome)}
export CHROMIUM

PAGES=$(mktemp -d)
export PAGES
trap 'rm -r "$PAGES"' EXIT
cargo test --quiet --features plot --test page

cd tests/page
# The files as one script, in the order of mod.rs, so that the linter finds names of other files.
sed -nE 's/.*include_str!\("([a-z]*\.js)"\).*/\1/p' ../../crates/frontend/src/plot/page/mod.rs |
    sed 's|^|../../crates/frontend/src/plot/page/|' | xargs cat | npx eslint --stdin --stdin-filename page.js
npx eslint .
node --test --test-reporter=dot decode.test.mjs
node --test --test-reporter=spec browser.test.mjs
