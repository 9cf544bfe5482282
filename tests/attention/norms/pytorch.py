"""PyTorch's norms and their gradients: writes pytorch.safetensors beside this script.

    python tests/attention/norms/pytorch.py

Made with PyTorch 2.15. `WIDTH.NAME` are the inputs of a width: `xs` and `factors` (2, 3, WIDTH), `weight` and `bias`
(WIDTH,), multiples of 1/64, which every dtype holds. `KIND.WIDTH.DTYPE` are the outputs and the gradients of xs, of the
weight and, where there is one, of the bias, flat and one after the other; the loss is the sum of `factors · outputs`.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

EPS = 1e-5
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def draw(*shape):
    return (torch.randn(shape) * 64).round().clamp(-128, 128) / 64


def main():
    torch.manual_seed(17)
    tensors = {}
    for width in [1, 7, 40]:
        xs = draw(2, 3, width)
        xs[0, 1] = 0
        # A row far from zero.
        xs[1, 2] = xs[1, 2].round() + 100
        own = {"xs": xs, "factors": draw(2, 3, width), "weight": draw(width), "bias": draw(width)}
        tensors |= {f"{width}.{name}": tensor for name, tensor in own.items()}
        for name, dtype in DTYPES.items():
            given = {key: tensor.to(dtype) for key, tensor in own.items()}
            for kind in ["rms", "layer", "layer_no_bias"]:
                names = ["xs", "weight", "bias"] if kind == "layer" else ["xs", "weight"]
                leaves = [given[key].clone().requires_grad_() for key in names]
                norm = F.rms_norm if kind == "rms" else F.layer_norm
                ys = norm(leaves[0], [width], *leaves[1:], eps=EPS)
                gradients = torch.autograd.grad((ys * given["factors"]).sum(), leaves)
                tensors[f"{kind}.{width}.{name}"] = torch.cat([x.detach().flatten() for x in [ys, *gradients]])
    save_file(tensors, Path(__file__).with_suffix(".safetensors"))


main()
