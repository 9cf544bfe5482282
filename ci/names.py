#!/usr/bin/env python3
"""Checks that a type name means one thing: no two files of the published packages define a type of the same name.

Types are structs, enums, unions, traits and aliases of types, public or not; tests and types inside of an `impl` or a
trait apart. ci/names.txt has the exceptions, one a line, with the reason; a name there that is defined once is to be
removed.

`python3 ci/names.py NAME..` prints the files that define these names.
"""

import collections
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "ci/names.txt"
MOST_ALLOWED = 8
NOT_PUBLISHED = "crates/compare/"
DEFINITION = re.compile(r"( *)(?:pub(?:\([^)]*\))? )?(?:unsafe )?(struct|enum|union|trait|type) (\w+)")


def is_test(path: str) -> bool:
    return path.startswith(NOT_PUBLISHED) or "/tests/" in path or path.endswith("/tests.rs")


def definitions() -> dict[str, list[str]]:
    """Returns the files that define each type name."""
    listed = subprocess.run(
        ["git", "ls-files", "crates/*/src/*.rs", "src/*.rs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = collections.defaultdict(list)
    for path in listed.stdout.splitlines():
        if is_test(path) or not (ROOT / path).exists():
            continue
        for line in (ROOT / path).read_text().splitlines():
            match = DEFINITION.match(line)
            # An indented alias belongs to an `impl` or a trait.
            if match and not (match[1] and match[2] == "type") and path not in found[match[3]]:
                found[match[3]].append(path)
    return found


def allowed() -> dict[str, str]:
    """Returns the reason of each exception."""
    lines = [line for line in ALLOWED.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason.strip() for name, _, reason in (line.partition(":") for line in lines)}


def problems(found: dict[str, list[str]], exceptions: dict[str, str]):
    for name in sorted(found):
        if len(found[name]) > 1 and name not in exceptions:
            yield f"the type name `{name}` is defined in {', '.join(found[name])}: expected one file"
    for name, reason in exceptions.items():
        if len(found.get(name, [])) < 2:
            yield f"ci/names.txt has `{name}`, which is defined in one file or in none: remove it"
        if not reason:
            yield f"ci/names.txt has `{name}` without a reason"
    if len(exceptions) > MOST_ALLOWED:
        yield f"ci/names.txt has {len(exceptions)} names, expected at most {MOST_ALLOWED}"


def main() -> int:
    found = definitions()
    if sys.argv[1:]:
        for name in sys.argv[1:]:
            print(name, *found.get(name, ["is not defined"]))
        return 0
    exceptions = allowed()
    texts = list(problems(found, exceptions))
    print("\n".join(texts) or f"{len(found)} type names; {len(exceptions)} of them are defined in several files")
    return 1 if texts else 0


if __name__ == "__main__":
    sys.exit(main())
