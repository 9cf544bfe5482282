#!/usr/bin/env python3
"""Checks two counts of the code between the attention function and the kernels, so that neither grows unnoticed.

- The files that a scalar modifier of scores touches. The example is softcap, which each path has. Code counts, not
  comments and tests; the files of weights and of model types, which only read its value, do not count.
- The types that describe an attention call on the CPU, from the function to a tile.

`python3 ci/counts.py list` prints what is counted.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODIFIER = re.compile("softcap", re.IGNORECASE)
MODIFIER_FOLDERS = ["call/src", "core/src", "kernels/src", "cuda/src", "cuda/kernels", "metal"]
MOST_MODIFIER_FILES = 16
CALL_TYPE = re.compile(r"(?:pub(?:\([^)]*\))? )?(?:struct|enum) (\w*(?:Call|Problem|Inputs|TileScores|AttentionTask))\b")
CALL_FOLDERS = ["crates/call/src", "crates/core/src/sdpa/call.rs", "crates/core/src/sdpa/cpu", "crates/kernels/src/flash"]
MOST_CALL_TYPES = 10


def code(folders: list[str]):
    """Returns the lines of code of each file, without comments at their ends or on lines of their own."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    for path in listed.stdout.splitlines():
        is_test = "/tests/" in path or path.endswith("/tests.rs")
        if path.endswith((".rs", ".cuh", ".cu", ".metal")) and not is_test and (ROOT / path).exists():
            text = (ROOT / path).read_text().split("#[cfg(test)]\nmod tests {")[0]
            yield path, [line.split("//")[0] for line in text.splitlines()]


def modifier_files() -> list[str]:
    folders = [f"crates/{folder}" for folder in MODIFIER_FOLDERS]
    return [path for path, lines in code(folders) if any(MODIFIER.search(line) for line in lines)]


def call_types() -> list[str]:
    found = []
    for path, lines in code(CALL_FOLDERS):
        found += [f"{match[1]} in {path}" for line in lines if (match := CALL_TYPE.match(line))]
    return found


def main() -> int:
    counts = [
        ("files that a scalar modifier of scores touches", modifier_files(), MOST_MODIFIER_FILES),
        ("types that describe a call on the CPU", call_types(), MOST_CALL_TYPES),
    ]
    for name, found, most in counts:
        if len(found) > most:
            print(f"{name}: {len(found)}, expected at most {most}")
        if len(found) > most or sys.argv[1:] == ["list"]:
            print(*(f"  {item}" for item in found), sep="\n")
    if any(len(found) > most for _, found, most in counts):
        return 1
    print("; ".join(f"{name}: {len(found)}" for name, found, _ in counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
