"""Makes the .pth files of this folder, and their tensors once more in plain.safetensors.

python tests/data/make.py

Each file is a way of saving that a reader can get wrong; the tests compare it with plain.safetensors, where the same
tensors lie contiguous, one after the other, under `<file>.<name>`.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

HERE = Path(__file__).resolve().parent


def numbers(*shape, start=0):
    """Distinct multiples of 1/64, which every float holds."""
    count = torch.Size(shape).numel()
    return ((torch.arange(start, start + count) % 97 - 48) / 64).reshape(shape)


def views():
    """A layer of the book, its tensors views into two storages: with offsets, transposed, with gaps."""
    wide = numbers(12, 6)
    flat = numbers(200, start=31)
    return {
        "W_query.weight": wide[4:8, :4],  # an offset and a gap behind each row
        "W_query.bias": flat[7:11],
        "W_key.weight": flat[20:36].reshape(4, 4).t(),  # column-major from an offset on
        "W_key.bias": flat[40:48:2],  # every second
        "W_value.weight": wide[::3, 1:5],  # gaps between and behind the rows
        "W_value.bias": flat[199:].expand(4),  # one element four times
        "out_proj.weight": torch.nn.Parameter(flat[100:116].reshape(4, 4)),
        "out_proj.bias": flat[150:190].reshape(4, 10)[:, 9],  # a column
        "mask": torch.triu(torch.ones(6, 6), diagonal=1).bool(),
    }


def kinds():
    """Every dtype that both sides have, in shapes from none to three dimensions."""
    base = numbers(2, 3, 4)
    kinds = {
        "f64": base.double().permute(2, 0, 1),
        "f32": base[1],
        "f16": base.half()[:, 1:],
        "bf16": base.bfloat16().transpose(0, 2),
        "i64": (base * 64).long()[0].t(),
        "i32": (base * 64).int()[:, :, ::2],
        "i16": (base * 64).short()[1, 1:],
        "u8": (base * 64).abs().byte(),
        "bool": base > 0,
        "scalar": base[1, 2, 3],
        "empty": base[:0],
        "one_row": base[1:, 2:, :],
    }
    return kinds


def nested():
    """What a training loop saves."""
    weights = {f"blocks.0.att.{name}": tensor.clone() for name, tensor in views().items() if "mask" not in name}
    return {
        "epoch": 3,
        "loss": 0.25,
        "model_state_dict": weights,
        "optimizer_state_dict": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
    }


def nanogpt():
    """What nanoGPT's train.py saves, of one layer."""
    layer = {"c_attn.weight": numbers(24, 8), "c_proj.weight": numbers(8, 8, start=50)}
    return {
        "model": {f"_orig_mod.transformer.h.0.attn.{name}": tensor for name, tensor in layer.items()},
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": dict(n_layer=1, n_head=2, n_embd=8, block_size=16, bias=False, vocab_size=None, dropout=0.0),
        "iter_num": 5,
        "best_val_loss": torch.tensor(1.5),
        "config": {"n_head": 2, "device": "cpu"},
    }


def odd():
    """A layer beside tensors that Candle has no dtype or no layout for."""
    return {
        "q_proj.weight": numbers(4, 4),
        "q_proj.bias": torch.ones(4, dtype=torch.int8),
        "k_proj.weight": torch.eye(4).to_sparse(),
        "v_proj.weight": torch.ones(4, 4, dtype=torch.uint16),
        "o_proj.weight": torch.ones(1, 4).expand(4, 4),
    }


def flattened(tensors, prefix):
    for name, value in tensors.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}.{name}")
        elif isinstance(value, torch.Tensor):
            yield f"{prefix}.{name}", value


def main():
    plain = {}
    for name, tensors in [("views", views()), ("kinds", kinds()), ("nested", nested())]:
        torch.save(tensors, HERE / f"{name}.pth")
        for full_name, tensor in flattened(tensors, name):
            tensor = tensor.byte() if tensor.dtype == torch.bool else tensor
            plain[full_name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    save_file(plain, HERE / "plain.safetensors")
    (HERE / "plain.safetensors").chmod(0o644)
    torch.save(nanogpt(), HERE / "nanogpt.pth")
    torch.save(odd(), HERE / "odd.pth")
    module = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(module.weight)
    torch.save(module, HERE / "module.pth")
    torch.save(numbers(2, 2), HERE / "tensor.pth")
    torch.save({"q_proj.weight": numbers(2, 2)}, HERE / "protocol_4.pth", pickle_protocol=4)


if __name__ == "__main__":
    main()
