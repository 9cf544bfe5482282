"""The page's part on GGUF files, which lists the tables of `crates/checkpoints/src/gguf`.

python crates/compare/census/gguf_files.py    writes this part alone
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "crates" / "checkpoints" / "src" / "gguf"
PAGE = ROOT / "docs" / "architectures.md"
HEADING = "\n## GGUF\n"
# Further model types of an architecture, which the metadata tell apart.
MORE = {
    "deepseek2": ["deepseek_v2"],
    "llama": ["mistral", "mixtral"],
    "mistral3": ["mistral"],
    "olmo2": ["olmo3"],
}
PART = """
`gguf::load_attention` loads the attention of these values of `general.architecture`; `gguf::load_latent_attention` and
`gguf::load_linear_attention` load the layers of other kinds. `gguf::hf_config` returns the `model_type` of the second
column.

For each architecture llama.cpp's own converter writes a tiny random model of transformers as a file, llama.cpp's logits
for the file are compared with transformers' logits, and a test compares each layer with the attention of transformers,
to 1e-5 of the largest number: `tests/hf/make_gguf.py` and `cargo test --test hf gguf`. Architectures in italics have no
such file; their names and metadata are compared with a checkpoint's layers (`tests/hf/gguf.jsonl`).

| `general.architecture` | `model_type` |
| --- | --- |
"""
REFUSED = """
Other architectures of llama.cpp are refused with a reason:

| reason | architectures |
| --- | --- |
"""


def rows():
    """The supported architectures: (name, model type)."""
    text = (SOURCE / "architectures.rs").read_text().split("ARCHITECTURES: &[Architecture]")[1]
    return re.findall(r'\bof\(\s*"([^"]+)",\s*"([^"]+)"', text)


def refused():
    """The names of refused architectures, by their reasons."""
    text = (SOURCE / "refused.rs").read_text()
    reasons = dict(re.findall(r'const (\w+): &str =\s*"([^"]+)"', text))
    found = defaultdict(list)
    for name, reason in re.findall(r'\bof\(\s*"([^"]+)",\s*(\w+|"[^"]+"),?\s*\)', text):
        found[reasons.get(reason, reason.strip('"'))].append(f"`{name}`")
    return found


def compared():
    """The architectures of the files that llama.cpp wrote."""
    found = set()
    for file in (ROOT / "tests" / "hf" / "gguf_models").glob("*.gguf"):
        key = b"general.architecture"
        content = file.read_bytes()
        start = content.index(key) + len(key) + 4
        length = int.from_bytes(content[start : start + 8], "little")
        found.add(content[start + 8 : start + 8 + length].decode())
    return found


def with_part(page):
    """Returns the page with this part at its end."""
    text, judged = PART, compared()
    for name, model_type in rows():
        cell = f"`{name}`" if name in judged else f"*`{name}`*"
        text += f"| {cell} | {', '.join(f'`{one}`' for one in [model_type, *MORE.get(name, [])])} |\n"
    text += REFUSED
    for reason, names in sorted(refused().items(), key=lambda item: (-len(item[1]), item[0])):
        text += f"| {reason} | {', '.join(names)} |\n"
    return page.split(HEADING)[0] + HEADING + text


if __name__ == "__main__":
    PAGE.write_text(with_part(PAGE.read_text()))
