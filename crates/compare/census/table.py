"""The verdict on every model type, and the page that shows them."""

import collections
import json
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import refused
from reasons import draft

TOLERANCE = 1e-5
ROOT = Path(__file__).resolve().parents[3]
sys.path.append(str(ROOT / "ci"))

import documents  # noqa: E402


@dataclass
class Entry:
    model_type: str
    verdict: str
    kinds: list = field(default_factory=list)
    has: list = field(default_factory=list)
    # What else attends in the model and is not loaded by name.
    besides: list = field(default_factory=list)
    parts: dict = field(default_factory=dict)
    why: str = ""
    error: float = 0.0
    # What layers of linear attention have, where there are such.
    linear: list | None = None


def known():
    command = [ROOT / "target" / "debug" / "census", "--known"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def judge(model_types, data, answers, in_table):
    entries = []
    for model_type in model_types:
        outcome = json.loads((data / model_type / "outcome.json").read_text())
        entries.append(verdict(model_type, outcome, answers, model_type in in_table))
    return entries


def verdict(model_type, outcome, answers, is_known):
    entry = Entry(model_type, "refused", parts=outcome.get("parts", {}))
    both = [model_type, f"{model_type}/options"]
    linear = [answer for name in both for answer in answers.get(name, []) if answer["kind"] == "linear"]
    if linear:
        entry = compared(entry, {}, linear)
        if entry.verdict == "wrong":
            return entry
        others = {name: [answer for answer in answers.get(name, []) if answer not in linear] for name in both}
        answers = answers | others
        # A row may be for these layers alone.
        own = [answer.get("refused", "") for answer in others[model_type] if answer["kind"] in ("self", "defaults")]
        is_known = not all(re.search("load_linear_attention|not supported", refused) for refused in own)
        entry = Entry(model_type, "refused", linear=entry.has, parts=entry.parts, error=entry.error)
    if "alias" in outcome:
        entry.verdict, entry.why = "alias", outcome["alias"]
        return entry
    if not is_known:
        cores = [] if "failed" in outcome or outcome.get("none") else own_cores(outcome, model_type)
        if "failed" in outcome:
            entry.verdict, entry.why = "unmade", outcome["failed"]
            if outcome.get("classes") or model_type in refused.missing():
                entry.verdict, entry.why = "unmade_attention", why(model_type, outcome.get("classes", []))
            elif model_type in refused.listed("NO_SOFTMAX"):
                entry.verdict = "none"
        elif cores:
            entry.why = why(model_type, [core["class"] for core in cores])
        elif model_type in refused.missing():
            # It attends with other modules than linear layers, or approximately.
            entry.why = refused.missing()[model_type]
        else:
            entry.verdict = "parts" if entry.parts else "none"
        return entry
    if "failed" in outcome:
        entry.verdict, entry.why = "wrong", f"not recorded: {outcome['failed']}"
        return entry
    entry = compared(entry, outcome, answers.get(model_type, []))
    for answer in answers.get(f"{model_type}/options", []):
        if "differs" in answer or "refused" in answer:
            continue
        if "failed" in answer or answer["error"] > TOLERANCE:
            fault = answer.get("failed") or f"off by {answer['error']:.1e}"
            entry.verdict = "wrong"
            entry.why += f"; with {outcome['options']}: {answer['kind']} of layer {answer['layer']}: {fault}"
    return entry


def why(model_type, classes):
    """What is missing. A model type that is not in the table yet gets a draft for it."""
    return refused.missing().get(model_type) or f"(not in the table yet) {draft(model_type, classes)}"


def own_cores(outcome, model_type):
    own = [core for core in outcome.get("cores", []) if core["owner"] == model_type]
    # Hyper-connections mix the streams of residuals by a softmax.
    others = ("Router", "Gate", "HyperConnection")
    return [core for core in own if not any(other in core["class"] for other in others)]


def compared(entry, outcome, answers):
    """The verdict on a model type that has a row."""
    covered, faults, refusals = set(), [], []
    for answer in answers:
        where = f"{answer['kind']} of layer {answer['layer']}"
        if "differs" in answer:
            faults.append(f"{where}: a bare config differs from one with all defaults, {answer['differs']}")
        elif "failed" in answer:
            faults.append(f"{where}: {answer['failed']}")
        elif "refused" in answer:
            refusals.append(f"{where}: {answer['refused']}")
        elif answer["error"] > TOLERANCE:
            faults.append(f"{where}: off by {answer['error']:.1e}")
        else:
            covered |= set(answer["modules"])
            entry.kinds = list(dict.fromkeys([*entry.kinds, answer["kind"]]))
            entry.has = list(dict.fromkeys([*entry.has, *answer["has"]]))
            entry.error = max(entry.error, answer["error"])
    # A model of several parts, whose row is for one of them.
    cores = own_cores(outcome, entry.model_type) or outcome.get("cores", [])
    right = {core["class"] for core in cores if is_covered(core, covered)}
    besides = [core for core in cores if not is_covered(core, covered)]
    entry.besides = sorted({core["class"] for core in besides} - right)
    unanswered = [core["module"] for core in besides if core["class"] in right]
    if faults or not covered:
        entry.verdict, entry.why = "wrong", "; ".join(faults or refusals or ["no layer was answered"])
    elif unanswered:
        entry.verdict, entry.why = "wrong", f"no answer for {', '.join(unanswered)}: {'; '.join(refusals[:2])}"
    else:
        entry.verdict = "equal"
    return entry


def is_covered(core, covered):
    # BERT's attention has its output projection in a sibling module.
    around = core["module"].rsplit(".", 1)[0]
    return any(module.startswith((core["module"] + ".", around + ".")) for module in covered)


HEAD = """# Hugging Face architectures

`crates/compare/census/run.py` writes this page. For every `model_type` of transformers {version} it makes tiny random
models, with default options and with others, and records inputs and outputs of each attention layer. Then it loads the
same layers with this crate, by the model's `config.json` and tensor names, and compares the outputs.

- **{equal} of {attending} model types that define softmax attention are equal**, to 1e-5 of the largest number, in
  every layer and on both backends; {wrong} wrong.
- {refused} are rejected by name, with an error that says what is missing here. {unmade} of these, in italics below, could
  not be recorded.
- {parts} more only combine models of other types, and {none} have no softmax attention. {others} could not be made in the
  census: their attention was not compared, and they are rejected by name too{but_linear}.

`hf::load_attention` loads the self-attention of a layer (of the encoder, if a model has an encoder and a decoder).
`hf::load_decoder_attention` and `hf::load_cross_attention` load the attention of such a model's decoder,
`hf::load_latent_attention` latent attention (DeepSeek and others), and `hf::load_compressed_key_attention` attention to
compressed keys (DeepSeek V4). `hf::load_named_attention` loads what else a model has, by the names in the column
"layers", such as `cross_attn` (`hf::attention_names`). For a part of a model of several parts, pass the part of the
config (`&config["vision_config"]`), and a builder at the checkpoint's root or at the part.

`cargo test --test hf` compares the models of `tests/hf/models` with transformers in every run, and
`examples/causal_lm` runs {decoders} decoders as whole models. [Another part](#other-versions-of-transformers) of this page
compares other versions of transformers in the same way. [Quantised checkpoints](quantised.md#compared) are counted by
method.

## Equal

| `model_type` | layers | features | other modules, not loaded by name |
| --- | --- | --- | --- |
"""


def page(entries, version):
    by = collections.defaultdict(list)
    for entry in entries:
        by[entry.verdict].append(entry)
    # Refused without a record: its classes say that it attends.
    refused = by["refused"] + by["unmade_attention"]
    attending = len(by["equal"]) + len(by["wrong"]) + len(refused)
    text = HEAD.format(
        version=version,
        equal=len(by["equal"]),
        attending=attending,
        refused=len(refused),
        unmade=len(by["unmade_attention"]),
        wrong=f"{len(by['wrong'])} are" if by["wrong"] else "none is",
        others=len(by["unmade"]),
        but_linear=but_linear(by["unmade"]),
        parts=len(by["parts"]),
        none=len(by["none"]),
        decoders=documents.decoders(),
    )
    for entry in by["equal"]:
        kinds = ", ".join(entry.kinds)
        text += f"| `{entry.model_type}` | {kinds} | {', '.join(entry.has)} | {', '.join(entry.besides)} |\n"
    if by["wrong"]:
        text += "\n## Wrong\n\n| `model_type` | |\n| --- | --- |\n"
        text += "".join(f"| `{entry.model_type}` | {cell(entry.why)} |\n" for entry in by["wrong"])
    text += "\n## Refused\n\n| what is missing | model types |\n| --- | --- |\n"
    reasons = collections.defaultdict(list)
    for entry in refused:
        name = f"`{entry.model_type}`"
        reasons[entry.why].append(f"*{name}*" if entry.verdict == "unmade_attention" else name)
    for why, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        text += f"| {cell(why)} | {len(names)}: {', '.join(names)} |\n"
    text += "\n## Models of several parts\n\n| `model_type` | parts |\n| --- | --- |\n"
    verdicts = {entry.model_type: entry.verdict for entry in entries}
    for entry in by["parts"]:
        parts = [
            f"`{name}`: `{part}`" + (" (equal)" if verdicts.get(part) == "equal" else "")
            for name, part in entry.parts.items()
        ]
        text += f"| `{entry.model_type}` | {', '.join(parts)} |\n"
    names = ", ".join(f"`{entry.model_type}`" for entry in by["none"])
    text += "\n## Without softmax attention\n\n" + textwrap.fill(names, 118, break_on_hyphens=False) + "\n"
    if by["unmade"]:
        text += "\n## Not made\n\n| `model_type` | why |\n| --- | --- |\n"
        text += "".join(f"| `{entry.model_type}` | {cell(entry.why)} |\n" for entry in by["unmade"])
    aliases = [f"`{entry.model_type}` of `{entry.why}`" for entry in by["alias"]]
    if aliases:
        text += "\nOther spellings in transformers: " + ", ".join(aliases) + ".\n"
    return text


def but_linear(unmade):
    """The end of a sentence on the model types that could not be made: those that have a row for linear attention."""
    names = sorted({entry.model_type for entry in unmade} & known())
    return f",\n  except the linear attention of {', '.join(f'`{name}`' for name in names)}" if names else ""


def cell(text):
    return text.replace("|", "\\|").replace("\n", " ")
