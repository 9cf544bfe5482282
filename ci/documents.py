#!/usr/bin/env python3
"""Checks what documents say about the repository: files, links, commands, tests and counts.

- Paths in `code` exist, links lead to a file and a heading that exist.
- Commands of Cargo name packages, features, tests, benches, examples and programs that exist. The filter of a test
  matches a test. Options of examples, benches and scripts exist.
- Tests that are named as `target::module::name` exist, and so do methods of this crate's types, `Type::method`.
- Counts come from the page or source that has them (COUNTS below).

The documents are README.md, CONTRIBUTING.md, docs/, the README.md of each package and of models/, and of CHANGELOG.md
the first section. `python3 ci/documents.py PATH..` checks other files.
"""

import json
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Folders of the repository, and what a command or the reader of a document writes there.
FOLDERS = r"(?:\.ci|\.github|benches|ci|crates|docs|examples|fuzz|models|src|tests)/"
WRITTEN = ("fuzz/corpus", "tests/page/views", "src/main.rs", "src/bin/weights.rs")
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def read(path: str) -> str:
    return (ROOT / path).read_text()


@dataclass(frozen=True)
class Piece:
    """Code of a document: within backquotes, or a line of a fence in a language."""

    line: int
    text: str
    language: str | None


def section(text: str, start: str) -> str:
    """Returns the text up to the second line that begins with `start`."""
    first = text.index(f"\n{start}")
    second = text.find(f"\n{start}", first + 1)
    return text if second < 0 else text[:second]


def pieces(text: str) -> list[Piece]:
    """Returns the code of a document. Code within backquotes may go over a line's end."""
    found, prose, language, joined = [], [], None, ""
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence:
            language = None if language is not None else fence[1]
            prose.append("")
        elif language is None:
            prose.append(line)
        else:
            prose.append("")
            # A backslash at the end continues a command.
            joined += line.strip()
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            found.append(Piece(number, joined, language))
            joined = ""
    flat = "\n".join(prose)
    for match in re.finditer(r"(?<!`)`([^`]+)`(?!`)", flat):
        if "\n\n" not in match[1]:
            found.append(Piece(flat.count("\n", 0, match.start()) + 1, re.sub(r"\s+", " ", match[1]), None))
    return found


def headings(text: str) -> set[str]:
    """Returns the anchors of a document's headings, as GitHub makes them."""
    found = set()
    for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        found.add(re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-"))
    return found


class Repository:
    """The targets, tests and names of the workspace."""

    def __init__(self):
        command = ["cargo", "metadata", "--no-deps", "--format-version", "1", "--offline"]
        metadata = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout)
        self.packages = {package["name"]: package for package in metadata["packages"]}
        self.features = {feature for package in metadata["packages"] for feature in package["features"]}
        self.targets: dict[str, dict[str, pathlib.Path]] = {"test": {}, "bench": {}, "example": {}, "bin": {}}
        self.libraries = []
        for package in metadata["packages"]:
            for target in package["targets"]:
                path = pathlib.Path(target["src_path"])
                if target["kind"][0] in self.targets:
                    self.targets[target["kind"][0]][target["name"]] = path
                elif target["kind"][0] != "custom-build":
                    self.libraries.append(path)
        self.tests: dict[str, set[str]] = {}
        sources = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, text=True, check=True)
        self.items: set[str] = set()
        for name in sources.stdout.splitlines():
            if name.startswith(("crates/", "src/")) and (ROOT / name).exists():
                found = re.findall(r"\b(?:fn|struct|enum|trait|type|const) (\w+)|^    (?:pub )?([A-Z]\w*|\w+(?=:))", read(name), re.MULTILINE)
                self.items |= {item or variant for item, variant in found}

    def tests_of(self, root: pathlib.Path) -> set[str]:
        """Returns the names of the functions and the modules of a test target or library, by the paths of its files."""
        key = str(root)
        if key not in self.tests:
            paths = root.parent.rglob("*.rs") if root.name in ("main.rs", "lib.rs") else [root]
            found = set()
            for path in paths:
                parts = path.relative_to(root.parent).with_suffix("").parts
                module = "::".join(part for part in parts if part not in ("main", "lib", "mod"))
                text = path.read_text()
                inner = ["", *(f"{name}::" for name in re.findall(r"^\s*(?:pub )?mod (\w+) \{", text, re.MULTILINE))]
                # Names of tests may be given to a macro that makes the functions.
                functions = re.findall(r"\bfn (\w+)|^\s+(\w{8,})(?:,| =>|:|\()", text, re.MULTILINE)
                for function in (first or second for first, second in functions):
                    found |= {f"{module}::{within}{function}".removeprefix("::") for within in inner}
            self.tests[key] = found
        return self.tests[key]


class Command:
    """A command of Cargo, as words."""

    def __init__(self, words: list[str]):
        self.variables = []
        while words and re.match(r"\w+=", words[0]):
            self.variables.append(words.pop(0))
        self.words = words
        after = words.index("--") if "--" in words else len(words)
        self.own, self.program = words[:after], words[after + 1 :]

    def values(self, *options: str) -> list[str]:
        """Returns the values of an option of Cargo."""
        found = []
        for at, word in enumerate(self.own):
            for option in options:
                if word == option and at + 1 < len(self.own):
                    found.append(self.own[at + 1])
                elif word.startswith(f"{option}="):
                    found.append(word.removeprefix(f"{option}="))
        return found


# Options of Cargo that have a value.
WITH_VALUE = {"-p", "--package", "--test", "--bench", "--example", "--bin", "--features", "--config", "--target", "--target-dir"}


class Checker:
    def __init__(self, repository: Repository):
        self.repository = repository
        self.faults: list[str] = []
        self.checked = 0

    def expect(self, holds: object, where: str, fault: str):
        self.checked += 1
        if not holds:
            self.faults.append(f"{where}: {fault}")

    def document(self, path: pathlib.Path):
        text = path.read_text()
        if path.name == "CHANGELOG.md":
            # The last part of a section has names as they were before.
            text = section(text, "## ").split("\n### Renamed\n")[0]
        name = path.relative_to(ROOT)
        for piece in pieces(text):
            self.piece(path, f"{name}:{piece.line}", piece)
        for number, line in enumerate(text.splitlines(), 1):
            for target in re.findall(r"\]\(([^)\s]+)\)|^\[[^]]+\]: (\S+)$", line):
                self.link(path, f"{name}:{number}", target[0] or target[1])

    def link(self, path: pathlib.Path, where: str, target: str):
        if re.match(r"https?:", target):
            return
        file, _, anchor = target.partition("#")
        found = path if not file else (path.parent / file)
        self.expect(found.exists(), where, f"the link {target} leads to no file")
        if anchor and found.suffix == ".md" and found.exists():
            self.expect(anchor in headings(found.read_text()), where, f"{found.name} has no heading #{anchor}")

    def piece(self, path: pathlib.Path, where: str, piece: Piece):
        if piece.language in (None, "sh", "text"):
            for found in re.findall(rf"(?<![\w/.~$-])({FOLDERS}[\w./*-]*)", piece.text):
                self.path(path, where, found)
        if piece.language in (None, "sh") and "(" not in piece.text.split(" ")[0]:
            self.commands(where, piece.text)
        if piece.language is None:
            self.name(where, piece.text)

    def path(self, document: pathlib.Path, where: str, found: str):
        found = found.rstrip(".")
        if found.startswith(WRITTEN):
            return
        roots = [ROOT, document.parent]
        self.expect(any(list(root.glob(found.rstrip("/"))) for root in roots), where, f"there is no {found}")

    def commands(self, where: str, text: str):
        for part in re.split(r"\s*(?:&&|\||;)\s*", text.split(" # ")[0]):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            if not words:
                continue
            command = Command([word for word in words if word != ".."])
            if "cargo" in command.own[:1]:
                self.cargo(where, command)
            elif words[0] in ("python", "python3") and len(words) > 1 and words[1].endswith(".py"):
                self.script(where, words[1], words[2:])
            elif words[0] in self.repository.targets["example"]:
                self.options(where, self.repository.targets["example"][words[0]], words[1:])
            elif words[0].startswith("--") and words[0][2:] in ("bench", "test", "example", "bin"):
                self.cargo(where, Command(["cargo", words[0][2:], *words]))

    def script(self, where: str, path: str, options: list[str]):
        if (ROOT / path).exists():
            for option in options:
                if option.startswith("--"):
                    self.expect(option.split("=")[0] in read(path), where, f"{path} has no option {option}")

    def options(self, where: str, root: pathlib.Path, words: list[str]):
        """Checks options of an example or a bench, which are fields of clap or words in its sources."""
        paths = list(root.parent.rglob("*.rs"))
        for common in ("examples/common", "benches/common", "crates/compare/src", "crates/distributed/src"):
            paths += (ROOT / common).rglob("*.rs")
        text = "\n".join(path.read_text() for path in paths)
        for word in words:
            option = word.split("=")[0]
            if re.match(r"--[a-z]", option) and option != "--help":
                field = option[2:].replace("-", "_")
                found = re.search(rf'"{option}"|long = "{option[2:]}"|^    (?:pub )?{field}:', text, re.MULTILINE)
                self.expect(found, where, f"{root.parent.name}/{root.name} has no option {option}")

    def cargo(self, where: str, command: Command):
        repository = self.repository
        for package in command.values("-p", "--package"):
            self.expect(package in repository.packages, where, f"there is no package {package}")
        for feature in ",".join(command.values("--features")).split(","):
            self.expect(not feature or not feature.islower() or feature in repository.features, where, f"there is no feature {feature}")
        roots = []
        for kind, targets in repository.targets.items():
            for name in command.values(f"--{kind}"):
                if not re.fullmatch(r"\w+", name):
                    continue
                self.expect(name in targets, where, f"there is no {kind} {name}")
                if name in targets:
                    roots.append(targets[name])
        if "test" in command.own[:5]:
            self.filters(where, command, roots)
        else:
            for root in roots:
                self.options(where, root, command.program)

    def filters(self, where: str, command: Command, roots: list[pathlib.Path]):
        """Checks that the words by which a command selects tests match a test."""
        at = command.own.index("test") + 1
        found, own = [], command.own[at:]
        for number, word in enumerate(own):
            before = own[number - 1] if number else ""
            if not word.startswith("-") and before not in WITH_VALUE:
                found.append(word)
        found += [word for word in command.program if not word.startswith("-")]
        if not roots:
            roots = [*self.repository.libraries, *self.repository.targets["test"].values()]
        for filter in found:
            matches = any(filter.rstrip(":") in test for root in roots for test in self.repository.tests_of(root))
            self.expect(matches or not re.fullmatch(r"[\w:]+", filter), where, f"the filter {filter} matches no test")

    def name(self, where: str, text: str):
        """Checks the name of a test, `target::module::name`, and of a method, `Type::method`."""
        match = re.fullmatch(r"([a-z]\w*)::([\w:]+)(\*?)", text)
        if match and match[1] in self.repository.targets["test"]:
            tests = self.repository.tests_of(self.repository.targets["test"][match[1]])
            # Some tests have the name of a module of the crate.
            last = match[2].split("::")[-1]
            is_item = any(item.startswith(last) if match[3] else item == last for item in self.repository.items)
            self.expect(is_item or any(match[2] in test for test in tests), where, f"there is no test {text}")
        match = re.match(r"([A-Z]\w*[a-z]\w*)::(\w+)", text)
        if match and match[1] in self.repository.items - {"Tensor"}:
            self.expect(match[2] in self.repository.items, where, f"there is no {match[0]}")


@dataclass(frozen=True)
class Count:
    """A count in a document: `pattern` has it in its first group."""

    document: str
    pattern: str
    expected: Callable[[], int]
    source: str


def decoders() -> int:
    """Returns the number of model types that `causal_lm` runs."""
    text = read("examples/common/blocks/family.rs")
    body = text[text.index("pub fn of(") :]
    arms = re.findall(r'^            ((?:"\w+"(?: \| )?)+)', body[: body.index("\n    }\n")], re.MULTILINE)
    return len({name for arm in arms for name in re.findall(r'"(\w+)"', arm)})


def architectures(heading: str, column: int) -> int:
    """Returns the number of names in a column of a table of docs/architectures.md."""
    text = read("docs/architectures.md")
    text = text[text.index(f"\n## {heading}\n") + 4 :]
    rows = [line for line in text[: text.find("\n## ")].splitlines() if line.startswith("| ")]
    return sum(len(re.findall(r"`[^`]+`", row.split("|")[column])) for row in rows[2:])


COUNTS = [
    Count("docs/architectures.md", r"runs (\S+) decoders", decoders, "examples/common/blocks/family.rs"),
    Count("docs/architectures.md", r"\*\*(\S+) of \S+ model types", lambda: architectures("Equal", 1), "the table of equal types"),
    Count("docs/architectures.md", r"(?m)^- (\d+) are rejected", lambda: architectures("Refused", 2), "the table of refused types"),
]


def number(text: str) -> int | None:
    if text.lower() in NUMBERS:
        return NUMBERS.index(text.lower())
    digits = text.replace(",", "")
    return int(digits) if digits.isdigit() else None


def check_counts(checker: Checker):
    for count in COUNTS:
        match = re.search(count.pattern, read(count.document))
        checker.expect(match, count.document, f"no text matches {count.pattern!r}")
        if match:
            expected = count.expected()
            checker.expect(number(match[1]) == expected, count.document, f"{match[0]!r}: {count.source} has {expected}")


def check_lists(checker: Checker):
    """Checks that lists are whole: packages, benches, fuzz targets, examples, and the features of Cargo."""
    text = read("CONTRIBUTING.md")
    for package in sorted((ROOT / "crates").iterdir()):
        checker.expect(f"| `crates/{package.name}` |" in text, "CONTRIBUTING.md", f"the table has no row of crates/{package.name}")
    benches = text.split("\n## Timing\n")[1].split("\n\n")[0]
    for bench in checker.repository.packages["candle-attention"]["targets"]:
        if bench["kind"] == ["bench"]:
            checker.expect(f"`{bench['name']}`" in benches, "CONTRIBUTING.md", f"the list of benches has no {bench['name']}")
    for target in sorted((ROOT / "fuzz/seeds").iterdir()):
        checker.expect(f"`{target.name}`" in text, "CONTRIBUTING.md", f"the list of fuzz targets has no {target.name}")
    text = read("docs/features.md")
    package = checker.repository.packages["candle-attention"]
    examples = [target["name"] for target in package["targets"] if target["kind"] == ["example"]]
    parts = {"Examples": examples, "Features of Cargo": [name for name in package["features"] if name != "default"]}
    for heading, names in parts.items():
        table = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
        for name in names:
            checker.expect(re.search(rf"^\|[^|]*`{name}[ `]", table, re.MULTILINE), "docs/features.md", f"the part {heading} has no row of {name}")


def check_speed(checker: Checker):
    """Checks that the figures of the README's table of speed are in docs/speed.md."""
    table = read("README.md").split("\n## Speed\n")[1].split("\n## ")[0]
    speed = read("docs/speed.md")
    for row in re.findall(r"^\| [^|]+ \| \*\*(\S+)\*\* \| ([\d.]+)", table, re.MULTILINE):
        for figure in row:
            checker.expect(re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.])", speed), "README.md", f"docs/speed.md has no figure {figure}")


def main() -> int:
    documents = [pathlib.Path(argument).resolve() for argument in sys.argv[1:]] or [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "models/README.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "crates").glob("*/README.md")),
    ]
    checker = Checker(Repository())
    for document in documents:
        checker.document(document)
    if not sys.argv[1:]:
        check_counts(checker)
        check_lists(checker)
        check_speed(checker)
    print("\n".join(checker.faults) or f"{checker.checked} names, links and counts of {len(documents)} documents are right")
    return 1 if checker.faults else 0


if __name__ == "__main__":
    sys.exit(main())
