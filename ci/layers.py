#!/usr/bin/env python3
"""Checks the imports of every package: of its modules and of the files within a module.

Modules. ci/layers.txt lists the top-level modules of each package from the lowest to the highest. A module imports only
from modules before it and from itself, and names what it imports by the module that defines it, not by a re-export of
the crate. So there is no circle of modules.

Files. Files of a package must not import each other in a circle, by paths that begin with `crate` or `super`. The
names that a module takes from its own children by `use child::Name` do not count: a module may build on its children
and they on it.

Comments and tests are not read. `python3 ci/layers.py --files` prints the circles with the imports that cause them.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def code(text: str) -> str:
    """Returns the text without line comments and without inline test modules, which are last in a file."""
    text = re.sub(r"//[^\n]*", "", text)
    return re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]


def use_paths(tree: str, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the paths of a use tree: `a::{b, c::d}` gives (a, b) and (a, c, d)."""
    tree = tree.strip()
    if not tree:
        return []
    brace = tree.find("{")
    if brace < 0:
        name = tree.split(" as ")[0].strip()
        return [prefix + tuple(part.strip() for part in name.split("::"))]
    head = tuple(part.strip() for part in tree[:brace].split("::") if part.strip())
    inner, depth, entries, entry = tree[brace + 1 : tree.rindex("}")], 0, [], ""
    for character in inner:
        if character == "," and depth == 0:
            entries.append(entry)
            entry = ""
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        entry += character
    entries.append(entry)
    return [path for entry in entries for path in use_paths(entry, prefix + head)]


def imports(text: str) -> list[tuple[str, ...]]:
    """Returns every path that begins with `crate`, `super` or `self`, in `use` declarations and elsewhere."""
    found = []
    for match in re.finditer(r"\buse\s+([^;]+);", text):
        found += [path for path in use_paths(match[1]) if path[0] in ("crate", "super", "self")]
    without_uses = re.sub(r"\buse\s+[^;]+;", "", text)
    for match in re.finditer(r"\b((?:crate|super)(?:::\w+)+)", without_uses):
        found.append(tuple(match[1].split("::")))
    return found


def re_exported(text: str) -> dict[str, tuple[str, ...]]:
    """Returns where the names that a file re-exports come from: name -> path relative to the file's own module."""
    names = {}
    for match in re.finditer(r"\bpub(?:\([^)]*\))?\s+use\s+([^;]+);", text):
        for path in use_paths(match[1]):
            path = path[1:] if path[0] == "self" else path
            if path[0] not in ("crate", "super"):
                names[path[-1]] = path
    return names


class Package:
    def __init__(self, source: pathlib.Path):
        self.source = source
        self.modules: dict[tuple[str, ...], str] = {}
        for path in sorted(source.rglob("*.rs")):
            parts = path.relative_to(source).with_suffix("").parts
            if parts[0] in ("main", "bin") or "tests" in parts:
                continue
            if parts[-1] in ("mod", "lib"):
                parts = parts[:-1]
            self.modules[parts] = code(path.read_text())
        self.exports = {module: re_exported(text) for module, text in self.modules.items()}

    def resolve(self, path: tuple[str, ...], module: tuple[str, ...]) -> tuple[str, ...] | None:
        """Returns the module that defines what `path`, written in `module`, names; re-exports are followed."""
        at, rest = ((), path[1:]) if path[0] == "crate" else (module, path)
        while rest and rest[0] in ("super", "self"):
            at, rest = (at[:-1] if rest[0] == "super" else at), rest[1:]
        for _ in range(20):
            while rest and at + (rest[0],) in self.modules:
                at, rest = at + (rest[0],), rest[1:]
            origin = self.exports.get(at, {}).get(rest[0]) if rest else None
            if origin is None or origin == tuple(rest[:1]):
                return at if at in self.modules else None
            rest = origin + rest[1:]
        return at

    def edges(self) -> dict[tuple[str, ...], dict[tuple[str, ...], tuple[str, ...]]]:
        """Returns the modules that each module imports from, with one path as the evidence."""
        found: dict = {module: {} for module in self.modules}
        for module, text in self.modules.items():
            for path in imports(text):
                target = self.resolve(path, module)
                if target is not None and target != module:
                    found[module].setdefault(target, path)
        return found


def top_level_problems(package: Package, layers: list[str]):
    source = package.source.relative_to(ROOT)
    found = {module[0] for module in package.modules if module}
    for module in sorted(found ^ set(layers)):
        yield f"{source}: the module {module} is in only one of ci/layers.txt and the folder"
    for module, text in package.modules.items():
        if not module or module[0] not in layers:
            continue
        for path in imports(text):
            at, rest = ((), path[1:]) if path[0] == "crate" else (module, path)
            while rest and rest[0] in ("super", "self"):
                at, rest = (at[:-1] if rest[0] == "super" else at), rest[1:]
            target = (at + rest)[:1]
            where = f"{source}/{'/'.join(module)}: {'::'.join(path)}"
            if not target or target[0] not in layers:
                yield f"{where} is a re-export of the crate, expected the path of the module that defines it"
            elif layers.index(target[0]) > layers.index(module[0]):
                yield f"{where} imports from a higher layer"


def circles(nodes: list, edges: dict) -> list[list]:
    """Returns the strongly connected components of two or more nodes (Tarjan)."""
    index, low, stack, on_stack, found = {}, {}, [], set(), []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        on_stack.add(node)
        for target in edges.get(node, ()):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in on_stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = []
            while True:
                member = stack.pop()
                on_stack.remove(member)
                component.append(member)
                if member == node:
                    break
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in nodes:
        if node not in index:
            visit(node)
    return found


def file_problems(package: Package, is_detailed: bool):
    edges = package.edges()
    for component in circles(list(package.modules), edges):
        names = ["::".join(module) or "lib.rs" for module in component]
        yield f"{package.source.relative_to(ROOT)}: {len(names)} files import each other: {', '.join(names)}"
        if is_detailed:
            for module in component:
                for target, path in edges[module].items():
                    if target in component:
                        yield f"    {'::'.join(module)} -> {'::'.join(target)}: {'::'.join(path)}"


def main() -> int:
    lines = (ROOT / "ci/layers.txt").read_text().splitlines()
    found, count = [], 0
    for line in lines:
        if not line or line.startswith("#"):
            continue
        source, *layers = line.split()
        package = Package(ROOT / source)
        count += len(package.modules)
        found += top_level_problems(package, layers)
        found += file_problems(package, "--files" in sys.argv)
    print("\n".join(found) or f"{count} files: every import goes to a lower module or file")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
