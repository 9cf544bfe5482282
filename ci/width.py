#!/usr/bin/env python3
"""Checks that no line of a document or of a comment is wider than 120 columns. Tables, links and code within fences may be."""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WIDTH = 120
# Whole lines that are comments, by the ending of a file's name; every line of a document counts.
COMMENTS = {".rs": r"\s*//", ".py": r"\s*#", ".sh": r"\s*#", ".js": r"\s*(//|/?\*)", ".mjs": r"\s*(//|/?\*)", ".toml": r"\s*#", ".yml": r"\s*#", ".txt": r"\s*#", ".md": ""}


def is_excepted(line: str) -> bool:
    text = line.lstrip("/!# ")
    return text.startswith("|") or "](" in text or "://" in text


def main() -> int:
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    found = []
    for name in names:
        path = ROOT / name
        comment = COMMENTS.get(path.suffix)
        if comment is None or not path.exists():
            continue
        in_code = False
        for number, line in enumerate(path.read_text().splitlines(), 1):
            in_code ^= line.lstrip("/!# ").startswith("```")
            if not in_code and len(line) > WIDTH and re.match(comment, line) and not is_excepted(line):
                found.append(f"{name}:{number}: {len(line)} columns, expected at most {WIDTH}")
    print("\n".join(found) or f"no line of a document or comment is wider than {WIDTH} columns")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
