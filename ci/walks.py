#!/usr/bin/env python3
"""Checks that the files of the walks in CONTRIBUTING.md exist, and that the table of packages has every package.

A walk is a section below "## Walks" that lists the files of a usual change in order. Words in backticks with a slash
are files or folders of the repository.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCUMENT = "CONTRIBUTING.md"
# The walks that have to be there.
WALKS = ["A score modifier", "A model type of Hugging Face", "A quantised type"]


def section(text: str, title: str, level: str) -> str | None:
    """Returns the text below a title, up to the next title of the same level or a higher one."""
    match = re.search(rf"^{level} {re.escape(title)}\n(.*?)(?=^#{{2,{len(level)}}} |\Z)", text, re.MULTILINE | re.DOTALL)
    return match[1] if match else None


def walk_problems(text: str):
    walks = section(text, "Walks", "##")
    if walks is None:
        yield f"{DOCUMENT} has no section `Walks`"
        return
    for title in WALKS:
        walk = section(walks, title, "###")
        if walk is None:
            yield f"{DOCUMENT}: there is no walk `{title}`"
            continue
        paths = [path for path in re.findall(r"`([\w./-]+)`", walk) if "/" in path]
        if len(paths) < 3:
            yield f"{DOCUMENT}: the walk `{title}` names {len(paths)} files, expected the files of each step"
        for path in paths:
            if not (ROOT / path).exists():
                yield f"{DOCUMENT}: the walk `{title}` names `{path}`, which does not exist"


def package_problems(text: str):
    table = section(text, "Packages", "##") or ""
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    manifests = subprocess.run(["git", "ls-files", "crates/*/Cargo.toml"], cwd=ROOT, capture_output=True, text=True, check=True)
    folders = {pathlib.Path(name).parent.as_posix() for name in manifests.stdout.splitlines()}
    for folder in sorted(folders - set(rows)):
        yield f"{DOCUMENT}: the table of packages lacks `{folder}`"
    for folder in rows:
        if not (ROOT / folder).is_dir():
            yield f"{DOCUMENT}: the table of packages has `{folder}`, which does not exist"


def main() -> int:
    text = (ROOT / DOCUMENT).read_text()
    problems = [*walk_problems(text), *package_problems(text)]
    print("\n".join(problems) or f"{len(WALKS)} walks name files that exist; the table of packages has every package")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
