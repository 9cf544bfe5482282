"""PyTorch's side of `cargo bench --bench train`, which starts it: a request a line on stdin, an answer a line on stdout.

A request is a JSON object: a cell, and the folder that holds its inputs as f32. It is computed once and its results are
written beside them; each line `run` after it computes it once more.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from answers import serve  # noqa: E402, beside this folder

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Cell:
    """Attention or a layer made ready, forward and backward: `run()` gives the output and a gradient of each input."""

    def __init__(self, request):
        self.cell, self.folder = request["cell"], Path(request["folder"])
        self.leaves = [self.read(name).requires_grad_() for name in request["inputs"]]
        self.upstream = self.read("upstream")
        cell = self.cell
        self.options = {"enable_gqa": cell["h"] != cell["h_kv"], "dropout_p": cell["dropout"]}
        if "window" in cell:
            own, key = torch.arange(cell["t_q"])[:, None], torch.arange(cell["t_kv"])
            hidden = (key > own) | (key <= own - cell["window"])
            self.options["attn_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).to(self.dtype())
        else:
            self.options["is_causal"] = True

    def dtype(self):
        return DTYPES[self.cell["dtype"]]

    def read(self, name):
        shape = json.loads((self.folder / f"{name}.json").read_text())
        numbers = np.fromfile(self.folder / f"{name}.f32", dtype=np.float32)
        return torch.from_numpy(numbers).reshape(shape).to(self.dtype())

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)

    def layer(self, xs, q_proj, k_proj, v_proj, o_proj):
        b, t, e = xs.shape
        heads = lambda proj: F.linear(xs, proj).view(b, t, -1, self.cell["d"]).transpose(1, 2)
        context = self.attend(heads(q_proj), heads(k_proj), heads(v_proj))
        return F.linear(context.transpose(1, 2).reshape(b, t, -1), o_proj)

    def run(self):
        ys = (self.layer if self.cell["part"] == "layer" else self.attend)(*self.leaves)
        return [ys, *torch.autograd.grad(ys, self.leaves, self.upstream)]

    def write(self):
        for number, tensor in enumerate(self.run()):
            tensor.detach().float().contiguous().numpy().tofile(self.folder / f"result{number}.f32")


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    serve(f"PyTorch {torch.__version__}", Cell)
