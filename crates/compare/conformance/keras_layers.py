"""MultiHeadAttention and GroupQueryAttention of Keras: by the paths of their variables, and as in a `.weights.h5`."""

import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import h5py
import jax
import keras
import numpy as np
from safetensors.numpy import save_file

from layers import Recorded, biases, draw


def record():
    recorded = Recorded("keras", keras.__version__)
    jax.config.update("jax_default_matmul_precision", "highest")
    keras.utils.set_random_seed(4)
    normal = keras.initializers.RandomNormal(stddev=0.3)

    queries, memory = draw(2, 2, 6, 8), draw(3, 2, 5, 9)
    cross = keras.layers.MultiHeadAttention(4, 3, output_shape=10, bias_initializer=normal, name="cross")
    crossed = cross(queries, memory)
    grouped = keras.layers.GroupQueryAttention(3, 4, 2, use_bias=False, name="grouped")
    grouped_output = grouped(queries, queries, use_causal_mask=True)
    tensors = {}
    for variable in cross.weights + grouped.weights:
        tensors[variable.path] = np.asarray(variable.value)
    config = dict(embed_dim=8, num_heads=4, head_dim=3, out_dim=10, kdim=9) | biases(True)
    recorded.add("cross", "keras", config, crossed, queries=queries, keys=memory, values=memory)
    config = dict(embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=3, out_dim=8, causal=True)
    recorded.add("grouped", "keras", config, grouped_output, queries=queries)

    # With attention scores Keras computes the definition, which allows another width of values.
    inputs = keras.Input((None, 8))
    layer = keras.layers.MultiHeadAttention(2, 4, value_dim=5, bias_initializer=normal)
    outputs, _ = layer(inputs, inputs, return_attention_scores=True, use_causal_mask=True)
    model = keras.Model(inputs, outputs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.weights.h5"
        model.save_weights(path)
        with h5py.File(path) as file:
            file.visititems(lambda name, entry: keep(tensors, name, entry))
    [prefix] = {name.rsplit("/query_dense", 1)[0] for name in tensors if "/query_dense/" in name}
    config = dict(embed_dim=8, num_heads=2, head_dim=4, value_head_dim=5, out_dim=8, causal=True) | biases(True)
    recorded.add(prefix.replace("/", "."), "keras-h5", config, model(queries), queries=queries)

    save_file(tensors, recorded.file)
    return recorded


def keep(tensors, name, entry):
    if isinstance(entry, h5py.Dataset) and entry.dtype == np.float32:
        tensors[name] = entry[()]
