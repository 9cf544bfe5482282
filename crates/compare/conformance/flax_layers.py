"""MultiHeadAttention of flax, linen and nnx, and four Dense layers around jax.nn.dot_product_attention."""

import flax
import jax
import jax.numpy as jnp
from flax import linen, nnx, traverse_util
from safetensors.flax import save_file

from layers import Recorded, biases, draw


class Dense(linen.Module):
    """Grouped-query attention of a Flax model of transformers: Dense layers with their names."""

    @linen.compact
    def __call__(self, xs):
        b, t, e = xs.shape
        q = linen.Dense(16, name="q_proj")(xs).reshape(b, t, 4, 4)
        k = linen.Dense(8, name="k_proj")(xs).reshape(b, t, 2, 4)
        v = linen.Dense(8, name="v_proj")(xs).reshape(b, t, 2, 4)
        ys = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return linen.Dense(e, name="o_proj")(ys.reshape(b, t, 16))


def record():
    recorded = Recorded("flax", flax.__version__)
    jax.config.update("jax_default_matmul_precision", "highest")
    parameters = {}

    xs = draw(0, 2, 7, 8)
    layer = linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=12, out_features=10, bias_init=random)
    mask = linen.make_causal_mask(jnp.ones((2, 7)))
    variables = layer.init(jax.random.key(1), xs, mask=mask)
    parameters["encoder"] = {"attention": variables["params"]}
    config = dict(embed_dim=8, num_heads=4, head_dim=3, out_dim=10, causal=True) | biases(True)
    recorded.add("encoder.attention", "flax", config, layer.apply(variables, xs, mask=mask), queries=xs)

    memory = draw(1, 2, 5, 8)
    layer = nnx.MultiHeadAttention(2, 8, qkv_features=12, use_bias=False, decode=False, rngs=nnx.Rngs(2))
    state = nnx.state(layer, nnx.Param).to_pure_dict()
    parameters["decoder"] = {"cross": state}
    config = dict(embed_dim=8, num_heads=2, head_dim=6, out_dim=8)
    recorded.add("decoder.cross", "flax", config, layer(xs, memory), queries=xs, keys=memory, values=memory)

    layer = Dense()
    variables = layer.init(jax.random.key(3), xs)
    parameters["layers_0"] = {"self_attn": variables["params"]}
    config = dict(embed_dim=8, num_heads=4, num_kv_heads=2, head_dim=4, out_dim=8, causal=True) | biases(True)
    recorded.add("layers_0.self_attn", "dense:canonical", config, layer.apply(variables, xs), queries=xs)

    # Norms of queries and keys. Scales of ones would hide a norm that is not read.
    layer = linen.MultiHeadDotProductAttention(num_heads=2, qkv_features=12, out_features=8, normalize_qk=True)
    variables = layer.init(jax.random.key(4), xs)
    for name, seed in (("query_ln", 5), ("key_ln", 6)):
        variables["params"][name]["scale"] = random(jax.random.key(seed), (6,))
    parameters["normed"] = {"attention": variables["params"]}
    norms = dict(qk_norm=dict(kind="layer_no_bias", scope="per_head", eps=1e-6))
    config = dict(embed_dim=8, num_heads=2, head_dim=6, out_dim=8) | biases(True) | norms
    recorded.add("normed.attention", "flax", config, layer.apply(variables, xs), queries=xs)

    layer = nnx.MultiHeadAttention(2, 8, qkv_features=12, use_bias=False, decode=False, normalize_qk=True, rngs=nnx.Rngs(7))
    for norm, seed in ((layer.query_ln, 8), (layer.key_ln, 9)):
        norm.scale[...] = random(jax.random.key(seed), (6,))
    parameters["normed_nnx"] = {"attention": nnx.state(layer, nnx.Param).to_pure_dict()}
    config = dict(embed_dim=8, num_heads=2, head_dim=6, out_dim=8) | norms
    recorded.add("normed_nnx.attention", "flax", config, layer(xs), queries=xs)

    save_file(traverse_util.flatten_dict(parameters, sep="/"), recorded.file)
    return recorded


def random(key, shape, dtype=jnp.float32):
    """Biases that are not zero."""
    return jax.random.normal(key, shape, dtype)
