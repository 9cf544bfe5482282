"""Runs other engines for `cargo bench --bench delta`, which starts a process for each engine: one request per line on
stdin, one answer per line on stdout.

A request is a JSON object: the engine, whether to compute gradients, and the folder with the inputs as f32. The script
computes it once and writes the results to the same folder. Each line `run` after it computes the request again.
"""

import ctypes
import json
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
from answers import serve  # noqa: E402, beside this folder

THREADS = int(sys.argv[1])


class Call:
    """Inputs in the order of Candle's functions, (B, H, T, D), and an engine: `run()` returns the results as arrays."""

    def __init__(self, request):
        self.folder, self.trains = Path(request["folder"]), request["cell"]["trains"]
        self.inputs = {name: self.read(name) for name in request["inputs"]}
        if self.trains:
            self.upstream = self.read("upstream")
        self.sizes = request["cell"].get("sizes")
        engines = {"torch": torch_engine, "onnxruntime": onnxruntime_engine, "llama.cpp": llama_engine}
        self.run = (engines | {"layer": torch_layer})[request["cell"]["engine"]](self)

    def read(self, name):
        shape = json.loads((self.folder / f"{name}.json").read_text())
        return np.fromfile(self.folder / f"{name}.f32", dtype=np.float32).reshape(shape)

    def by_token(self, name):
        """Returns an input as (B, T, H, ..), contiguous."""
        return np.ascontiguousarray(np.swapaxes(self.inputs[name], 1, 2))

    def write(self):
        for number, result in enumerate(self.run()):
            np.ascontiguousarray(result, dtype=np.float32).tofile(self.folder / f"result{number}.f32")


def torch_engine(call):
    """Prepares transformers' functions over chunks of 64 tokens, as its models call them for more than one token."""
    import torch

    torch.set_num_threads(THREADS)
    if call.inputs["decay"].ndim == 4:
        from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention as function
    else:
        from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as function
    names = ["q", "k", "v", "decay", "beta"]
    inputs = {name: torch.from_numpy(call.by_token(name)).requires_grad_(call.trains) for name in names}
    state = torch.from_numpy(call.inputs["state"])

    def run():
        q, k, v, decay, beta = (inputs[name] for name in names)
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        y, _ = function(q, k, v, g=decay, beta=beta, **options)
        y = y.transpose(1, 2)
        if not call.trains:
            return [y.numpy()]
        gradients = torch.autograd.grad(y, [q, k, v, decay, beta], torch.from_numpy(call.upstream))
        return [y.detach().numpy()] + [gradient.transpose(1, 2).numpy() for gradient in gradients]

    if call.trains:
        return run

    def without_graph():
        with torch.no_grad():
            return run()

    return without_graph


def torch_layer(call):
    """Prepares transformers' layer of Qwen3-Next, with random weights: its results differ from this crate's layer."""
    import torch
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    torch.set_num_threads(THREADS)
    embed_dim, key_heads, heads, width = call.sizes
    widths = {"linear_key_head_dim": width, "linear_value_head_dim": width}
    counts = {"linear_num_key_heads": key_heads, "linear_num_value_heads": heads}
    layer = Qwen3NextGatedDeltaNet(Qwen3NextConfig(hidden_size=embed_dim, **widths, **counts), layer_idx=0)
    xs = torch.from_numpy(call.inputs["xs"]).requires_grad_()
    leaves = [xs, *layer.parameters()]

    def run():
        torch.autograd.grad(layer(xs), leaves, torch.from_numpy(call.upstream))
        return []

    return run


def normed(rows):
    """Returns queries and keys for engines that do not norm them."""
    return rows / np.sqrt((rows * rows).sum(-1, keepdims=True) + 1e-6)


def packed(rows):
    """Returns (B, T, H·D)."""
    return rows.reshape(*rows.shape[:2], -1)


def onnxruntime_engine(call):
    """Prepares the operator `LinearAttention`, which takes the same number of heads of keys and of values."""
    import onnxruntime
    from onnx import TensorProto, helper

    if call.trains:
        raise ValueError("the operator has no gradients")
    inputs = {name: call.by_token(name) for name in ["q", "k", "v", "decay", "beta"]}
    heads = inputs["v"].shape[2]
    for name in ["q", "k"]:
        inputs[name] = np.repeat(normed(inputs[name]), heads // inputs[name].shape[2], axis=2)
    inputs = {name: packed(rows) for name, rows in inputs.items()}
    inputs["state"] = call.inputs["state"]
    order = ["q", "k", "v", "state", "decay", "beta"]
    attributes = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"}
    node = helper.make_node("LinearAttention", order, ["y", "after"], domain="com.microsoft", **attributes)
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    results = [value("y", inputs["v"].shape), value("after", inputs["state"].shape)]
    graph = helper.make_graph([node], "rule", [value(name, inputs[name].shape) for name in order], results)
    domains = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=domains, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
    shape = call.by_token("v").shape

    def run():
        return [np.swapaxes(session.run(["y"], inputs)[0].reshape(shape), 1, 2)]

    return run


class Parameters(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def llama_engine(call):
    """Prepares `ggml_gated_delta_net` of the library in the package xllamacpp."""
    import xllamacpp

    if call.trains:
        raise ValueError("the operator has no gradients")
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    pointer = ctypes.c_void_p
    for name in ["ggml_init", "ggml_new_tensor_4d", "ggml_gated_delta_net", "ggml_new_graph", "ggml_get_data"]:
        getattr(library, name).restype = pointer
    context = pointer(library.ggml_init(Parameters(8 << 30, None, False)))
    inputs = {name: call.by_token(name) for name in ["q", "k", "v", "decay", "beta"]}
    inputs["q"], inputs["k"] = normed(inputs["q"]), normed(inputs["k"])
    for name in ["decay", "beta"]:
        inputs[name] = inputs[name].reshape(*inputs[name].shape[:3], -1)
    # The state is transposed: the channels of keys are contiguous.
    inputs["state"] = np.ascontiguousarray(np.swapaxes(call.inputs["state"], 2, 3))
    tensors = []
    for name in ["q", "k", "v", "decay", "beta", "state"]:
        array = np.ascontiguousarray(inputs[name], dtype=np.float32)
        dims = [ctypes.c_int64(n) for n in array.shape[::-1]]
        tensor = pointer(library.ggml_new_tensor_4d(context, ctypes.c_int(0), *dims))
        ctypes.memmove(pointer(library.ggml_get_data(tensor)), array.ctypes.data, array.nbytes)
        tensors.append(tensor)
    result = pointer(library.ggml_gated_delta_net(context, *tensors))
    graph = pointer(library.ggml_new_graph(context))
    library.ggml_build_forward_expand(graph, result)
    shape = inputs["v"].shape
    count = int(np.prod(shape))

    def run():
        if library.ggml_graph_compute_with_ctx(context, graph, ctypes.c_int(THREADS)) != 0:
            raise ValueError("ggml did not compute the graph")
        numbers = (ctypes.c_float * count).from_address(library.ggml_get_data(result))
        return [np.swapaxes(np.frombuffer(numbers, dtype=np.float32).reshape(shape), 1, 2)]

    return run


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    serve("started", Call)
