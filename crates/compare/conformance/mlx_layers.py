"""mlx.nn.MultiHeadAttention."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from importlib.metadata import version

from layers import Recorded, biases, draw


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiHeadAttention(16, 4)
        self.cross = nn.MultiHeadAttention(
            12, 3, query_input_dims=16, key_input_dims=10, value_input_dims=9, value_dims=15, value_output_dims=8, bias=True
        )


def record():
    recorded = Recorded("mlx", version("mlx"))
    mx.set_default_device(mx.cpu)
    mx.random.seed(5)
    model = Model()
    xs = draw(4, 2, 6, 16)
    mask = nn.MultiHeadAttention.create_additive_causal_mask(6)
    ys = model.attention(*[mx.array(xs)] * 3, mask)
    config = dict(embed_dim=16, num_heads=4, head_dim=4, out_dim=16, causal=True)
    recorded.add("attention", "mlx", config, np.array(ys), queries=xs)

    keys, values = draw(5, 2, 7, 10), draw(6, 2, 7, 9)
    ys = model.cross(mx.array(xs), mx.array(keys), mx.array(values))
    config = dict(embed_dim=16, num_heads=3, head_dim=4, value_head_dim=5, kdim=10, vdim=9, out_dim=8)
    config |= biases(True)
    recorded.add("cross", "mlx", config, np.array(ys), queries=xs, keys=keys, values=values)

    model.save_weights(str(recorded.file))
    return recorded
