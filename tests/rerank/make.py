"""Makes `models/`: tiny random cross-encoders, and the scores that transformers gives for pairs.

python tests/rerank/make.py     (packages: tests/hf/requirements.txt)

The passages are `tests/sentence_embedding/sentences.txt`, the tokenizers those of that folder's `make.py`, which puts two
texts together as each family does. A folder holds `config.json` and `model.safetensors` as `save_pretrained` writes them,
`tokenizer.json`, and `golden.safetensors`: `scores` (N,) of the question with each passage, cut at 16 tokens, the longer
text first. Eager attention, f32.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSequenceClassification

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(HERE.parent / "sentence_embedding"))
from make import MODELS, SENTENCES, tokenizer

QUESTION = "someone plays guitar in the rain"
PAIRS = {
    "bert": ("[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
    "distilbert": ("[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
    "xlm-roberta": ("<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0", ["<s>", "</s>"]),
    "mpnet": ("<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0", ["<s>", "</s>"]),
}


@torch.no_grad()
def main():
    torch.set_num_threads(1)
    for name, (pair, special) in PAIRS.items():
        tokens = tokenizer(name)
        ids = [(token, tokens.token_to_id(token)) for token in special]
        single = pair.split(" $B")[0].removesuffix(" </s>:0" if "</s>:0 </s>:0" in pair else "")
        tokens.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)
        torch.manual_seed(sum(map(ord, name)))
        config = AutoConfig.for_model(name, vocab_size=tokens.get_vocab_size(), num_labels=1, **MODELS[name])
        model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").float().eval()
        for key, parameter in model.named_parameters():
            is_norm = "norm" in key.lower() and key.endswith("weight")
            torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.4)
        folder = HERE / "models" / name
        model.save_pretrained(folder)
        tokens.enable_truncation(16)
        encodings = [tokens.encode(QUESTION, sentence) for sentence in SENTENCES]
        tokens.no_truncation()
        tokens.save(str(folder / "tokenizer.json"))
        scores = []
        for encoding in encodings:
            segments = {} if name in ("distilbert", "mpnet") else {"token_type_ids": torch.tensor([encoding.type_ids])}
            given = torch.tensor([encoding.ids])
            scores.append(model(given, attention_mask=torch.ones_like(given), **segments).logits[0, 0])
        save_file({"scores": torch.stack(scores)}, folder / "golden.safetensors")
        print(name, [len(encoding.ids) for encoding in encodings], [round(score.item(), 3) for score in scores])


if __name__ == "__main__":
    main()
