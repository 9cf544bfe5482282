"""PyTorch's own samples: of scaled_dot_product_attention in its database of operators, and of nn.MultiheadAttention in
that of modules, by itself and in encoder and decoder layers."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db

from cases import Cases


def record():
    torch.set_num_threads(1)
    cases = Cases("PyTorch", torch.__version__.split("+")[0])
    function(cases)
    for module in (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        samples(cases, module)
    return cases


def function(cases):
    [op] = [op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    for n, sample in enumerate(list(op.sample_inputs("cpu", torch.float32))):
        options = dict(sample.kwargs)
        q, k, v = sample.input, *sample.args
        torch.manual_seed(n)
        output = F.scaled_dot_product_attention(q, k, v, **options)
        inputs = dict(q=q, k=k, v=v, attn_mask=options.pop("attn_mask", None))
        cases.add("scaled_dot_product_attention", str(n), options | {"seed": n}, inputs, {"output": output})


def samples(cases, module_class):
    """What each attention of the module is given and gives. In training, with no dropout: in evaluation a layer may run
    without its attention."""
    [info] = [info for info in module_db if info.module_cls is module_class]
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=False, training=True)
    for n, sample in enumerate(inputs):
        torch.manual_seed(0)
        constructor, call = sample.constructor_input, sample.forward_input
        module = module_class(*constructor.args, **constructor.kwargs)
        for name, part in module.named_modules():
            if isinstance(part, nn.MultiheadAttention):
                group = " ".join([module_class.__name__, name]).strip()
                part.register_forward_hook(partial(add, cases, group, str(n)), with_kwargs=True)
        module(*call.args, **call.kwargs)


def add(cases, group, name, part, args, kwargs, outputs):
    """A call of an attention."""
    query, key, value = args
    output, weights = outputs
    attributes = dict(
        embed_dim=part.embed_dim,
        num_heads=part.num_heads,
        bias=part.in_proj_bias is not None,
        add_bias_kv=part.bias_k is not None,
        add_zero_attn=part.add_zero_attn,
        batch_first=part.batch_first,
    )
    masks = {mask: kwargs.get(mask) for mask in ("attn_mask", "key_padding_mask")}
    inputs = dict(query=query, key=key, value=value) | masks | part.state_dict()
    cases.add(group, name, attributes, inputs, dict(output=output, weights=weights))
