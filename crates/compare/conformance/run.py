"""Records the cases that ONNX and PyTorch test attention by, and holds both paths of this crate to them.

python crates/compare/conformance/run.py    writes tests/conformance/*.{json,safetensors} and docs/conformance.md

The cases are those of the packages in requirements.txt. `cargo test --test conformance` runs what was recorded.
"""

import os
import subprocess
import sys
from pathlib import Path

sys.dont_write_bytecode = True

import onnx_cases
import torch_cases

ROOT = Path(__file__).resolve().parents[3]


def main():
    for judge in (onnx_cases, torch_cases):
        cases = judge.record()
        cases.write(ROOT / "tests" / "conformance")
        print(f"{cases.judge}: {len(cases.list)} cases")
    test = ["cargo", "test", "--quiet", "--test", "conformance"]
    return subprocess.run(test, cwd=ROOT, env=os.environ | {"UPDATE_EXPECT": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
