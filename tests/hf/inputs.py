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


def in_a_window(config):
    """The mask of a window, for a model that has one and that transformers forgets it in."""
    distance = torch.arange(13)[:, None] - torch.arange(13)
    hidden = (distance < 0) | (distance >= config.sliding_window)
    mask = torch.zeros(2, 1, 13, 13).masked_fill(hidden, torch.finfo(torch.float).min)
    return {"input_ids": torch.randint(3, config.vocab_size, (2, 13)), "attention_mask": mask}
