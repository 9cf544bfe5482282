"""Runs a tiny random model and keeps what its linear layers were given and gave, and where softmax attention happened."""

import hashlib
import inspect
import json
import math
import re
import tempfile
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

import parts
from special import CACHED, INPUTS, LENGTHS, MASKED, POSITIONS, TIME_FIRST
from randomise import randomise
from versions import field_of

BATCH, LENGTH, DECODER_LENGTH = 2, 13, 7
SOFTMAX = {"softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
# Tensors of tiny attention are smaller; others are left out of the files.
LARGEST = 200_000


class Unrunnable(Exception):
    """No inputs were found that the model takes."""


class Attends(TorchFunctionMode):
    """Notes the innermost module at each softmax of rank 3 and more, and the products with a linear layer's weight that
    do not call the layer."""

    def __init__(self, stack, product):
        super().__init__()
        self.stack = stack
        self.product = product
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in SOFTMAX and self.stack and args and isinstance(args[0], torch.Tensor) and args[0].ndim >= 3:
            if self.stack[-1] not in self.found:
                self.found.append(self.stack[-1])
        gave = function(*args, **(kwargs or {}))
        if function is torch.nn.functional.linear:
            named = dict(zip(("input", "weight"), args)) | (kwargs or {})
            self.product(named["input"], named["weight"], gave)
        return gave


def record(model_class, config, folder, name):
    """Writes config.json, model.safetensors, golden.safetensors and record.json of one model."""
    torch.manual_seed(zlib.crc32(name.encode()))
    model = instantiate(model_class, config).eval()
    randomise(model, lambda parameter: max(1, parameter[0].numel()))
    names = {module: path for path, module in model.named_modules()}
    stack, calls, seen, masks = [], [], set(), {}

    def before(module, args, kwargs):
        stack.append(module)
        if config.model_type in MASKED and module in names:
            note_mask(masks, names[module], module, args, kwargs)
        if is_linear(module) and names.get(module) and module not in seen and (args or kwargs):
            given = args[0] if args else next(iter(kwargs.values()))
            if isinstance(given, torch.Tensor) and given.is_floating_point():
                seen.add(module)
                calls.append([names[module], given.detach().clone(), None, module])

    def after(module, args, output):
        if stack and stack[-1] is module:
            stack.pop()
        for call in reversed(calls):
            if call[3] is module and call[2] is None:
                # I-BERT's layers return a scale too.
                first = output[0] if isinstance(output, tuple) and output else output
                call[2] = first.detach().clone() if isinstance(first, torch.Tensor) else None
                break

    layers = {id(module.weight): module for module in names if is_linear(module)}

    def product(given, weight, gave):
        module = layers.get(id(weight))
        if module and names[module] and module not in seen:
            seen.add(module)
            calls.append([names[module], given.detach().clone(), gave.detach().clone(), module])

    hooks = [
        module.register_forward_pre_hook(before, with_kwargs=True) for module in names
    ] + [module.register_forward_hook(after) for module in names]
    errors = []
    for inputs in candidates(model, config):
        stack.clear(), calls.clear(), seen.clear()
        attends = Attends(stack, product)
        try:
            with torch.no_grad(), attends:
                parts.target(model)(**inputs)
            break
        except Exception as error:
            errors.append(f"{', '.join(inputs)}: {type(error).__name__}: {str(error)[:160]}")
    else:
        raise Unrunnable(" | ".join(errors[:2]))
    for hook in hooks:
        hook.remove()
    calls = [call[:3] for call in calls if call[2] is not None]
    if config.model_type in TIME_FIRST:
        calls = [[path, given.transpose(0, 1), gave.transpose(0, 1)] for path, given, gave in calls]
    known = {}
    if config.model_type in POSITIONS:
        known["positions"] = POSITIONS[config.model_type](config).float()
    elif "position_ids" in inputs:
        known["positions"] = inputs["position_ids"].float()
    if config.model_type in LENGTHS:
        known["lengths"] = torch.tensor(LENGTHS[config.model_type], dtype=torch.float)
    # Some models have a softmax that is no attention, outside of their modules.
    found = [module for module in attends.found if names[module]]
    for module in found:
        path = names[module]
        # BERT's attention has its output projection in a sibling module.
        for around in (path, path.rsplit(".", 1)[0]):
            if path in masks:
                known[f"mask|{around}"] = masks[path]
    write(model, folder, calls, known)
    (folder / "defaults.json").write_text(as_json(type(config)().to_dict()))
    cores = [
        {"module": names[module], "class": type(module).__name__, "owner": owner(model, names[module])}
        for module in found
    ]
    (folder / "record.json").write_text(json.dumps({"class": type(model).__name__, "cores": cores}, indent=1))
    return cores


def note_mask(masks, path, module, args, kwargs):
    """Keeps the mask that a module is given, as numbers that are added to scores."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return
    mask = given.get("attention_mask", given.get("kwargs", {}).get("attention_mask"))
    if isinstance(mask, torch.Tensor) and mask.ndim == 4:
        least = torch.finfo(torch.float).min
        masks[path] = torch.zeros(mask.shape).masked_fill(~mask, least) if mask.dtype == torch.bool else mask.float()


def instantiate(model_class, config):
    for implementation in ("eager", "sdpa"):
        # The eager implementation adds Falcon's ALiBi twice, unlike the default one and Falcon's own code.
        if implementation == "eager" and getattr(config, "alibi", False):
            continue
        try:
            return model_class._from_config(config, attn_implementation=implementation).float()
        except ValueError as error:
            if "attention implementation" not in str(error) and "attn_implementation" not in str(error):
                raise
            last = error
    raise last


def own_attention(model):
    """The classes of the attention modules that are not a nested model's."""
    found = set()
    for path, module in model.named_modules():
        name = type(module).__name__
        weights = sum(is_matrix(getattr(below, "weight", None)) for below in module.modules())
        if re.search("Att(ention|n)|Multi[hH]ead", name) and weights >= 2 and not isinstance(module, PreTrainedModel):
            if owner(model, path) == model.config.model_type:
                found.add(name)
    return sorted(found)


def is_matrix(weight):
    return isinstance(weight, torch.Tensor) and weight.ndim == 2


def is_linear(module):
    return is_matrix(getattr(module, "weight", None)) and not isinstance(module, torch.nn.Embedding)


def owner(model, path):
    """The model type of the innermost model around a module."""
    found = model
    at = model
    for part in path.split("."):
        at = getattr(at, part)
        if isinstance(at, PreTrainedModel):
            found = at
    return found.config.model_type


def write(model, folder, calls, known):
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        stored = {}
        for file in Path(saved).glob("*.safetensors"):
            stored |= load_file(file)
        (folder / "config.json").write_text(as_json(json.loads((Path(saved) / "config.json").read_text())))
    stored = {name: tensor for name, tensor in stored.items() if tensor.numel() <= LARGEST}
    by_content = {}
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2:
            for key in (weight, weight[0]):
                by_content.setdefault(digest(key), path)
    modules = {}
    for name, tensor in stored.items():
        if tensor.ndim == 2:
            found = by_content.get(digest(tensor)) or by_content.get(digest(tensor[0]))
            if found:
                modules[name] = found
    golden = known
    for order, (path, given, gave) in enumerate(calls):
        # Rows and columns of an image are one row of tokens.
        given, gave = (tensor.flatten(1, 2) if tensor.ndim == 4 else tensor for tensor in (given, gave))
        if max(given.numel(), gave.numel()) <= LARGEST and given.ndim in (2, 3):
            golden[f"{order:05}|in|{path}"], golden[f"{order:05}|out|{path}"] = given.contiguous(), gave.contiguous()
    save_file({name: tensor.float().contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    save_file({name: tensor.float().contiguous().clone() for name, tensor in golden.items()}, folder / "golden.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))


def as_json(value):
    """Numbers that JSON does not have become null, and values of other types text."""
    def plain(value):
        if isinstance(value, dict):
            return {str(key): plain(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(entry) for entry in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

    return json.dumps(plain(value))


def digest(tensor):
    return tensor.shape, hashlib.md5(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


def candidates(model, config):
    """Inputs that the model may take, the likeliest first."""
    special = INPUTS.get(config.model_type)
    if special:
        yield special(config)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    number = lambda *names, default=None: next(
        (value for name in names if isinstance(value := field_of(config, name), int)), default
    )
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = getattr(text, "vocab_size", None) or 90
    width = number("hidden_size", "d_model", "embed_dim", "n_embd", "dim", default=48)
    ids = lambda length: torch.randint(min(4, vocabulary - 1), vocabulary, (BATCH, length))
    size = field_of(config, "image_size") or 32
    height, across = (size, size) if isinstance(size, int) else tuple(size)[:2]
    channels = number("num_channels", "in_channels", "in_chans", "num_input_channels", default=3)
    frames = number("num_frames", "frames_per_clip", default=4)
    pixels = torch.randn(BATCH, channels, height, across)
    video = torch.randn(BATCH, frames, channels, height, across)
    bins = number("num_mel_bins", "feature_size", "num_mel_channels", "input_feat_per_channel", "n_mels", default=16)
    steps = 2 * number("max_source_positions", default=20)
    decoder = {"decoder_input_ids": ids(DECODER_LENGTH)} if "decoder_input_ids" in parameters else {}
    patch = number("patch_size", default=8)
    patch = patch if isinstance(patch, int) else 8
    temporal = number("temporal_patch_size", default=1)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    patches = torch.randn(24, channels * temporal * patch * patch)
    options = {
        "input_ids": [{"input_ids": ids(LENGTH)} | decoder],
        "pixel_values": [{"pixel_values": pixels}, {"pixel_values": video}],
        "pixel_values_videos": [{"pixel_values_videos": video}],
        "input_features": [
            {"input_features": torch.randn(BATCH, bins, steps)} | decoder,
            {"input_features": torch.randn(BATCH, steps, bins)} | decoder,
        ],
        "input_values": [
            {"input_values": torch.randn(BATCH, 4000)} | decoder,
            {"input_values": torch.randn(BATCH, 1, 4000)} | decoder,
            {"input_values": torch.randn(BATCH, number("max_length", default=64), bins)} | decoder,
        ],
        "hidden_states": [
            {"hidden_states": patches, "grid_thw": grid},
            {"hidden_states": torch.randn(BATCH, LENGTH, width)},
        ],
        "inputs_embeds": [{"inputs_embeds": torch.randn(BATCH, LENGTH, width)}],
        "encoder_hidden_states": [],
    }
    order = [main] + [name for name in options if name != main]
    for name in order:
        if name in parameters or name == main:
            for inputs in options.get(name, []):
                extra = {}
                if "grid_thw" not in inputs and name == "hidden_states" and "grid_thw" in parameters:
                    continue
                if "grid_thw" in inputs and "grid_thw" not in parameters:
                    continue
                if "bbox" in parameters and name == "input_ids":
                    extra["bbox"] = torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)
                for extra_name in ("encoder_hidden_states", "query_embeds"):
                    if extra_name in parameters and parameters[extra_name].default is inspect.Parameter.empty:
                        extra[extra_name] = torch.randn(BATCH, 9, width)
                if "use_cache" in parameters:
                    extra["use_cache"] = config.model_type in CACHED
                # Some have a causal mask only where they are given one.
                if name == "input_ids" and "attention_mask" in parameters:
                    extra["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
                yield inputs | extra
