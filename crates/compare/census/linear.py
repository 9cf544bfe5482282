"""Linear attention by the gated delta rule: the part of the page that counts it."""

import importlib
import inspect
import re
import subprocess

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import table

HEADING = "\n## Linear attention\n"
PART = """
Layers of linear attention by the gated delta rule load with `hf::load_linear_attention`. Of {count} model types whose
code has the rule, {equal} are equal in every such layer, to 1e-5 of the largest number. Unless the table says otherwise,
there is one decay per head, computed as `-e^A_log softplus(x + dt_bias)`.

| `model_type` | features |
| --- | --- |
"""
RULE = r"def \w*(gated_delta_rule|kimi_delta_attention)\("


def known():
    command = [table.ROOT / "target" / "debug" / "census", "--linear"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def with_part(page, entries):
    """The page with this part, in place of what it says of it, after what is equal."""
    before, after = page.split("\n## Refused\n")
    return before.split(HEADING)[0] + HEADING + part(entries) + "\n## Refused\n" + after


def part(entries):
    equal = [entry for entry in entries if entry.linear is not None and entry.verdict != "wrong"]
    with_rule = {model_type for model_type in CONFIG_MAPPING if has_rule(model_type)}
    text = PART.format(count=len(with_rule | {entry.model_type for entry in equal}), equal=len(equal))
    text += "".join(f"| `{entry.model_type}` | {', '.join(entry.linear)} |\n" for entry in equal)
    others = ", ".join(f"`{name}`" for name in sorted(with_rule - {entry.model_type for entry in equal}))
    return text + (f"\nModels of several parts, whose text model is above: {others}.\n" if others else "")


def has_rule(model_type):
    config = CONFIG_MAPPING[model_type]
    try:
        module = importlib.import_module(config.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return False
    # Parts without layers of text have the same module.
    return not re.search("vision", model_type) and bool(re.search(RULE, inspect.getsource(module)))
