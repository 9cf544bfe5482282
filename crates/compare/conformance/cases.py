"""Cases of a judge as two files: what is asked, and the tensors."""

import hashlib
import json

import numpy as np
import torch
from safetensors.torch import save


class Cases:
    def __init__(self, judge, version):
        self.judge = judge
        self.version = version
        self.list = []
        # By name, and the names by content: many cases have the same inputs.
        self.tensors = {}
        self.names = {}

    def add(self, group, name, attributes, inputs, outputs):
        """Inputs and outputs are arrays or tensors by name; those that are None are left out."""
        case = dict(group=group, name=name, attributes=attributes)
        self.list.append(case | dict(inputs=self.stored(inputs), outputs=self.stored(outputs)))

    def stored(self, values):
        return {name: self.store(value) for name, value in values.items() if value is not None}

    def store(self, value):
        tensor = tensor_of(value)
        content = tensor.flatten().view(torch.uint8).numpy().tobytes()
        key = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + content).digest()
        name = self.names.setdefault(key, str(len(self.names)))
        self.tensors[name] = tensor
        return name

    def write(self, folder):
        path = folder / f"{self.judge.lower()}.json"
        cases = ",\n".join(json.dumps(case) for case in self.list)
        path.write_text(f'{{"judge": "{self.judge}", "version": "{self.version}", "cases": [\n{cases}\n]}}\n')
        path.with_suffix(".safetensors").write_bytes(save(self.tensors))


def tensor_of(value):
    if not isinstance(value, torch.Tensor):
        array = np.ascontiguousarray(value)
        is_bf16 = array.dtype.name == "bfloat16"
        value = torch.from_numpy(array.view(np.int16) if is_bf16 else array)
        value = value.view(torch.bfloat16) if is_bf16 else value
    value = value.detach().contiguous()
    return value.to(torch.uint8) if value.dtype == torch.bool else value
