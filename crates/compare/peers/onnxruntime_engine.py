"""ONNX Runtime: the contrib operators MultiHeadAttention and GroupQueryAttention; Attention, which projects, in a layer.

MultiHeadAttention takes f32 and as many key heads as query heads. What is causal goes to GroupQueryAttention, which always
is, and is faster than MultiHeadAttention's `unidirectional`: it reads a cache of T_kv keys whose last T_q are this call's,
and has sliding windows and f16.
"""

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

NAME = "ONNX Runtime"
VERSION = ort.__version__
_TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16}
_threads = 0


def start(threads):
    """Settles the number of threads, once a process."""
    global _threads
    _threads = threads


class Call:
    """One cell made ready: `run()` attends once, over the next copy of k and v; `result()` is the first copy's."""

    def __init__(self, cell, inputs):
        if cell.dtype not in _TYPES:
            raise NotImplementedError(f"no {cell.dtype} attention on the CPU")
        self.cell = cell
        multi_head = cell.dtype == "f32" and cell.h == cell.h_kv and not cell.causal
        if not multi_head and not cell.causal:
            raise NotImplementedError("GroupQueryAttention is always causal")
        self.session, feeds = (_multi_head if multi_head else _group_query)(cell, inputs)
        rows = (cell.b, cell.t_q, cell.h * cell.d)
        self.out = ort.OrtValue.ortvalue_from_numpy(np.zeros(rows, inputs.q.dtype))
        self.bindings = [self._bind(feed) for feed in feeds]
        self.next = 0

    def _bind(self, feed):
        binding = self.session.io_binding()
        for name, array in feed.items():
            value = ort.OrtValue.ortvalue_from_numpy(array)
            binding.bind_ortvalue_input(name, value)
            if name.startswith("past_"):
                binding.bind_ortvalue_output(name.replace("past_", "present_"), value)
        binding.bind_ortvalue_output("y", self.out)
        return binding, feed

    def run(self):
        binding, _ = self.bindings[self.next]
        self.next = (self.next + 1) % len(self.bindings)
        self.session.run_with_iobinding(binding)

    def result(self):
        self.next = 0
        self.run()
        c = self.cell
        return self.out.numpy().reshape(c.b, c.t_q, c.h, c.d).transpose(0, 2, 1, 3).astype(np.float32)


def _rows(array):
    """(B, H, T, D) as the operators take it: (B, T, H · D)."""
    b, h, t, d = array.shape
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3)).reshape(b, t, h * d)


def _multi_head(cell, inputs):
    feeds = [{"q": _rows(inputs.q), "k": _rows(k), "v": _rows(v)} for k, v in inputs.kv]
    names = ["q", "k", "v"]
    types = {}
    if cell.lens is not None:
        names += ["", "key_padding_mask"]
        types["key_padding_mask"] = TensorProto.INT32
        for feed in feeds:
            feed["key_padding_mask"] = (np.arange(cell.t_kv) < np.array(cell.lens)[:, None]).astype(np.int32)
    attributes = {"num_heads": cell.h}
    return _session(cell, "MultiHeadAttention", (names, ["y"], attributes), feeds[0], types), feeds


def _group_query(cell, inputs):
    own = cell.t_q
    feeds = []
    for k, v in inputs.kv:
        feeds.append({
            "q": _rows(inputs.q),
            "k": _rows(k[:, :, -own:]),
            "v": _rows(v[:, :, -own:]),
            "past_key": k,
            "past_value": v,
            "seqlens_k": np.full((cell.b,), cell.t_kv - 1, np.int32),
            "total": np.array([cell.t_kv], np.int32),
        })
    types = {"seqlens_k": TensorProto.INT32, "total": TensorProto.INT32}
    attributes = {"num_heads": cell.h, "kv_num_heads": cell.h_kv}
    if cell.window is not None:
        attributes["local_window_size"] = cell.window
    outputs = ["y", "present_key", "present_value"]
    return _session(cell, "GroupQueryAttention", (list(feeds[0]), outputs, attributes), feeds[0], types), feeds


def _session(cell, operator, node, feed, types):
    names, outputs, attributes = node
    node = helper.make_node(operator, names, outputs, domain="com.microsoft", **attributes)
    float_type = _TYPES[cell.dtype]
    infos = [helper.make_tensor_value_info(n, types.get(n, float_type), feed[n].shape) for n in names if n]
    out_infos = [helper.make_tensor_value_info(name, float_type, None) for name in outputs]
    return _start(helper.make_graph([node], "attention", infos, out_infos))


def _start(graph):
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = _threads
    options.log_severity_level = 3
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class LayerCall:
    """A causal layer made ready: (B, T, E) to (B, T, E), the weights constants of the model."""

    def __init__(self, cell, inputs):
        if cell.dtype != "f32":
            raise NotImplementedError(f"no {cell.dtype} Attention operator on the CPU")
        constants = [
            numpy_helper.from_array(np.ascontiguousarray(inputs.w_in.T), "w_in"),
            numpy_helper.from_array(np.zeros(3 * cell.e, np.float32), "no_bias"),
            numpy_helper.from_array(np.ascontiguousarray(inputs.w_out.T), "w_out"),
        ]
        attributes = {"num_heads": cell.h, "unidirectional": 1}
        nodes = [
            helper.make_node("Attention", ["x", "w_in", "no_bias"], ["context"], domain="com.microsoft", **attributes),
            helper.make_node("MatMul", ["context", "w_out"], ["y"]),
        ]
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, inputs.x.shape) for name in ("x", "y")]
        self.session = _start(helper.make_graph(nodes, "layer", ends[:1], ends[1:], constants))
        self.feed = {"x": inputs.x}

    def run(self):
        return self.session.run(None, self.feed)[0]

    def result(self):
        return self.run()
