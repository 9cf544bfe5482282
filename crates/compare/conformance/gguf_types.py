"""Records what the types of GGUF files stand for, by the package gguf and by llama.cpp's own functions.

python crates/compare/conformance/gguf_types.py    writes tests/hf/gguf_types.* and crates/modules/src/ggml/recorded.txt

`recorded.txt` has, for each type, a hash of the numbers of 256 blocks of pseudo-random bytes. `gguf_types.gguf` has a
tensor (2, 256) of each type with random blocks whose numbers are of ordinary sizes, and `gguf_types.safetensors` has
the numbers of the first row. Packages: gguf 0.19.0, numpy 2.4.6, safetensors 0.8.0 and xllamacpp 2026.10.11549, whose
library has llama.cpp's functions. The package gguf has none for Q8_K and Q1_0.
"""

import ctypes
from pathlib import Path

import gguf
import numpy as np
import xllamacpp
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = 256
CODES = [
    Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K,
    Type.Q8_K, Type.IQ2_XXS, Type.IQ2_XS, Type.IQ3_XXS, Type.IQ1_S, Type.IQ4_NL, Type.IQ3_S, Type.IQ2_S, Type.IQ4_XS,
    Type.IQ1_M, Type.TQ1_0, Type.TQ2_0, Type.MXFP4, Type.NVFP4, Type.Q1_0,
]  # fmt: skip
NUMBERS = {
    Type.F32: np.float32, Type.F16: np.float16, Type.I8: np.int8, Type.I16: np.int16, Type.I32: np.int32,
    Type.I64: np.int64, Type.F64: np.float64,
}  # fmt: skip
ALL = sorted([*CODES, *NUMBERS, Type.BF16])

LIBRARY = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))


def by_llama_cpp(blocks, kind):
    """Returns the numbers by llama.cpp's function, in f32."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    function = getattr(LIBRARY, f"dequantize_row_{kind.name.lower().replace('_k', '_K')}")
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    numbers = np.zeros(blocks.size // size * block, np.float32)
    function(blocks.ctypes.data, numbers.ctypes.data, numbers.size)
    return numbers


def numbers_of(blocks, kind):
    """Returns the numbers of blocks, in f32."""
    if kind in NUMBERS:
        return blocks.view(NUMBERS[kind]).astype(np.float32)
    if kind == Type.BF16:
        return dequantize(blocks, kind)
    theirs = by_llama_cpp(blocks, kind)
    if kind in (Type.Q8_K, Type.Q1_0):
        return theirs
    own = dequantize(blocks.reshape(1, -1), kind).ravel()
    assert np.array_equal(own, theirs, equal_nan=True), kind
    return own


def pseudo_random(count, state):
    """Returns bytes of a linear congruential generator."""
    out = bytearray(count)
    for at in range(count):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        out[at] = state >> 56
    return np.frombuffer(bytes(out), np.uint8)


def fnv(numbers):
    """Returns the hash FNV-1a of the bits of numbers, with one pattern for each NaN."""
    bits = np.where(np.isnan(numbers), np.uint32(0x7FC00000), numbers.view(np.uint32))
    state = 0xCBF29CE484222325
    for byte in bits.astype("<u4").tobytes():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return state


def ordinary(kind, rows, rng):
    """Returns the blocks of rows of 256 numbers of ordinary sizes."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in NUMBERS or kind == Type.BF16:
        numbers = rng.normal(size=(rows, 256)) * 20
        if kind == Type.BF16:
            bits = numbers.astype(np.float32).view(np.uint32) >> 16
            return bits.astype(np.uint16).view(np.uint8).reshape(rows, -1)
        return numbers.astype(NUMBERS[kind]).view(np.uint8).reshape(rows, -1)
    blocks = []
    while len(blocks) < rows * 256 // block:
        drawn = rng.integers(0, 256, size, np.uint8)
        sizes = np.abs(numbers_of(drawn, kind))
        if np.all(np.isfinite(sizes)) and 1e-3 < sizes.max() < 100:
            blocks.append(drawn)
    return np.concatenate(blocks).reshape(rows, -1)


def main():
    np.seterr(all="ignore")
    lines = [f"# gguf 0.19.0, llama.cpp of xllamacpp {xllamacpp.__version__}: number, name, hash"]
    for kind in ALL:
        _, size = gguf.GGML_QUANT_SIZES[kind]
        numbers = numbers_of(pseudo_random(BLOCKS * size, kind.value), kind)
        lines.append(f"{kind.value} {kind.name} {fnv(np.ascontiguousarray(numbers)):016x}")
    (ROOT / "crates/modules/src/ggml/recorded.txt").write_text("\n".join(lines) + "\n")
    rng = np.random.default_rng(57)
    writer = gguf.GGUFWriter(ROOT / "tests/hf/gguf_types.gguf", "llama")
    recorded = {}
    for kind in ALL:
        blocks = ordinary(kind, 2, rng)
        name = f"{kind.name}.weight"
        writer.add_tensor(name, blocks, raw_shape=blocks.shape, raw_dtype=kind)
        recorded[kind.name] = numbers_of(blocks[0].copy(), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(recorded, ROOT / "tests/hf/gguf_types.safetensors", {"gguf": "0.19.0"})


if __name__ == "__main__":
    main()
