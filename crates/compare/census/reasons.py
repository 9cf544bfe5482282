"""Drafts for the table of what is missing: what an attention has that this crate does not, read off its class in
transformers."""

import importlib
import inspect
import re

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# The first pattern found in the classes of a model's attention names what is missing.
FEATURES = [
    (r"lambda_q1", "differential attention: the difference of two softmaxes"),
    (r"indexer|compressor", "keys chosen by an indexer, or compressed"),
    (r"block_sparse|bigbird", "blocks of keys chosen at random"),
    (r"hash|lsh|LSH|nystrom|landmark|yoso", "an approximation of softmax attention"),
    (r"global_attn|global_query|query_global|is_global", "global tokens with separate projections"),
    (r"kv_a_proj|kv_b_proj|q_a_proj", "latent attention of another kind"),
    (r"c2p|p2c|disentangled", "relative positions by content (DeBERTa)"),
    (r"rel_pos_h|decomposed", "decomposed relative positions by content"),
    (r"gru_rel_pos", "a relative bias with a gate by content"),
    (r"relative_position_bias|window_partition|logit_scale", "windows of an image with a table of biases"),
    (
        r"linear_pos|relative_k_proj|pos_bias_u|rel_shift|r_r_bias|rel_embed|distance_embed"
        r"|relative_positions_keys|rel_logits|relative_attention_bias|emb_rel_k",
        "relative positions by content",
    ),
    (r"mrope|multimodal_rotary|mrope_section", "rotary positions on several axes"),
    (
        r"rotary_pos_emb_vision|apply_2d|freqs_h|rotary_2d|apply_rotary_pos_emb_2d|num_prefix_tokens",
        "rotary positions of an image, on two axes",
    ),
    (r"gate_proj|gate_score|sigmoid|output_gate|g_proj|gqkv", "an output gate"),
    (r"attn_sub_norm|inner_attn_ln|ln_attn", "a norm before the output projection"),
    (r"Conv1d|Conv2d|conv1d|conv2d|convolution", "convolutions around or inside of the projections"),
    (r"sampling_offsets|grid_sample", "keys sampled at learned positions"),
    (r"e2e_query|layout_key|rel_pos_bias|rel_2d_pos", "biases or projections by layout or by kind of token"),
    (r"softmax_offset|sinks|attn_sink", "sinks of another kind"),
    (r"spatial_reduction|sr_ratio|pool|unroll", "keys of a coarser grid"),
    (r"cu_seqlens", "images of several sizes in one sequence, with positions on two axes"),
]
# In the source of a whole model.
AXES = r"mrope_section|mrope_interleaved|apply_multimodal_rotary"
NO_ROW = "names or options that no supported model has"


def draft(model_type, classes):
    try:
        module = importlib.import_module(CONFIG_MAPPING[model_type].__module__.replace("configuration_", "modeling_"))
        source = "".join(inspect.getsource(getattr(module, name)) for name in classes if hasattr(module, name))
    except (ImportError, KeyError, OSError):
        return NO_ROW
    found = next((feature for pattern, feature in FEATURES if re.search(pattern, source)), NO_ROW)
    if found == NO_ROW and re.search(AXES, inspect.getsource(module)) and "ision" not in "".join(classes):
        return "rotary positions on several axes"
    return found
