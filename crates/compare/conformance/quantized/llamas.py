"""Tiny random llamas of transformers, for the libraries that quantise models of transformers."""

import contextlib
import copy
import tempfile

import numpy
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

import common


@contextlib.contextmanager
def saved(seed, dtype=torch.bfloat16, **own):
    """Returns the path of a saved model with random weights; `own` replaces fields of the config."""
    config = transformers.LlamaConfig(**{**common.config(intermediate_size=32), **own})
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 or name.endswith("bias"):
                parameter.normal_(std=0.2)
    with tempfile.TemporaryDirectory() as path:
        model.save_pretrained(path)
        yield path


def save_tokenizer(path):
    """Saves a tokenizer of a few words next to a model, for libraries that open one."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(common.VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w3"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)


def texts(seed, count=16, length=48):
    """Returns random texts as lists of tokens."""
    random = numpy.random.default_rng(seed)
    return [random.integers(0, common.VOCABULARY, length).tolist() for _ in range(count)]


def save(name, model):
    """Saves a model as its library does, without the files that are not needed here."""
    folder = common.folder(name)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)


def plain_weights(model):
    """Returns the weights of the linear layers that are not quantised, in f32."""
    return {
        f"{name}.weight": module.weight.detach().float().numpy()
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and name != "lm_head"
    }


def write_logits(name, model, want):
    """Writes the logits that transformers computes with the dequantised weights in f32.

    The libraries' own products round activations, or are in another dtype, on a CPU.
    """
    config = copy.deepcopy(model.config)
    vars(config).pop("quantization_config", None)
    plain = transformers.LlamaForCausalLM(config).float()
    own = {**model.state_dict(), **{key: torch.from_numpy(array) for key, array in want.items()}}
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.copy_(own[key])
        common.write_logits(name, plain(torch.tensor([common.IDS])).logits[0].numpy())
