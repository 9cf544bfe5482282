"""OpenVINO: ScaledDotProductAttention of opset 13, also in a layer, with the cell's dtype as the inference precision."""

import numpy as np
import openvino as ov
from openvino import opset13 as op

NAME = "OpenVINO"
VERSION = ov.__version__.split("-")[0]
_TYPES = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}
_threads = 0


def start(threads):
    """Settles the number of threads, once a process."""
    global _threads
    _threads = threads


def _tensor(array, dtype):
    if dtype == "bf16":
        return ov.Tensor(array.view(np.uint16), list(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def _compile(model, dtype):
    config = {
        "INFERENCE_PRECISION_HINT": _TYPES[dtype].to_string(),
        "INFERENCE_NUM_THREADS": _threads,
        "NUM_STREAMS": "1",
        "PERFORMANCE_HINT": "LATENCY",
    }
    return ov.Core().compile_model(model, "CPU", config)


class Call:
    """One cell made ready: `run()` attends once, over the next copy of k and v; `result()` is the first copy's.

    The operator takes as many key heads as query heads. The queries of a key head become rows of it where no mask tells
    them apart by position, else k and v are broadcast in the model, as exported models do.
    """

    def __init__(self, cell, inputs):
        self.cell = cell
        group = cell.h // cell.h_kv
        rows = group > 1 and not cell.square_causal
        q, mask = inputs.q, cell.additive()
        if cell.square_causal:
            mask = None
        if rows:
            q = q.reshape(cell.b, cell.h_kv, group * cell.t_q, cell.d)
            mask = None if mask is None else np.ascontiguousarray(np.tile(mask, (1, 1, group, 1)))
        model = self._model(cell, q, mask, 1 if rows else group)
        compiled = _compile(model, cell.dtype)
        self.requests, self.kept = [], [inputs, q, mask]
        for k, v in inputs.kv:
            request = compiled.create_infer_request()
            for at, array in enumerate([q, k, v] + ([] if mask is None else [mask])):
                request.set_input_tensor(at, _tensor(array, cell.dtype))
            self.requests.append(request)
        self.next = 0

    @staticmethod
    def _model(cell, q, mask, repeat):
        kind = _TYPES[cell.dtype]
        kv_shape = [cell.b, cell.h_kv, cell.t_kv, cell.d]
        parameters = [op.parameter(list(q.shape), kind), op.parameter(kv_shape, kind), op.parameter(kv_shape, kind)]
        nodes = list(parameters)
        if repeat > 1:
            full = [cell.b, cell.h_kv, repeat, cell.t_kv, cell.d]
            for at in (1, 2):
                apart = op.unsqueeze(nodes[at], op.constant(np.int64(2)))
                many = op.broadcast(apart, op.constant(np.array(full, np.int64)))
                nodes[at] = op.reshape(many, op.constant(np.array([cell.b, cell.h, cell.t_kv, cell.d])), False)
        if mask is not None:
            parameters.append(op.parameter(list(mask.shape), kind))
            nodes.append(parameters[-1])
        attended = op.scaled_dot_product_attention(*nodes, causal=cell.square_causal)
        return ov.Model([op.result(op.convert(attended, "f32"))], parameters, "attention")

    def run(self):
        self.requests[self.next].infer(share_inputs=True, share_outputs=True)
        self.next = (self.next + 1) % len(self.requests)

    def result(self):
        self.next = 0
        self.run()
        c = self.cell
        return np.array(self.requests[0].get_output_tensor(0).data).reshape(c.b, c.h, c.t_q, c.d)


class LayerCall:
    """A causal layer made ready: (B, T, E) to (B, T, E), the weights constants of the model."""

    def __init__(self, cell, inputs):
        x = op.parameter(list(inputs.x.shape), _TYPES[cell.dtype])
        constant = lambda weight: op.constant(_tensor(weight, cell.dtype), shared_memory=False)
        shape = lambda *sizes: op.constant(np.array(sizes, np.int64))
        packed = op.matmul(x, constant(inputs.w_in), False, True)
        packed = op.reshape(packed, shape(cell.b, cell.t_q, 3, cell.h, cell.d), False)
        apart = op.split(op.transpose(packed, shape(2, 0, 3, 1, 4)), op.constant(np.int64(0)), 3)
        q, k, v = (op.squeeze(apart.output(at), op.constant(np.int64(0))) for at in range(3))
        context = op.transpose(op.scaled_dot_product_attention(q, k, v, causal=True), shape(0, 2, 1, 3))
        context = op.reshape(context, shape(*inputs.x.shape), False)
        y = op.matmul(context, constant(inputs.w_out), False, True)
        model = ov.Model([op.result(op.convert(y, "f32"))], [x], "layer")
        self.request = _compile(model, cell.dtype).create_infer_request()
        self.kept = inputs
        self.request.set_input_tensor(0, _tensor(inputs.x, cell.dtype))

    def run(self):
        self.request.infer(share_inputs=True, share_outputs=True)

    def result(self):
        self.run()
        return np.array(self.request.get_output_tensor(0).data)
