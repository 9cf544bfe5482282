"""The systems of `models/`, in the order of the index."""

from . import book, d2l, frontend, packed, pieces, torch_mha


def all_systems():
    modules = (pieces, book, torch_mha, d2l, frontend, packed)
    return [system for module in modules for system in module.systems()]
