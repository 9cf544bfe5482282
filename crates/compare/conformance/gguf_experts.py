"""Writes the checkpoints of causal_lm with experts as GGUF files, by llama.cpp's converter.

python crates/compare/conformance/gguf_experts.py LLAMA_CPP    writes tests/causal_lm/gguf/*.gguf

LLAMA_CPP is a folder of llama.cpp's source; `tests/hf/requirements_gguf.txt` has its version and its place.
"""

import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/hf"))

import llama_cpp

CHECKPOINTS = ROOT / "tests/causal_lm/models"
FOLDER = ROOT / "tests/causal_lm/gguf"
MODELS = ("mixtral", "gpt_oss_mxfp4", "deepseek_v2", "deepseek_v3", "qwen3_5_moe")


def main():
    llama_cpp.use_source(Path(sys.argv[1]))
    FOLDER.mkdir(exist_ok=True)
    for model in MODELS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / model
            shutil.copytree(CHECKPOINTS / model, copy)
            config = json.loads((copy / "config.json").read_text())
            if model == "deepseek_v3":
                # DeepSeek's own config has it; transformers has no such field.
                config["scoring_func"] = "sigmoid"
                (copy / "config.json").write_text(json.dumps(config))
            vocabulary = config.get("text_config", config)["vocab_size"]
            llama_cpp.convert(copy, FOLDER / f"{model}.gguf", vocabulary)


if __name__ == "__main__":
    main()
