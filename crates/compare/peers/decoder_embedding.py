"""Times a decoder that embeds texts, here and in sentence-transformers and OpenVINO, in turn: see README.md.

The model has the sizes of Qwen3-Embedding-0.6B and random weights, with the tokenizer of SmolLM2. Its vectors are the
states of the last tokens, normalised.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import real

FOLDER = real.DATA / "decoder-embedding"
DTYPES = ("f32", "bf16")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each engine has its turn (default: %(default)s)")
    parser.add_argument("--texts", type=int, default=256, help="the number of texts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument("--engine", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine, dtype = args.engine
        print(json.dumps(ENGINES[engine](dtype, real.texts()[: args.texts], args.threads)))
        return
    subprocess.run(["cargo", "build", "--release", "--quiet", "--example", "sentence_embedding"], cwd=real.ROOT, check=True)
    prepare()
    rates = {}
    for round in range(args.rounds):
        for dtype in DTYPES:
            for engine in ENGINES:
                print(f"{dtype}, round {round + 1}: {engine}", file=sys.stderr)
                rate = turn(engine, dtype, args)
                if rate is not None:
                    rates.setdefault((dtype, engine), []).append(rate)
    print(f"| {args.texts} texts of 3 to 230 words, {args.threads} threads | texts/s | least cosine to PyTorch's in f32 |")
    print("| --- | ---: | ---: |")
    expected = vectors("sentence-transformers", "f32")
    for (dtype, engine), all in rates.items():
        cosine = (vectors(engine, dtype) * expected).sum(1).min()
        if cosine < {"f32": 0.99999, "bf16": 0.99}[dtype]:
            sys.exit(f"{engine} gives other vectors in {dtype}: cosine {cosine}")
        print(f"| {dtype}, {engine} | {statistics.median(all):.2f} | {cosine:.6f} |")


def turn(engine, dtype, args):
    """Returns one engine's texts per second, from a process of its own, or None where it fails, which is printed."""
    program = [__file__, "--engine", engine, dtype, "--texts", args.texts, "--threads", args.threads]
    return real.in_process(program, f"{engine} {dtype}", args.threads)


def prepare():
    """Makes the checkpoint, as sentence-transformers saves it."""
    if (FOLDER / "modules.json").is_file():
        return
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

    real.prepare_language()
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=32_768,
        rope_theta=1_000_000,
        tie_word_embeddings=True,
    )
    base = FOLDER.with_name("decoder-embedding-base")
    Qwen3Model(config).save_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(real.checkpoint())
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    transformer = models.Transformer(str(base), max_seq_length=512)
    pooling = models.Pooling(transformer.get_word_embedding_dimension(), pooling_mode="lasttoken")
    SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu").save(str(FOLDER))


def vectors(engine, dtype):
    import numpy

    return numpy.load(real.DATA / f"{engine}-{dtype}.npy")


def keep(engine, dtype, rows):
    import numpy

    numpy.save(real.DATA / f"{engine}-{dtype}.npy", numpy.asarray(rows, numpy.float32))


def run_ours(dtype, texts, threads):
    """Texts per second without the time to load, which is the time of a single text."""
    from safetensors.numpy import load_file

    out = real.DATA / "vectors.safetensors"
    loading = min(real.seconds_to_embed(FOLDER, out, texts[:1], "--dtype", dtype) for _ in range(2))
    taken = real.seconds_to_embed(FOLDER, out, texts, "--dtype", dtype) - loading
    keep("candle-attention", dtype, load_file(out)["embeddings"])
    return (len(texts) - 1) / taken


def run_sentence_transformers(dtype, texts, threads):
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    options = {"dtype": {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]}
    model = SentenceTransformer(str(FOLDER), device="cpu", model_kwargs=options)
    model.encode(texts[:1])
    start = time.perf_counter()
    rows = model.encode(texts, batch_size=32, convert_to_tensor=True)
    rate = len(texts) / (time.perf_counter() - start)
    keep("sentence-transformers", dtype, rows.float().numpy())
    return rate


def openvino_file():
    """Converts the model, with sizes that may vary."""
    path = real.DATA / "decoder-embedding.xml"
    if not path.is_file():
        import openvino
        import torch
        from transformers import AutoModel

        class Last(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = AutoModel.from_pretrained(FOLDER, attn_implementation="sdpa", dtype=torch.float32).eval()
                self.model.config.use_cache = False

            def forward(self, input_ids, attention_mask):
                # The library takes a mask of four dimensions as it is.
                size = input_ids.shape[1]
                allowed = torch.ones(size, size, dtype=torch.bool).tril()[None, None] & attention_mask.bool()[:, None, None, :]
                mask = torch.zeros(1).masked_fill(~allowed, torch.finfo(torch.float32).min)
                return self.model(input_ids=input_ids, attention_mask=mask).last_hidden_state

        tokens = torch.ones(2, 8, dtype=torch.long)
        example = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        sizes = [("input_ids", [-1, -1]), ("attention_mask", [-1, -1])]
        with torch.no_grad():
            model = openvino.convert_model(Last(), example_input=example, input=sizes)
        openvino.save_model(model, path, compress_to_fp16=False)
    return path


def run_openvino(dtype, texts, threads):
    """Texts per second, tokenised before, texts of about one length together."""
    import numpy
    import openvino
    from transformers import AutoTokenizer

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": dtype}
    request = openvino.Core().compile_model(openvino_file(), "CPU", settings).create_infer_request()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    encoded = [tokenizer(text, truncation=True, max_length=512)["input_ids"] for text in texts]
    order = sorted(range(len(encoded)), key=lambda text: len(encoded[text]))

    def batch(members):
        longest = max(len(encoded[text]) for text in members)
        tokens = numpy.zeros((len(members), longest), numpy.int64)
        mask = numpy.zeros_like(tokens)
        for row, text in enumerate(members):
            tokens[row, : len(encoded[text])] = encoded[text]
            mask[row, : len(encoded[text])] = 1
        states = request.infer({"input_ids": tokens, "attention_mask": mask})[0]
        last = states[numpy.arange(len(members)), [len(encoded[text]) - 1 for text in members]]
        return last / numpy.linalg.norm(last, axis=1, keepdims=True)

    batch(order[:1])
    rows = [None] * len(texts)
    start = time.perf_counter()
    for first in range(0, len(order), 32):
        members = order[first : first + 32]
        for text, row in zip(members, batch(members)):
            rows[text] = row
    rate = len(texts) / (time.perf_counter() - start)
    keep("openvino", dtype, numpy.stack(rows))
    return rate


ENGINES = {
    "candle-attention": run_ours,
    "sentence-transformers": run_sentence_transformers,
    "openvino": run_openvino,
}

if __name__ == "__main__":
    main()
