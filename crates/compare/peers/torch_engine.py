"""PyTorch: scaled_dot_product_attention, a layer of a packed projection around it, and a projection alone."""

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
    """One cell made ready: `run()` attends once, over the next copy of k and v; `result()` is the first copy's."""

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

    def result(self):
        self.next = 0
        return self.run().float().numpy()


class LayerCall:
    """A causal layer made ready: (B, T, E) to (B, T, E)."""

    def __init__(self, cell, inputs):
        self.split = (cell.b, cell.t_q, 3, cell.h, cell.d)
        self.x, self.w_in, self.w_out = _tensor(inputs.x), _tensor(inputs.w_in), _tensor(inputs.w_out)

    @torch.inference_mode()
    def run(self):
        q, k, v = F.linear(self.x, self.w_in).view(self.split).permute(2, 0, 3, 1, 4)
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(context.transpose(1, 2).reshape(self.x.shape), self.w_out)

    def result(self):
        return self.run().float().numpy()


class LinearCall:
    """A projection made ready: (rows, inputs) to (rows, outputs), over the next copy of the weight."""

    def __init__(self, cell, inputs):
        self.x = _tensor(inputs.x)
        self.weights = [_tensor(weight) for weight in inputs.weights]
        self.next = 0

    @torch.inference_mode()
    def run(self):
        weight = self.weights[self.next]
        self.next = (self.next + 1) % len(self.weights)
        return F.linear(self.x, weight)

    def result(self):
        self.next = 0
        return self.run().float().numpy()
