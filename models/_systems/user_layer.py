"""A user's own module to a safetensors file that the crate can load."""

import importlib
import os
import sys
from pathlib import Path

import torch
from torch import nn

from .record import safetensors_bytes

CANDLE_INTEGERS = {torch.uint8, torch.int16, torch.int32, torch.int64}


def export_layer(spec, target):
    """Writes the state dict of the module that `spec`, "module:callable", returns, and prints what it wrote."""
    module = build(spec)
    state, lines, owners = {}, [], {}
    for name, value in module.state_dict().items():
        if not isinstance(value, torch.Tensor) or value.is_meta:
            raise SystemExit(f"{spec}: {name} is {type(value).__name__} without data, not a tensor that can be written")
        tensor = convert(name, value.detach().cpu())
        remarks = [] if tensor.dtype == value.dtype else [f"was {str(value.dtype).removeprefix('torch.')}"]
        tied = owners.setdefault((value.data_ptr(), value.shape, value.stride()), name) if value.numel() else name
        if tied != name:
            remarks.append(f"tied to {tied}, written again")
        state[name] = tensor
        lines.append((name, str(tuple(tensor.shape)), str(tensor.dtype).removeprefix("torch."), ", ".join(remarks)))
    if not state:
        raise SystemExit(f"{spec}: the module has no parameters and no buffers")
    Path(target).write_bytes(safetensors_bytes(state))
    print_table(lines)
    left_out = sorted(name for name, _ in module.named_buffers(remove_duplicate=False) if name not in state)
    if left_out:
        print(f"left out, as the state dict does (persistent=False): {', '.join(left_out)}")
    print(
        f"{target}: {len(state)} tensors, {sum(t.numel() for t in state.values())} numbers, {os.path.getsize(target)} bytes"
    )


def build(spec):
    path, colon, attribute = spec.partition(":")
    if not colon or not path or not attribute:
        raise SystemExit(f"--layer takes module:callable, for example my_module:build; found {spec!r}")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(path), attribute)
    except ModuleNotFoundError as error:
        raise SystemExit(f"--layer {spec}: {error}") from error
    except AttributeError as error:
        raise SystemExit(f"--layer {spec}: module {path} has no {attribute!r}") from error
    module = function() if callable(function) and not isinstance(function, nn.Module) else function
    if not isinstance(module, nn.Module):
        raise SystemExit(f"--layer {spec}: expected an nn.Module, found {type(module).__name__}")
    return module


def convert(name, tensor):
    """f32 for floats, u8 for bools, other integers as they are where Candle has the type."""
    if tensor.dtype == torch.bool:
        return tensor.byte()
    if tensor.is_floating_point():
        return tensor.float()
    if tensor.dtype in CANDLE_INTEGERS:
        return tensor
    raise SystemExit(f"{name}: {tensor.dtype} has no counterpart in Candle")


def print_table(lines):
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)) + f"  {line[3]}".rstrip())
