"""Inputs that several models need beside ids: for the models here and for the census."""

import torch


def beside_an_image(config):
    """Text, an image of 2 x 3 patches, text; the second row begins later."""
    time = [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 9]
    height = [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9]
    width = [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9]
    positions = torch.tensor([time, height, width])[:, None].repeat(1, 2, 1)
    positions[:, 1] += 2
    ids = torch.randint(3, config.vocab_size, (2, 13))
    return {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones(2, 13, dtype=torch.long)}
