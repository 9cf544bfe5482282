"""Writes attentions.json: the weights of transformers in each layer of a checkpoint, as a mean over heads, without padding.

python tests/examples/make.py
"""
import json
from pathlib import Path

import torch
from transformers import AutoModel

TESTS = Path(__file__).parent.parent
CHECKPOINTS = {
    "causal_lm/models/gpt2": [[1, 2], [3, 4, 5]],
    "sentence_embedding/models/bert": [[2, 5, 6, 3], [2, 8, 9, 10, 11, 3]],
}

maps = {}
for checkpoint, texts in CHECKPOINTS.items():
    model = AutoModel.from_pretrained(TESTS / checkpoint, attn_implementation="eager", dtype=torch.float64).eval()
    layers = zip(*(model(torch.tensor([ids]), output_attentions=True).attentions for ids in texts))
    maps[checkpoint] = [[weights[0].mean(0).tolist() for weights in layer] for layer in layers]
rounded = json.loads(json.dumps(maps), parse_float=lambda number: round(float(number), 4))
(Path(__file__).parent / "attentions.json").write_text(json.dumps(rounded) + "\n")
