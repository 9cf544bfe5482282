"""What is missing for model types that this crate refuses: the table that its errors have too."""

import re
from pathlib import Path

TABLE = Path(__file__).resolve().parents[3] / "crates" / "checkpoints" / "src" / "hf" / "refused.rs"


def missing():
    """What is missing, by model type."""
    text = TABLE.read_text()
    rows = re.findall(r'\bof\(\s*"([^"]+)",\s*&\[([^\]]*)\]', text)
    return {name: why for why, names in rows for name in re.findall(r'"([^"]+)"', names)}


def listed(name):
    """The model types of another list of the table."""
    (names,) = re.findall(rf"const {name}: &\[&str\] = &\[([^\]]*)\]", TABLE.read_text())
    return set(re.findall(r'"([^"]+)"', names))
