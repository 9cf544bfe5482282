"""ONNX's node cases of Attention, LinearAttention, RotaryEmbedding and FlexAttention, with the outputs that it expects."""

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.reference import ReferenceEvaluator

from cases import Cases

INPUTS = {
    "Attention": ["Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen"],
    "RotaryEmbedding": ["X", "cos_cache", "sin_cache", "position_ids"],
    "FlexAttention": ["Q", "K", "V"],
    "LinearAttention": ["query", "key", "value", "past_state", "decay", "beta"],
}
# `present_key` and `present_value` are the past followed by what is new: no attention.
OUTPUTS = {
    "Attention": ["Y", None, None, "qk_matmul_output"],
    "RotaryEmbedding": ["Y"],
    "FlexAttention": ["Y"],
    "LinearAttention": ["output", "present_state"],
}


def record():
    cases = Cases("ONNX", onnx.__version__)
    for case in collect_testcases():
        # The other half are the same cases with the operator written out in others.
        node, *others = case.model.graph.node
        if others or node.op_type not in INPUTS:
            continue
        [(inputs, outputs)] = case.data_sets
        inputs = named(INPUTS[node.op_type], node.input, inputs)
        outputs = named(OUTPUTS[node.op_type], node.output, outputs)
        attributes = {}
        for attribute in node.attribute:
            value = onnx.helper.get_attribute_value(attribute)
            if attribute.name == "score_mod":
                bias = added(value, inputs)
                inputs["score_mod_bias"] = bias
                value = None if bias is not None else softcap(value)
            elif attribute.name == "prob_mod":
                value = [step.op_type for step in value.node]
            attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
        versions = {opset.domain: opset.version for opset in case.model.opset_import}
        opset = f"{node.domain} {versions[node.domain]}".strip()
        cases.add(f"{node.op_type} {opset}", case.name.removeprefix("test_"), attributes, inputs, outputs)
    return cases


def named(names, given, values):
    """By the operator's names; `given` has an empty one for each value that is left out."""
    values = iter(values)
    pairs = [(name, next(values)) for name, own in zip(names, given) if own]
    return {name: value for name, value in pairs if name}


def added(graph, inputs):
    """What a change of the scores adds to them, if that is all it does."""
    evaluator = ReferenceEvaluator(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 26)]))

    def evaluate(scores):
        return evaluator.run(None, {graph.input[0].name: scores})[0]

    (b, h, t_q, _), t_kv = inputs["Q"].shape, inputs["K"].shape[2]
    scores = np.random.default_rng(0).normal(size=(b, h, t_q, t_kv)).astype(np.float32)
    bias = evaluate(np.zeros_like(scores))
    return bias if np.allclose(evaluate(scores), scores + bias, atol=1e-6) else None


def softcap(graph):
    """The number of `tanh(scores / cap) * cap`."""
    assert [step.op_type for step in graph.node] == ["Div", "Tanh", "Mul"]
    [cap] = graph.initializer
    assert graph.node[0].input[1] == graph.node[2].input[1] == cap.name
    return {"softcap": float(numpy_helper.to_array(cap))}
