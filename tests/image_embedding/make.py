"""Makes `picture.png`, `kinds/` and `models/`: tiny random encoders of images, and what transformers gives for the picture.

python tests/image_embedding/make.py     (packages: tests/hf/requirements.txt)

A folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them, `preprocessor_config.json`, and
`golden.safetensors`: the `pixels` (3, rows, columns), the `embedding`, and of each layer the `attention.{i}` of the class
token to the patches (H, rows, columns). Pixels are torchvision's: PyTorch's `interpolate` with `antialias`, rounded to
whole colours. Eager attention, f32.
"""

import json
import struct
import zlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

HERE = Path(__file__).resolve().parent
ROWS, COLUMNS = 40, 52
SIZES = {
    "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
}
TEXTS = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
    "max_position_embeddings": 8,
}
MODELS = {
    "vit": (
        ViTModel,
        ViTConfig(**SIZES, image_size=24),
        {"size": {"height": 24, "width": 24}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    ),
    # Trained on 5 x 5 patches, used with 3 x 4.
    "dinov2": (
        Dinov2Model,
        Dinov2Config(**{key: size for key, size in SIZES.items() if key != "intermediate_size"}, image_size=40, mlp_ratio=2),
        {
            "size": {"shortest_edge": 30}, "resample": 3, "do_center_crop": True, "crop_size": {"height": 24, "width": 32},
            "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225],
        },
    ),
    "clip": (
        CLIPModel,
        CLIPConfig(text_config=TEXTS, vision_config={**SIZES, "image_size": 24}, projection_dim=12),
        {
            "size": {"shortest_edge": 24}, "resample": 3, "do_center_crop": True, "crop_size": {"height": 24, "width": 24},
            "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        },
    ),
}


def picture():
    """A disc over a gradient, with edges that a filter has to smooth."""
    y, x = torch.meshgrid(torch.arange(ROWS), torch.arange(COLUMNS), indexing="ij")
    disc = ((y - 15) ** 2 + (x - 34) ** 2 < 90).long()
    stripes = (x // 3 + y // 5) % 2
    planes = [x * 255 // COLUMNS, 255 * disc, 120 + 100 * stripes * (1 - disc)]
    # Noise of a seed with which no colour of a smaller picture is near the middle between two integers.
    noise = torch.randint(0, 31, (3, ROWS, COLUMNS), generator=torch.Generator().manual_seed(139))
    return (torch.stack(planes) * 7 // 8 + noise).to(torch.uint8)


def write_png(path, planes, size=None):
    """Writes planes (channels, rows, columns); the header has another `size` than theirs if one is given."""
    rows = planes.permute(1, 2, 0).contiguous()
    data = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rows)
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[len(planes)]
    rows, columns = size or planes.shape[1:]
    header = struct.pack(">IIBBBBB", columns, rows, 8, kind, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data, 9)) + chunk(b"IEND", b"")
    )


def write_kinds(folder):
    """One grey picture in the kinds that a PNG has, with and without transparency."""
    grey = (torch.arange(26 * 30) * 37 % 251).to(torch.uint8).reshape(1, 26, 30)
    for name, planes in {"grey": [grey], "grey_alpha": [grey, grey // 2], "rgb": [grey] * 3, "rgba": [grey] * 3 + [grey // 2]}.items():
        write_png(folder / f"{name}.png", torch.cat(planes))
    # A header of 2^40 pixels over the data of one, and a row of pixels that is far too wide once its height is 30.
    write_png(folder / "declares_too_much.png", grey[:, :1, :1], (1 << 20, 1 << 20))
    write_png(folder / "too_wide.png", torch.zeros(1, 1, 1 << 16, dtype=torch.uint8))


def pixels(planes, settings):
    size = settings["size"]
    rows, columns = planes.shape[1:]
    short = size.get("shortest_edge")
    to = (size["height"], size["width"]) if short is None else (short * rows // min(rows, columns), short * columns // min(rows, columns))
    mode = "bilinear" if settings["resample"] == 2 else "bicubic"
    resized = torch.nn.functional.interpolate(planes[None].double(), to, mode=mode, antialias=True)[0].round().clamp(0, 255)
    if settings.get("do_center_crop"):
        height, width = settings["crop_size"]["height"], settings["crop_size"]["width"]
        top, left = (to[0] - height) // 2, (to[1] - width) // 2
        resized = resized[:, top : top + height, left : left + width]
    column = lambda name: torch.tensor(settings[name])[:, None, None]
    return (resized.float() / 255 - column("image_mean")) / column("image_std")


@torch.no_grad()
def run(model, given):
    if isinstance(model, CLIPModel):
        output = model.vision_model(given[None], output_attentions=True)
        return model.visual_projection(output.pooler_output)[0], output.attentions
    output = model(given[None], output_attentions=True)
    return output.last_hidden_state[0, 0], output.attentions


def main():
    torch.set_num_threads(1)
    planes = picture()
    write_png(HERE / "picture.png", planes)
    write_kinds(HERE / "kinds")
    for name, (model_class, config, settings) in MODELS.items():
        torch.manual_seed(sum(map(ord, name)))
        model = model_class._from_config(config, attn_implementation="eager").float().eval()
        for key, parameter in model.named_parameters():
            is_factor = ("norm" in key and key.endswith("weight")) or "lambda" in key
            torch.nn.init.normal_(parameter, mean=float(is_factor), std=0.3)
        folder = HERE / "models" / name
        model.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        given = pixels(planes, settings)
        embedding, attentions = run(model, given)
        grid = (given.shape[1] // 8, given.shape[2] // 8)
        golden = {"pixels": given, "embedding": embedding}
        for layer, weights in enumerate(attentions):
            golden[f"attention.{layer}"] = weights[0, :, 0, 1:].reshape(-1, *grid)
        save_file({key: tensor.contiguous() for key, tensor in golden.items()}, folder / "golden.safetensors")


if __name__ == "__main__":
    main()
