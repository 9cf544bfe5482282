"""A system of `models/` and its record: config.json, model.safetensors, io.safetensors, checked before they are kept."""

import copy
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from safetensors.torch import save
from torch import nn

LOOPS_TOLERANCE = 1e-12  # f64 PyTorch against the plain loops
F32_TOLERANCE = 2e-6  # f32 PyTorch against f64
HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class Record:
    """What one system leaves: the files of its folder, the tensors of its cases, its config."""

    config: dict
    io: dict = field(default_factory=dict)
    files: dict = field(default_factory=dict)


@dataclass
class Layer:
    """A module with cases. `loops(state, inputs)` returns the same (output, weights) in plain loops."""

    name: str
    summary: str
    source: str
    conventions: tuple
    class_name: str
    args: dict
    make: Callable
    layer: dict | None
    loops: Callable
    cases: dict
    seed: int | None = None
    call: Callable = lambda module, inputs: module(**inputs)
    draws: list | None = None
    extra_config: dict = field(default_factory=dict)
    extra_files: Callable = lambda module, config: {}
    store_weights: bool = True

    def record(self):
        module = self.build()
        state = module.state_dict()
        config = {
            "system": self.name,
            "class": self.class_name,
            "args": self.args,
            "manual_seed": self.seed,
            "mode": "eval",
        }
        if state:
            # Weights that no rule of PyTorch's drew have no draw order.
            config["draw_order"] = self.draws or (draw_order(module) if self.seed is not None else None)
            config["parameters"] = {
                name: {"shape": list(t.shape), "sha256_f32_le": sha256(t)} for name, t in state.items()
            }
        if self.layer:
            config |= layer_config(self.layer)
        config.update(self.extra_config)
        config["notes"] = list(self.conventions)
        config["cases"] = {}
        record = Record(config)
        for case, inputs in self.cases.items():
            tensors, config["cases"][case] = self.run(module, case, inputs)
            record.io.update({f"{case}.{name}": tensor for name, tensor in tensors.items()})
        if state and self.store_weights:
            record.files["model.safetensors"] = safetensors_bytes(state)
        record.files["io.safetensors"] = safetensors_bytes(record.io)
        record.files.update(self.extra_files(module, config))
        return record

    def build(self):
        if self.seed is not None:
            torch.manual_seed(self.seed)
        return self.make().eval()

    def run(self, module, case, inputs):
        output, weights = self.forward(module, inputs, torch.float32)
        exact, exact_weights = self.forward(module, inputs, torch.float64)
        tensors = {name: t for name, t in inputs.items() if t is not None}
        tensors |= {"output": output, "expected_f64": exact}
        entry = {"inputs": {name: None if t is None else list(t.shape) for name, t in inputs.items()}}
        entry["output"] = list(output.shape)
        if weights is not None:
            tensors |= {"attn_weights": weights, "attn_weights_f64": exact_weights}
            entry["attn_weights"] = list(weights.shape)
        for suffix, dtype in HALVES.items():
            tensors[f"output_{suffix}"] = self.forward(module, inputs, dtype)[0]
        entry["f32_vs_f64_max_abs"] = gap(f"{self.name}.{case} f32", output.double(), exact, F32_TOLERANCE)
        entry["f64_vs_plain_loops_max_abs"] = self.check(module, case, inputs, exact, exact_weights)
        return tensors, entry

    def check(self, module, case, inputs, exact, exact_weights):
        """Compares the f64 result with plain loops; a gap over 1e-12 stops the export."""
        state = {name: t.double().tolist() for name, t in module.state_dict().items()}
        numbers = {
            name: t if t is None else (t.double() if t.is_floating_point() else t).tolist()
            for name, t in inputs.items()
        }
        output, weights = self.loops(state, numbers)
        worst = compare_loops(f"{self.name}.{case} output", exact, output)
        return (
            worst
            if weights is None
            else max(worst, compare_loops(f"{self.name}.{case} weights", exact_weights, weights))
        )

    def forward(self, module, inputs, dtype):
        """The module and its inputs in `dtype`, on the CPU, through its explicit matmul and softmax."""
        converted = copy.deepcopy(module).to(dtype)
        cast = {name: t.to(dtype) if t is not None and t.is_floating_point() else t for name, t in inputs.items()}
        with torch.no_grad():
            result = self.call(converted, cast)
        output, weights = result if isinstance(result, tuple) else (result, None)
        if not torch.isfinite(output).all():
            raise SystemExit(f"{self.name}: an output in {dtype} is not finite")
        return output, weights


@dataclass
class Piece:
    """A system without parameters. `compute()` returns {tensor name: tensor}, checked inside."""

    name: str
    summary: str
    source: str
    conventions: tuple
    compute: Callable
    inputs: tuple = ()
    extra_config: dict = field(default_factory=dict)
    cases: dict | list | None = None
    extra_files: Callable = lambda: {}
    layer = None

    def record(self):
        io = self.compute()
        config = {"system": self.name, **self.extra_config, "notes": list(self.conventions)}
        config["cases"] = self.cases if isinstance(self.cases, list) else self.shapes(io)
        files = {"io.safetensors": safetensors_bytes(io)} if io else {}
        return Record(config, io, files | self.extra_files())

    def shapes(self, io):
        cases = {}
        for full_name, tensor in io.items():
            case, _, name = full_name.rpartition(".")
            if not case:
                continue
            entry = cases.setdefault(case, dict((self.cases or {}).get(case, {}), inputs=dict.fromkeys(self.inputs)))
            (entry["inputs"] if name in self.inputs else entry)[name] = list(tensor.shape)
        return {
            case: {name: shape for name, shape in entry.items() if not name.endswith("_f64")}
            for case, entry in cases.items()
        }


def draw_order(module, prefix=""):
    """The order in which a module's parts drew their numbers: its own parameters, its children, then its mask."""
    order = [["rand", prefix + name, *p.shape] for name, p in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        path = prefix + name
        if isinstance(child, nn.Linear):
            order.append(["linear", path, child.in_features, child.out_features, child.bias is not None])
        elif isinstance(child, nn.Embedding):
            order.append(["embedding", path, child.num_embeddings, child.embedding_dim])
        else:
            order += draw_order(child, path + ".")
    return order + [["causal_mask", prefix + name, b.shape[0]] for name, b in module.named_buffers(recurse=False)]


def flatten(nested):
    if isinstance(nested, (list, tuple)):
        return [number for part in nested for number in flatten(part)]
    return [nested]


def compare_loops(what, exact, nested):
    return gap(
        f"{what} against plain loops",
        exact,
        torch.tensor(flatten(nested), dtype=torch.float64).reshape(exact.shape),
        LOOPS_TOLERANCE,
    )


def gap(what, got, expected, tolerance):
    """The largest absolute difference, to two digits; more than `tolerance` (or NaN) stops the export."""
    worst = (got - expected).abs().max().item()
    if not worst <= tolerance:
        raise SystemExit(f"{what}: differs by {worst:.3e}, more than {tolerance:.0e}; nothing was written")
    return float(f"{worst:.2g}")


def sha256(tensor):
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().astype("<f4").tobytes()).hexdigest()


def safetensors_bytes(tensors):
    """The tensors as a safetensors file; masks become u8, for Candle has no bool."""
    plain = {
        name: (t.byte() if t.dtype == torch.bool else t.detach()).contiguous().clone() for name, t in tensors.items()
    }
    return save(plain, metadata={"format": "pt"})


def json_bytes(value):
    return (pretty(value) + "\n").encode()


def pretty(value, indent=""):
    """JSON with short values and lists of numbers on one line, and everything else broken at its entries."""
    line, inner = json.dumps(value, ensure_ascii=False), indent + "  "
    numbers = isinstance(value, list) and all(isinstance(v, (int, float)) for v in value)
    if numbers or not isinstance(value, (dict, list)) or (indent and len(line) <= 120):
        return line
    if isinstance(value, dict):
        entries = [f"{inner}{json.dumps(k)}: {pretty(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + pretty(v, inner) for v in value) + f"\n{indent}]"


def layer_config(facts):
    """The keys `layout` and `layer` of config.json; `layer` is the crate's own config as serde reads it, without its defaults."""
    if facts["layout"] == "additive":
        names = {"query_size": "embed_dim", "key_size": "kdim", "hidden_size": "head_dim", "dropout": "dropout"}
    elif facts["layout"] == "embedding":
        names = {"vocab_size": "vocab_size", "embed_dim": "embed_dim"}
    else:
        return {"layout": facts["layout"], "layer": multi_head_config(facts)}
    return {"layout": facts["layout"], "layer": {name: facts[fact] for name, fact in names.items()}}


def multi_head_config(facts):
    layer = {"embed_dim": facts["embed_dim"], "num_heads": facts["num_heads"]}
    defaults = {
        "num_kv_heads": facts["num_heads"],
        "out_dim": facts["embed_dim"],
        "head_dim": facts["out_dim"] // facts["num_heads"],
        "kdim": facts["embed_dim"],
        "vdim": facts["kdim"],
        "causal": False,
        "context_length": None,
        "bias_kv": False,
        "add_zero_attn": False,
        "dropout": 0.0,
    }
    layer |= {name: facts[name] for name, default in defaults.items() if facts.get(name, default) != default}
    if facts["qkv_bias"]:
        layer |= {"q_bias": True, "k_bias": True, "v_bias": True}
    if not facts["out_proj"]:
        layer["out_proj"] = False
    if facts["out_bias"]:
        layer["out_bias"] = True
    return layer


def layer_of(layout, embed_dim, num_heads, head_dim, **other):
    """What has to be known to load a layer, every key always present."""
    layer = {
        "layout": layout,
        "embed_dim": embed_dim,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "out_dim": num_heads * head_dim,
        "kdim": embed_dim,
        "vdim": embed_dim,
        "qkv_bias": False,
        "out_proj": False,
        "out_bias": False,
        "causal": False,
        "context_length": None,
        "dropout": 0.0,
    }
    return layer | other
