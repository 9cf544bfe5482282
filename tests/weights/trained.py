"""Makes trained.safetensors: 20 steps of a causal layer in PyTorch, by AdamW and by SGD, from torch.manual_seed(7)."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

E, HEADS, STEPS = 16, 4, 20


def wave(step, *shape):
    return (torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * step).sin().reshape(shape).float()


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, torch.nn.Linear(E, E, bias=False))

    def forward(self, xs):
        b, t, _ = xs.shape
        heads = lambda proj: proj(xs).view(b, t, HEADS, -1).transpose(1, 2)
        context = F.scaled_dot_product_attention(
            heads(self.q_proj), heads(self.k_proj), heads(self.v_proj), is_causal=True
        )
        return self.o_proj(context.transpose(1, 2).reshape(b, t, E))


def main():
    tensors = {}
    for name, make in {
        "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1.0),
    }.items():
        torch.manual_seed(7)
        layer, losses = Layer(), []
        optimizer = make(layer.parameters())
        xs, target = wave(0.61, 2, 9, E), wave(0.37, 2, 9, E)
        for _ in range(STEPS):
            loss = (layer(xs) - target).square().mean()
            losses.append(loss.detach())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        tensors[f"{name}.losses"] = torch.stack(losses)
        tensors |= {f"{name}.{key}": value.contiguous() for key, value in layer.state_dict().items()}
        print(name, losses[0].item(), losses[-1].item())
    save_file(tensors, Path(__file__).with_suffix(".safetensors"))


main()
