"""Linear attention in transformers, and gradients of its recurrence in PyTorch: writes numbers.safetensors beside itself.

    python tests/attention/delta/make.py          needs torch, transformers, safetensors
"""

import os
from pathlib import Path

os.environ["ATEN_CPU_CAPABILITY"] = "default"

import torch
from safetensors.torch import save_file
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

HERE = Path(__file__).resolve().parent
# More than a block of 64, and no multiple of it.
T, D_K, D_V = 70, 8, 6
# The functions of a model by name, the heads of queries and keys, the heads of values, and whether each channel decays.
MODELS = {
    "qwen3_next": (
        {"chunk": qwen.torch_chunk_gated_delta_rule, "recurrent": qwen.torch_recurrent_gated_delta_rule},
        2,
        4,
        False,
    ),
    "kimi_linear": (
        {"chunk": kimi.chunk_kimi_delta_attention, "recurrent": kimi.recurrent_kimi_delta_attention},
        2,
        2,
        True,
    ),
}
# The heads of queries, keys and values of calls that have gradients, and whether each channel decays.
GRADIENTS = {"groups_of_values": (2, 2, 4, False), "groups_of_queries": (4, 2, 2, False), "channels": (2, 2, 2, True)}


def draw(b, t, h_q, h_k, h_v, per_channel, dtype):
    """In transformers' order, (B, T, H, D); keys no longer than one."""
    h_s = max(h_k, h_v)
    width = [D_K] if per_channel else []
    return {
        "q": torch.randn(b, t, h_q, D_K, dtype=dtype),
        "k": torch.randn(b, t, h_k, D_K, dtype=dtype) / D_K,
        "v": torch.randn(b, t, h_v, D_V, dtype=dtype),
        "decay": -torch.rand(b, t, h_s, *width, dtype=dtype),
        "beta": torch.rand(b, t, h_s, dtype=dtype),
        "state": torch.randn(b, h_s, D_K, D_V, dtype=dtype),
    }


def recurrence(q, k, v, decay, beta, state):
    h_s = state.shape[1]
    h = max(h_s, q.shape[2])
    k, v = (x.repeat_interleave(h_s // x.shape[2], dim=2) for x in (k, v))
    q = q.repeat_interleave(h // q.shape[2], dim=2) / D_K**0.5
    if decay.dim() == 3:
        decay = decay.unsqueeze(-1)
    y = []
    for t in range(q.shape[1]):
        state = decay[:, t].exp().unsqueeze(-1) * state
        error = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t].unsqueeze(-1) * error)
        y.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state.repeat_interleave(h // h_s, dim=1)))
    return torch.stack(y, dim=1), state


def main():
    torch.manual_seed(0)
    numbers = {}
    for model, (functions, h_k, h_v, per_channel) in MODELS.items():
        inputs = draw(2, T, h_k, h_k, h_v, per_channel, torch.float32)
        numbers |= {f"{model}.{name}": tensor for name, tensor in inputs.items()}
        qkv, state = [inputs[name] for name in ("q", "k", "v")], inputs["state"]
        for function, run in functions.items():
            for norm in (False, True):
                y, last = run(
                    *qkv,
                    g=inputs["decay"],
                    beta=inputs["beta"],
                    initial_state=state.clone(),
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=norm,
                )
                case = f"{model}.{function}{'_norm' if norm else ''}"
                numbers |= {f"{case}.y": y, f"{case}.last": last}
    for name, (h_q, h_k, h_v, per_channel) in GRADIENTS.items():
        inputs = draw(1, 9, h_q, h_k, h_v, per_channel, torch.float64)
        for tensor in inputs.values():
            tensor.requires_grad_(True)
        y, last = recurrence(**inputs)
        of = {"y": torch.randn_like(y), "last": torch.randn_like(last)}
        torch.autograd.backward([y, last], list(of.values()))
        results = {"y": y, "last": last, **{f"{name}.to": tensor for name, tensor in of.items()}}
        results |= {f"{input}.gradient": tensor.grad for input, tensor in inputs.items()}
        numbers |= {f"{name}.{key}": tensor.detach().clone() for key, tensor in (inputs | results).items()}
    save_file({name: tensor.contiguous() for name, tensor in numbers.items()}, HERE / "numbers.safetensors")


if __name__ == "__main__":
    main()
