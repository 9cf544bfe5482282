"""Writes a tiny random Llama of two layers as one GGUF file and as a file in parts, by the writer of the package gguf.

python crates/compare/conformance/gguf_parts.py    writes tests/hf/gguf_parts/*.gguf

Packages: gguf 0.19.0 and numpy 2.4.6. A part has four tensors, those of one layer.
"""

from pathlib import Path

import gguf
import numpy as np

FOLDER = Path(__file__).resolve().parents[3] / "tests/hf/gguf_parts"


def write(path, **options):
    writer = gguf.GGUFWriter(path, "llama", **options)
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    rng = np.random.default_rng(57)
    for layer in range(2):
        for part, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
            numbers = rng.normal(size=(rows, 32)).astype(np.float32) * 0.3
            kind = gguf.GGMLQuantizationType.Q8_0 if part == "attn_v" else gguf.GGMLQuantizationType.F16
            data = gguf.quantize(numbers, kind)
            writer.add_tensor(f"blk.{layer}.{part}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    FOLDER.mkdir(exist_ok=True)
    write(FOLDER / "whole.gguf")
    write(FOLDER / "model.gguf", split_max_tensors=4)


if __name__ == "__main__":
    main()
