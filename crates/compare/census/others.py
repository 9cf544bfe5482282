"""Versions of transformers that the page is not about: what is found of the model types with a row, and its part."""

import json
import re
from pathlib import Path

from packaging.version import Version

import table
from changes import CHANGES

ROOT = Path(__file__).resolve().parents[3]
# By version.
FOUND = Path(__file__).with_name("other_versions.json")
HEADING = "\n## Other versions of transformers\n"


def of_the_page():
    """The version that the page is about."""
    requirements = (ROOT / "tests" / "hf" / "requirements.txt").read_text()
    return re.search(r"^transformers==(\S+)$", requirements, re.MULTILINE).group(1)


def find(model_types, data, answers, version):
    found = {"equal": 0, "changed": [], "defaults": [], "unmade": {}, "wrong": {}}
    for model_type in model_types:
        outcome = json.loads((data / model_type / "outcome.json").read_text())
        if "failed" in outcome or "alias" in outcome:
            found["unmade"][model_type] = outcome.get("failed") or f"its name is `{outcome['alias']}`"
            continue
        layers = [answer for answer in answers[model_type] if "differs" not in answer]
        if len(layers) < len(answers[model_type]):
            found["defaults"].append(model_type)
        entry = table.verdict(model_type, outcome, answers | {model_type: layers}, is_known=True)
        if entry.verdict == "equal":
            found["equal"] += 1
        elif any(change.explains(model_type, version) for change in CHANGES):
            found["changed"].append(model_type)
        else:
            found["wrong"][model_type] = entry.why
    return found


def keep(version, found, adds):
    """Keeps what was found, beside what was found before if it `adds` model types."""
    kept = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    if adds:
        before = kept[version]
        found = {
            "equal": before["equal"] + found["equal"],
            "changed": sorted({*before["changed"], *found["changed"]}),
            "defaults": sorted({*before["defaults"], *found["defaults"]}),
            "unmade": before["unmade"] | found["unmade"],
            "wrong": before["wrong"] | found["wrong"],
        }
    FOUND.write_text(json.dumps(kept | {version: found}, indent=1, sort_keys=True) + "\n")


def with_part(page):
    """The page with what was found of other versions, in place of what it says of them."""
    page = page.split(HEADING)[0]
    if not FOUND.exists():
        return page
    found = json.loads(FOUND.read_text())
    return page + HEADING + part(dict(sorted(found.items(), key=lambda item: Version(item[0]), reverse=True)))


PART = """
Other versions of transformers save models under other names, and some compute other numbers. The table counts the model
types above whose checkpoints, saved by that version, load with equal outputs:

| transformers | model types | equal | changed (see below) | wrong | not recorded | equal, with other defaults |
| --- | --- | --- | --- | --- | --- | --- |
"""
CHANGED = f"""
Defaults are for fields that a config omits. Here they are the defaults of {of_the_page()}; `save_pretrained` omits no field.

Where a version computes other numbers, this crate computes as the published checkpoints were trained:

| `model_type` | transformers | there | here |
| --- | --- | --- | --- |
"""


def part(found):
    text = PART
    for version, of in found.items():
        total = of["equal"] + len(of["changed"]) + len(of["wrong"]) + len(of["unmade"])
        lists = [listed(of[name]) for name in ("changed", "wrong", "unmade", "defaults")]
        text += f"| {version} | {total} | {of['equal']} | {' | '.join(lists)} |\n"
    text += CHANGED
    for change in CHANGES:
        names = ", ".join(f"`{name}`" for name in change.model_types.split())
        text += f"| {names} | {change.versions} | {change.theirs} | {change.ours} |\n"
    if any(of["unmade"] for of in found.values()):
        text += "\nNot recorded:\n\n| `model_type` | transformers | why |\n| --- | --- | --- |\n"
    for version, of in found.items():
        text += "".join(f"| `{name}` | {version} | {table.cell(why)} |\n" for name, why in of["unmade"].items())
    return text


def listed(names):
    return f"{len(names)}: " + ", ".join(f"`{name}`" for name in names) if names else "0"
