"""PyTorch: scaled_dot_product_attention."""

import numpy as np
import torch
import torch.nn.functional as F

NAME = "PyTorch"
VERSION = torch.__version__
_DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def start(threads):
    """Settles the number of threads, once a process."""
    torch.set_num_threads(threads)


def _tensor(array):
    if array.dtype.itemsize == 2 and array.dtype != np.float16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class Call:
    """One cell made ready: `run()` attends once, over the next copy of k and v; `context()` is the first copy's result."""

    def __init__(self, cell, inputs):
        self.q = _tensor(inputs.q)
        self.kv = [(_tensor(k), _tensor(v)) for k, v in inputs.kv]
        self.next = 0
        self.options = {"enable_gqa": cell.h != cell.h_kv}
        if cell.square_causal:
            self.options["is_causal"] = True
        elif not cell.unmasked:
            self.options["attn_mask"] = _tensor(cell.additive())

    @torch.inference_mode()
    def run(self):
        k, v = self.kv[self.next]
        self.next = (self.next + 1) % len(self.kv)
        return F.scaled_dot_product_attention(self.q, k, v, **self.options)

    def context(self):
        self.next = 0
        return self.run().float().numpy()
