"""Makes training.safetensors: the losses of 20 steps, or 2, of some of `models/`, as transformers trains them from their weights.

python tests/causal_lm/training.py     (packages: tests/hf/requirements.txt)

AdamW without decay, over all parameters; the loss is the cross entropy of the token that follows, over the `ids` of
golden.safetensors.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

MODELS = ["llama", "llama_tied", "gemma3_text", "gpt2", "cohere", "mixtral", "qwen3_5_text", "olmo_hybrid"]
STEPS = 20
# After these, transformers in f32 is not near transformers in f64: keys are normalised, Adam divides small gradients.
FEWER_STEPS = {"qwen3_5_text": 2, "olmo_hybrid": 2}


def losses(folder):
    # Without dropout.
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids = load_file(folder / "golden.safetensors")["ids"].long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(FEWER_STEPS.get(folder.name, STEPS)):
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    print(folder.name, losses[0].item(), losses[-1].item())
    return torch.stack(losses)


def main():
    root = Path(__file__).resolve().parent
    tensors = {model: losses(root / "models" / model) for model in MODELS}
    save_file(tensors, root / "training.safetensors")


main()
