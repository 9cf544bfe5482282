#!/usr/bin/env python3
"""Checks that the rooms of each package stand on each other in the order of ci/rooms.txt.

A room is a top-level module. An import that points up, or that takes a name through the crate's own re-exports instead of
from the room that has it, is an error; so no circle can arise. Comments and tests are not looked at.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def code(text: str) -> str:
    """The text without line comments and without inline test modules, which stand last in a file."""
    text = re.sub(r"//[^\n]*", "", text)
    return re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]


def first_segments(tree: str):
    """The first segments of the paths of a use tree: `a::b` has `a`, `{a::b, c}` has `a` and `c`."""
    if not tree.startswith("{"):
        yield re.match(r"\w+", tree)[0]
        return
    depth, entry = 0, ""
    for character in tree[1:]:
        if depth == 0 and character in ",}":
            if entry.strip():
                yield re.match(r"\w+", entry.strip())[0]
            if character == "}":
                return
            entry = ""
        else:
            depth += {"{": 1, "}": -1}.get(character, 0)
            entry += character


def imports(text: str, is_room_itself: bool):
    """The first segment of every path from the root of the crate. In a room's own file `super` is the root too."""
    roots = r"(?:crate|super)" if is_room_itself else "crate"
    for match in re.finditer(rf"\b{roots}::(\w+|\{{)", text):
        if match[1] == "{":
            yield from first_segments(text[match.end() - 1 :])
        else:
            yield match[1]


def problems(source: pathlib.Path, rooms: list[str]):
    found = {path.stem for path in source.iterdir() if path.is_dir() or path.suffix == ".rs"} - {"lib", "main", "bin"}
    for room in sorted(found ^ set(rooms)):
        yield f"{source.relative_to(ROOT)}: the room {room} is in only one of ci/rooms.txt and the folder"
    for path in sorted(source.rglob("*.rs")):
        parts = path.relative_to(source).parts
        own = parts[0].removesuffix(".rs")
        if own not in rooms or "tests" in parts or parts[-1] == "tests.rs":
            continue
        is_room_itself = len(parts) == 1 or parts[1:] == ("mod.rs",)
        for name in imports(code(path.read_text()), is_room_itself):
            where = f"{path.relative_to(ROOT)}: crate::{name}"
            if name not in rooms:
                yield f"{where} comes through the crate's own re-exports, expected the path of its room"
            elif rooms.index(name) > rooms.index(own):
                yield f"{where} points up from the room {own}"


def main() -> int:
    lines = (ROOT / "ci/rooms.txt").read_text().splitlines()
    packages = [line.split() for line in lines if line and not line.startswith("#")]
    found = [problem for source, *rooms in packages for problem in problems(ROOT / source, rooms)]
    print("\n".join(found) or f"{len(packages)} packages: every import points down")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
