"""Random weights for models whose attention is recorded, here and by the census in `crates/compare/`."""

import torch


@torch.no_grad()
def randomise(model, fan_in):
    """Every parameter random; products of unit size, so that attention is neither flat nor one-hot. `fan_in` is how many
    numbers a product of a parameter sums."""
    for name, parameter in sorted(model.named_parameters()):
        # Tables of sines.
        if not parameter.requires_grad:
            continue
        draw = torch.randn(parameter.shape)
        if parameter.ndim >= 2 and "norm" not in name.lower():
            embeds = "embed" in name or "sinks" in name
            parameter.copy_(draw if embeds else 1.5 * draw / fan_in(parameter) ** 0.5)
        elif "norm" in name.lower() and name.endswith("weight"):
            parameter.copy_(1 + 0.3 * draw)
        else:
            parameter.copy_(0.5 * draw)
    # Factors of rotary frequencies, which are learned and no parameters.
    for name, buffer in model.named_buffers():
        if name.endswith("rotary_emb.alpha"):
            buffer.copy_(0.3 * torch.randn(buffer.shape))
