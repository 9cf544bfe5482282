"""Single heads with an output projection, as in the tutorial "Let's build GPT" (Karpathy), and heads without one."""

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from layers import Recorded, draw


class Head(nn.Module):
    def __init__(self, width, head_dim, block_size):
        super().__init__()
        self.key = nn.Linear(width, head_dim, bias=False)
        self.query = nn.Linear(width, head_dim, bias=False)
        self.value = nn.Linear(width, head_dim, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, xs):
        t = xs.shape[1]
        scores = self.query(xs) @ self.key(xs).transpose(-2, -1) * self.key.out_features**-0.5
        scores = scores.masked_fill(self.tril[:t, :t] == 0, float("-inf"))
        return F.softmax(scores, dim=-1) @ self.value(xs)


class Heads(nn.Module):
    def __init__(self, width, num_heads, block_size, has_projection=True):
        super().__init__()
        self.heads = nn.ModuleList([Head(width, width // num_heads, block_size) for _ in range(num_heads)])
        self.proj = nn.Linear(width, width) if has_projection else nn.Identity()

    def forward(self, xs):
        return self.proj(torch.cat([head(xs) for head in self.heads], dim=-1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.sa = Heads(16, 4, 8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block())
        self.sa_heads = Heads(16, 2, 8, has_projection=False)


def record():
    recorded = Recorded("tutorial", torch.__version__.split("+")[0])
    torch.manual_seed(1337)
    model = Model()
    xs = torch.from_numpy(draw(8, 2, 6, 16))
    config = dict(embed_dim=16, num_heads=4, head_dim=4, out_dim=16, causal=True, context_length=8)
    with torch.no_grad():
        ys = model.blocks[0].sa(xs)
        recorded.add("blocks.0.sa", "stacked:mingpt", config | dict(out_bias=True), ys, queries=xs)
        config |= dict(num_heads=2, head_dim=8, out_proj=False)
        recorded.add("sa_heads", "stacked:mingpt", config, model.sa_heads(xs), queries=xs)
    save_file(model.state_dict(), recorded.file)
    return recorded
