"""What `docs/architectures.md` says of the model types that a run does not ask."""

import re

import refused
import table
from linear import HEADING as LINEAR
from others import HEADING as OTHERS
from table import Entry

REFUSED = "\n## Refused\n"
NAMES = re.compile(r"`([^`]+)`")


def entries(page):
    """The entries of the page."""
    found = []
    for name, kinds, has, besides in rows(page, "Equal"):
        found.append(Entry(name, "equal", kinds=listed(kinds), has=listed(has), besides=listed(besides)))
    for why, names in rows(page, "Refused"):
        for italics, name in re.findall(r"(\*?)`([^`]+)`", names):
            verdict = "unmade_attention" if italics else "refused"
            found.append(Entry(name, verdict, why=refused.missing().get(name, why)))
    for name, parts in rows(page, "Models of several parts"):
        pairs = re.findall(r"`([^`]+)`: `([^`]+)`", parts)
        found.append(Entry(name, "parts", parts=dict(pairs)))
    found += [Entry(name, "none") for name in NAMES.findall(section(page, "Without softmax attention"))]
    missing, without = refused.missing(), refused.listed("NO_SOFTMAX")
    for name, why in rows(page, "Not made"):
        if name in missing:
            found.append(Entry(name, "unmade_attention", why=missing[name]))
        else:
            found.append(Entry(name, "none" if name in without else "unmade", why=why.replace("\\|", "|")))
    for name, other in re.findall(r"`([^`]+)` of `([^`]+)`", page.partition("\nOther spellings")[2].partition("\n")[0]):
        found.append(Entry(name, "alias", why=other))
    return sorted(found, key=lambda entry: entry.model_type)


def with_entries(page, entries, version):
    """The page with these entries; its parts on linear attention and on other versions stay."""
    before, after = table.page(entries, version).split(REFUSED)
    linear = page.partition(LINEAR)[2].partition(REFUSED)[0]
    return before + LINEAR + linear + REFUSED + after + OTHERS + page.partition(OTHERS)[2]


def section(page, heading):
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rows(page, heading):
    """The cells of the rows of a table, without its head."""
    lines = [line for line in section(page, heading).splitlines() if line.startswith("| ")][2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return [[row[0].strip("`"), *row[1:]] if row[0].startswith("`") else row for row in cells]


def listed(cell):
    return [one for one in cell.split(", ") if one]
