"""Writes tests/weights/quantized/gptq_*: models that GPTQModel quantised with GPTQ.

    pip install GPTQModel==7.7.0 transformers tokenizers numpy safetensors
    GPTQMODEL_CPU_WORKERS=3 python gptq.py

The dequantised weights are those of the library's `TorchLinear`, with its scales in f32.
"""

import json
import shutil
import tempfile

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from safetensors.torch import load_file

import common
import llamas


def dequantized(folder):
    """Returns the weights of the linear layers of a saved model as GPTQModel reads them."""
    model = GPTQModel.load(folder, device="cpu", backend=BACKEND.GPTQ_TORCH).model
    # The library converts scales to the dtype of the model.
    stored = load_file(f"{folder}/model.safetensors")
    want = {}
    for name, module in model.named_modules():
        if isinstance(module, TorchLinear):
            module.scales = stored[f"{name}.scales"].float()
            want[f"{name}.weight"] = module.dequantize_weight().T.numpy()
        elif isinstance(module, torch.nn.Linear) and name != "lm_head":
            want[f"{name}.weight"] = module.weight.detach().float().numpy()
    return want


def write(name, seed, attention_bias=False, **options):
    with (
        llamas.saved(seed, attention_bias=attention_bias, intermediate_size=64) as plain,
        tempfile.TemporaryDirectory() as saved,
    ):
        llamas.save_tokenizer(plain)
        model = GPTQModel.load(plain, QuantizeConfig(act_group_aware=False, **options))
        model.quantize([{"input_ids": text, "attention_mask": [1] * len(text)} for text in llamas.texts(seed)], batch_size=1)
        model.save(saved)
        own = json.loads(open(f"{saved}/config.json").read())
        # Without the settings of the run, which have a path of this machine.
        settings = own["quantization_config"]
        settings["meta"] = {"quantizer": settings["meta"]["quantizer"]}
        common.write_config(name, own)
        shutil.copy(f"{saved}/model.safetensors", common.folder(name))
        common.write_want(name, dequantized(saved))


write("gptq_4_bits_desc_act", 1, bits=4, group_size=32, desc_act=True, sym=False, attention_bias=True)
write("gptq_8_bits_rows", 2, bits=8, group_size=-1, desc_act=False, sym=True)
write("gptq_3_bits", 3, bits=3, group_size=32, desc_act=False, sym=False)
write("gptq_2_bits_v2", 4, bits=2, group_size=32, desc_act=False, sym=False, format="gptq_v2")
write("gptq_5_bits_planes", 5, bits=5, group_size=64, desc_act=False, sym=False)
dynamic = {r"+:.*\.v_proj": {"bits": 8, "group_size": 16}, r"-:.*\.o_proj": {}}
write("gptq_dynamic", 6, bits=4, group_size=32, desc_act=False, sym=True, dynamic=dynamic)
