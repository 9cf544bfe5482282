"""Inputs: the numbers the tutorials state, and a grid of exact numbers for every other input."""

import hashlib
import math

import torch

# "Your journey starts with one step": six tokens of three features (Raschka, chapter 3).
JOURNEY = (
    (0.43, 0.15, 0.89),
    (0.55, 0.87, 0.66),
    (0.57, 0.85, 0.64),
    (0.22, 0.58, 0.33),
    (0.77, 0.25, 0.10),
    (0.05, 0.80, 0.55),
)

# The vocabulary of the front-end tutorial; a token's place is its id.
VOCAB = ("<pad>", "hello", "world", "how", "are", "you", "?")

BOOK = "Sebastian Raschka, Build a Large Language Model (From Scratch), chapter 3"
SHORT = "A tutorial that retells the book's chapter 3 under short names (Wq, Wk, Wv, Wo)"
D2L = "Zhang, Lipton, Li, Smola, Dive into Deep Learning, attention scoring functions and multi-head attention"
FRONT_END = "A tutorial for front-end developers: a tokenizer, an embedding and one self-attention"
HAND = "A tutorial on the book's chapter 3, in a worked example"
SNIPPET = "A tutorial's snippet, with the fault that it has and without"


def journey(batch=None):
    """The book's tokens, (6, 3), or `batch` copies of them, (batch, 6, 3)."""
    tokens = torch.tensor(JOURNEY)
    return tokens if batch is None else torch.stack([tokens] * batch)


def grid(label, *shape):
    """Multiples of 1/64 in [-2, 2), a function of the label alone; f16 and bf16 hold them without rounding."""
    data = hashlib.shake_256(label.encode()).digest(math.prod(shape))
    return ((torch.tensor(list(data), dtype=torch.float32) - 128) / 64).reshape(shape)


def randomise(module, seed):
    """Fill every parameter, biases too, with uniform numbers in (-0.5, 0.5), in state-dict order."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return module
