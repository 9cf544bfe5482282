#!/usr/bin/env python3
"""Checks that the Rust code of README.md and of docs/*.md is compiled and run as documentation tests.

A document with Rust code has to be included by `include_str!` in a library, and its code may not be marked as
`ignore`. Code marked as `no_run` is compiled: it needs a file that a user has.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def included() -> set[pathlib.Path]:
    """Returns the documents that Rust sources include."""
    names = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = set()
    for name in names.stdout.splitlines():
        source = ROOT / name
        if source.exists():
            paths = re.findall(r'#!?\[doc = include_str!\("([^"]+\.md)"\)\]', source.read_text())
            found |= {(source.parent / path).resolve() for path in paths}
    return found


def rust_fences(text: str) -> list[tuple[int, str]]:
    """Returns the line and the language of each fence of Rust code."""
    fences, is_open = [], False
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence:
            is_open = not is_open
            # A fence without a language is Rust for rustdoc.
            if is_open and re.split(r"[,\s]", fence[1])[0] in ("rust", "", "no_run", "ignore", "should_panic"):
                fences.append((number, fence[1]))
    return fences


def main() -> int:
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    sources, faults, tested = included(), [], 0
    for document in documents:
        name = document.relative_to(ROOT)
        fences = rust_fences(document.read_text())
        if fences and document not in sources:
            faults.append(f"{name}: no library includes it, expected `#[doc = include_str!(..)]`, so that its code is tested")
        for number, language in fences:
            if "ignore" in language:
                faults.append(f"{name}:{number}: the code is marked `{language}`, expected code that is tested")
            tested += "ignore" not in language
    print("\n".join(faults) or f"{tested} pieces of Rust code in {len(documents)} documents are documentation tests")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
