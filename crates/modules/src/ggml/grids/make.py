"""Writes the codebooks of GGUF's IQ types, as the package gguf (0.19.0, PyPI) has them.

A codebook of three values has 2 bits for each number, one of eight values 4 bits, the first number in the lowest bits.
Run with `python crates/modules/src/ggml/grids/make.py` from the root of the repository.
"""

from pathlib import Path

from gguf import quants

for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
    codebook = bytes.fromhex(getattr(quants, name).grid_hex.decode())
    Path(__file__).with_name(f"{name.lower()}.bin").write_bytes(codebook)
