#!/usr/bin/env python3
"""Checks the English of documentation and comments.

- A doc comment does not begin with What, That, Those, Of, So many or Likewise, or another of OPENERS: a noun clause that
  has to be decoded. Nor does the text under one of its headings, or a comment of the CUDA sources.
- The doc comment of a function begins with a verb in the third person: "Returns the ..", "Checks that ..".
- The words of ci/prose.txt occur no more often than it says. They are everyday words in the place of the field's terms
  (hold for store, see for attend to) and turns of phrase that a reader has to decode. A limit is what is left where the
  word is right; it only ever goes down.

`python3 ci/prose.py` checks the repository. `python3 ci/prose.py PATH..` lists what it finds in files or folders, with
every use of the listed words. `python3 ci/prose.py --count` prints ci/prose.txt with today's numbers.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
WORDS = ROOT / "ci/prose.txt"
OPENERS = ("What", "That", "Those", "Of", "So many", "As many", "Likewise", "Whoever", "Where", "The same", "Another")
CPP = (".cuh", ".cu", ".cpp", ".h")
# Words in the third person that are no verbs at the beginning of a sentence, and plurals.
NO_VERBS = {"this", "its", "as", "is", "always", "across", "unless", "plus", "whereas", "others", "bias", "axis", "class"}
VERBS = {"do", "does", "has"}
FUNCTION = re.compile(r"^\s*(pub(\([^)]*\))?\s+)?(const\s+)?(async\s+)?(unsafe\s+)?(extern\s+\"C\"\s+)?fn\s+(\w+)")


class DocComment:
    def __init__(self, line: int, text: str, following: str):
        self.line = line
        self.text = text
        self.following = following

    def openings(self) -> list[str]:
        """Returns the beginning of the comment and of the text under each heading."""
        return [self.text, *(part.strip() for part in re.split(r"\s# [A-Z]\w+(?=\s)", self.text)[1:])]

    def function(self) -> str | None:
        """Returns the name of the function that the comment documents, if it is one."""
        match = FUNCTION.match(self.following)
        return match[7] if match else None


def doc_comments(lines: list[str]):
    """Returns every `///` and `//!` comment of a Rust file with the line of code below it."""
    at = 0
    while at < len(lines):
        match = re.match(r"\s*(///|//!)(?!/) ?(.*)", lines[at])
        if not match:
            at += 1
            continue
        start, marker, text = at, match[1], []
        while at < len(lines) and (match := re.match(rf"\s*{re.escape(marker)}(?!/) ?(.*)", lines[at])):
            text.append(match[1])
            at += 1
        following = at
        while following < len(lines) and re.match(r"\s*(#\[|#!\[|\)\]|//[^/!]|$)", lines[following]):
            # An attribute may go over several lines.
            depth = 0
            while following < len(lines):
                depth += lines[following].count("[") - lines[following].count("]")
                following += 1
                if depth <= 0:
                    break
        yield DocComment(start + 1, " ".join(text).strip(), lines[following] if following < len(lines) and marker == "///" else "")


def opener_of(text: str) -> str | None:
    """Returns the forbidden opener with which a text begins."""
    return next((opener for opener in OPENERS if re.match(rf"{opener}\b", text)), None)


def cpp_comments(lines: list[str]):
    """Returns the line number and the text of every block of `//` comments that has its own lines in a C++ file."""
    at = 0
    while at < len(lines):
        start, text = at, []
        while at < len(lines) and (match := re.match(r"\s*// ?(.*)", lines[at])):
            text.append(match[1])
            at += 1
        if text:
            yield start + 1, " ".join(text)
        at += 1


def is_verb(word: str) -> bool:
    word = word.lower()
    return word in VERBS or (word.endswith("s") and not word.endswith("ss") and word not in NO_VERBS)


def comment_text(path: pathlib.Path, text: str) -> list[tuple[int, str]]:
    """Returns the lines of prose of a file: all of a document outside of code fences, else the comments."""
    found, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if path.suffix == ".md":
            prose = line
        elif path.suffix == ".rs":
            match = re.search(r"(?:^|\s)//[/!]?(.*)", line)
            prose = match[1] if match else ""
        else:
            match = re.match(r"\s*#(?!!)(.*)", line)
            prose = match[1] if match else ""
        if prose.strip().startswith("```"):
            in_code = not in_code
        elif prose and not in_code:
            found.append((number, re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", " ", prose)))
    return found


def limits() -> dict[str, int]:
    found = {}
    for line in WORDS.read_text().splitlines():
        if line and not line.startswith("#"):
            count, words = line.split(maxsplit=1)
            found[words] = int(count)
    return found


def files(arguments: list[str]) -> list[pathlib.Path]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [ROOT / name for name in tracked if name.endswith((".rs", ".md", ".sh", ".py", ".toml", *CPP))]
    chosen = [pathlib.Path(argument).resolve() for argument in arguments]
    paths = [path for path in paths if path.exists() and path.name != "prose.py" and path.parts[-2] != "seeds"]
    if chosen:
        paths = [path for path in paths if any(path == root or root in path.parents for root in chosen)]
    return paths


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    words = limits()
    patterns = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in words}
    counts, uses, found, comments = dict.fromkeys(words, 0), [], [], 0
    for path in files(arguments):
        text, name = path.read_text(), path.relative_to(ROOT)
        if path.suffix == ".rs":
            for comment in doc_comments(text.splitlines()):
                comments += 1
                begun = [(opener, text) for text in comment.openings() if (opener := opener_of(text))]
                first = re.match(r"[\w'-]+", comment.text)
                if begun:
                    opener, beginning = begun[0]
                    found.append(f"{name}:{comment.line}: a doc comment begins with {opener!r}: {beginning[:70]}")
                elif comment.function() and not (first and is_verb(first[0])):
                    found.append(f"{name}:{comment.line}: the doc of fn {comment.function()} begins with no verb: {comment.text[:70]}")
        if path.suffix in CPP:
            for number, comment in cpp_comments(text.splitlines()):
                if opener := opener_of(comment):
                    found.append(f"{name}:{number}: a comment begins with {opener!r}: {comment[:70]}")
            continue
        for number, line in comment_text(path, text):
            for word, pattern in patterns.items():
                for _ in pattern.finditer(line):
                    counts[word] += 1
                    uses.append(f"{name}:{number}: {word!r}: {line.strip()[:90]}")
    if "--count" in sys.argv:
        for word in words:
            print(f"{counts[word]:4} {word}")
        return 0
    if arguments:
        print("\n".join(found + uses))
        print(f"{len(found)} of {comments} doc comments; {len(uses)} uses of listed words")
        return 1 if found else 0
    for word, limit in words.items():
        if counts[word] > limit:
            found.append(f"{word!r} occurs {counts[word]} times, expected at most {limit}: see ci/prose.txt")
    print("\n".join(found) or f"{comments} doc comments begin with a noun or a verb; no listed word is above its limit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
