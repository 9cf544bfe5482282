"""Writes tests/weights/quantized/mlx_modes*: llamas that mlx-lm quantised in other modes than `affine`, and in several.

    pip install mlx[cpu]==0.32.4 mlx-lm==0.32.2 numpy safetensors
    python mlx_modes.py
"""

import mlx.core as mx
import mlx.nn as nn
import numpy
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import quantize_model, save_model

import common


def dequantised(module):
    """Returns what MLX makes of a weight in f32; scales of the mode affine in f32."""
    biases = getattr(module, "biases", None)
    scales = module.scales if biases is None else module.scales.astype(mx.float32)
    whole = mx.dequantize(
        module.weight,
        scales,
        None if biases is None else biases.astype(mx.float32),
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
        dtype=mx.float32,
    )
    return numpy.array(whole)


def write(name, seed, group_size, bits, mode, choose=None):
    """Quantises a model as `mlx_lm.convert` does. `choose` returns the settings of a module, or whether it has any."""
    own = common.config(intermediate_size=64)
    model = llama.Model(llama.ModelArgs.from_dict(own))
    parameters = common.whole_model(seed).items()
    model.load_weights([(key, mx.array(numbers).astype(mx.bfloat16)) for key, numbers in parameters])
    model, config = quantize_model(model, own, group_size, bits, mode=mode, quant_predicate=choose)
    save_model(common.folder(name), model)
    (common.folder(name) / "model.safetensors.index.json").unlink()
    common.write_config(name, config)
    want = {}
    for module_name, module in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if hasattr(module, "scales"):
            want[f"{module_name}.weight"] = dequantised(module)
        elif isinstance(module, nn.Linear):
            want[f"{module_name}.weight"] = numpy.array(module.weight.astype(mx.float32))
    common.write_want(name, want)


def mixed(path, module):
    """Gives each projection other settings, and leaves one as it is."""
    if path.endswith("q_proj"):
        return {"group_size": 64, "bits": 8}
    if path.endswith("k_proj"):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    if path.endswith("v_proj"):
        return {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    return not path.endswith("o_proj")


mx.set_default_device(mx.cpu)
write("mlx_mxfp4", 1, 32, 4, "mxfp4")
write("mlx_mxfp8", 2, 32, 8, "mxfp8")
write("mlx_nvfp4", 3, 16, 4, "nvfp4")
write("mlx_mixed", 4, 32, 5, "affine", mixed)
