"""Where versions of transformers compute otherwise than this crate, which does what published checkpoints were trained
with."""

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet


@dataclass
class Change:
    model_types: str
    versions: str
    theirs: str
    ours: str

    def explains(self, model_type, version):
        return model_type in self.model_types.split() and version in SpecifierSet(self.versions)


CHANGES = [
    Change(
        "bamba",
        ">=5.0,<5.15",
        "rotary positions apply to whole heads for any `partial_rotary_factor`",
        "half of each head, as in version 4, with which Bamba was published",
    ),
    Change(
        "gemma3n gemma3n_text",
        "<5.6",
        "without a cache, layers that share keys and values compute separate ones (recorded with a cache)",
        "shared keys and values, as with a cache",
    ),
    Change(
        "imagegpt",
        "<5.21",
        "the square root of the head dimension is truncated to an integer: scores of ImageGPT medium are divided by 11,"
        " of large by 9",
        "the square root, 11.31 and 9.80, as in OpenAI's code",
    ),
    Change(
        "megatron-bert rembert roformer",
        ">=5.9,<5.18",
        "with `is_decoder`, queries attend to later keys"
        " ([transformers#48745](https://github.com/huggingface/transformers/issues/48745))",
        "the causal mask, as before and after",
    ),
    Change(
        "moshi",
        ">=5.2",
        "the mask of a prompt has no window, although caches keep `sliding_window` keys (recorded with the mask of the"
        " window)",
        "the window, as in version 4 and Kyutai's code",
    ),
    Change(
        "olmo3",
        ">=5.0,<5.13",
        "YaRN also applies to layers with a window (recorded without it)",
        "only layers without a window, as in version 4 and from 5.13 on",
    ),
    Change(
        "qwen2_moe",
        "<5.0",
        "with `use_sliding_window` all layers have the window, except with FlashAttention",
        "layers from `max_window_layers` on, as with FlashAttention; published models have no window",
    ),
    Change(
        "recurrent_gemma",
        "<5.4",
        "the mask of a prompt has no window, although caches keep `attention_window_size` keys",
        "the window, as in later versions and Google's code",
    ),
    Change(
        "switch_transformers",
        ">=5.0,<5.15",
        "only the first layer adds the relative bias",
        "all layers add it, as in version 4 and T5",
    ),
]
