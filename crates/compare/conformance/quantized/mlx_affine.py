"""Writes tests/weights/quantized/mlx_*: layers that MLX quantised in the mode `affine`.

    pip install mlx[cpu] numpy safetensors
    python mlx_affine.py
"""

import mlx.core as mx
import numpy

import common


def write(name, bits, group_size, dtype):
    tensors = {}
    want = {}
    for module, numbers in common.weights(bits * 100 + group_size).items():
        codes, scales, biases = mx.quantize(mx.array(numbers).astype(dtype), group_size=group_size, bits=bits)
        tensors |= {f"{module}.weight": codes, f"{module}.scales": scales, f"{module}.biases": biases}
        wide = [array.astype(mx.float32) for array in (scales, biases)]
        whole = mx.dequantize(codes, *wide, group_size=group_size, bits=bits)
        want[f"{module}.weight"] = numpy.array(whole.astype(mx.float32))
    mx.save_safetensors(str(common.folder(name) / "model.safetensors"), tensors, {"format": "mlx"})
    settings = {"group_size": group_size, "bits": bits}
    common.write_config(name, common.config(quantization=settings, quantization_config=settings))
    common.write_want(name, want)


mx.set_default_device(mx.cpu)
for bits, group_size, dtype in [(4, 32, mx.bfloat16), (8, 64, mx.float16), (3, 64, mx.float16), (6, 32, mx.bfloat16)]:
    write(f"mlx_{bits}_bits", bits, group_size, dtype)
