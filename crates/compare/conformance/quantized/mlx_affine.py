"""Writes tests/weights/quantized/mlx_*: layers that MLX quantised in the mode `affine`, and a whole model of mlx-lm with
an embedding that is quantised too.

    pip install mlx[cpu] mlx-lm numpy safetensors
    python mlx_affine.py
"""

import mlx.core as mx
import mlx.nn as nn
import numpy
from mlx.utils import tree_flatten
from mlx_lm.models import llama

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


def write_whole(name, bits, group_size):
    """Quantises a whole model in f16, as `mlx_lm.convert` does, and records its logits in f32."""
    settings = {"group_size": group_size, "bits": bits}
    own = common.config(quantization=settings, quantization_config=settings)
    model = llama.Model(llama.ModelArgs.from_dict(own))
    model.load_weights([(key, mx.array(numbers)) for key, numbers in common.whole_model(bits).items()])
    model.set_dtype(mx.float16)
    nn.quantize(model, **settings)
    mx.save_safetensors(
        str(common.folder(name) / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    model.set_dtype(mx.float32)
    want = {}
    for module_name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(module, "scales"):
            whole = mx.dequantize(module.weight, module.scales, module.biases, **settings)
            want[f"{module_name}.weight"] = numpy.array(whole)
    common.write_config(name, own)
    common.write_want(name, want)
    common.write_logits(name, numpy.array(model(mx.array([common.IDS]))[0]))


mx.set_default_device(mx.cpu)
for bits, group_size, dtype in [(4, 32, mx.bfloat16), (8, 64, mx.float16), (3, 64, mx.float16), (6, 32, mx.bfloat16)]:
    write(f"mlx_{bits}_bits", bits, group_size, dtype)
write_whole("mlx_whole_4_bits", 4, 32)
