"""Times PyTorch on the cells that `device_times --list` prints, in the same way as device_times: see beside_pytorch.py."""

import math
import time
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# A backend that does not take a call is left out, which PyTorch warns of several times for each call.
warnings.filterwarnings("ignore", category=UserWarning, module=__name__)

TURN = 0.04  # seconds of calls between two looks at the clock
TURNS = 5
LONG = 0.5  # a call that takes longer is timed once
CACHED = 256 << 20  # decoding walks through more bytes of keys and values than this
TOKENS = 64
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# The best of these counts. cuDNN's kernels are for Hopper alone.
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)


class Skipped(Exception):
    """A reason why a cell is not timed."""


def time_cell(cell: dict, device: str) -> float:
    """Returns milliseconds, or MiB for a cell of memory."""
    work = cell["work"]
    kinds = {
        "attention": lambda: time_attention(work, device),
        "memory": lambda: memory(work, device),
        "delta_rule": lambda: time_delta_rule(work, device),
        "layer": lambda: time_layer(work, device),
        "model": lambda: time_model(cell, device),
    }
    if work["kind"] not in kinds:
        raise Skipped("compared with another row")
    return kinds[work["kind"]]()


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call, device: str) -> float:
    """Returns the median time of `call(n)` over some turns."""

    def turn(calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for n in range(calls):
            call(n)
        synchronize(device)
        return (time.perf_counter() - start) / calls

    turn(1)
    one_call = turn(1)
    if one_call > LONG:
        return 1e3 * one_call
    calls = min(max(math.ceil(TURN / max(one_call, 1e-6)), 1), 10_000)
    return 1e3 * sorted(turn(calls) for _ in range(TURNS))[TURNS // 2]


def best_of_backends(measure) -> float:
    """Returns the least result of `measure` over the backends that take the call."""
    results, reason = [], "no backend"
    for backend in BACKENDS:
        try:
            with sdpa_kernel(backend):
                results.append(measure())
        except RuntimeError as error:
            reason = str(error).splitlines()[0].split(". ")[0]
    if not results:
        raise Skipped(reason)
    return min(results)


def bandwidth(device: str) -> float:
    """Returns the GB/s at which the device reads 1 GiB."""
    numbers = torch.ones(1 << 27, dtype=torch.int64, device=device)
    return numbers.numel() * 8 / milliseconds(lambda _: numbers.sum(), device) / 1e6


class Attention:
    """A call of scaled_dot_product_attention."""

    def __init__(self, work: dict, device: str, copies: int):
        self.work = work
        dtype, d = DTYPES[work["dtype"]], work["d"]
        b, t_q, t_kv = work["b"], work["t_q"], work["t_kv"]
        training = work["training"]

        def draw(heads: int, t: int, sequences: int = b):
            return torch.randn(sequences, heads, t, d, device=device).to(dtype).requires_grad_(training)

        self.packed = work["mask"] == "packed"
        if self.packed:
            # One sequence after the other: scaled_dot_product_attention takes no packed sequences.
            self.inputs = [[draw(work["h"], t, 1) for _ in range(3)] for t in work["lens"]]
        else:
            self.inputs = [[draw(work["h"], t_q), draw(work["h_kv"], t_kv), draw(work["h_kv"], t_kv)] for _ in range(copies)]
        self.training = training
        self.mask = self.make_mask(dtype, device)

    def make_mask(self, dtype: torch.dtype, device: str):
        work = self.work
        b, h, t_q, t_kv = work["b"], work["h"], work["t_q"], work["t_kv"]
        keys = torch.arange(t_kv, device=device)
        queries = torch.arange(t_q, device=device)[:, None] + t_kv - t_q
        match work["mask"]:
            case "lengths":
                lens = torch.tensor(work["lens"], device=device)
                return (keys < lens[:, None])[:, None, None].expand(b, 1, t_q, t_kv)
            case "window":
                return (keys <= queries) & (keys > queries - work["window"])
            case "alibi":
                slopes = 2.0 ** (-8.0 * torch.arange(1, h + 1, device=device) / h)
                biases = -slopes[:, None, None] * (queries - keys).abs()
                return biases.masked_fill(keys > queries, -math.inf).to(dtype)[None].expand(b, h, t_q, t_kv)
            case "bias":
                return torch.randn(1, h, t_q, t_kv, device=device).to(dtype).expand(b, h, t_q, t_kv)
            case "boolean_mask":
                return torch.rand(b, 1, t_q, t_kv, device=device) > 0.1
        return None

    def run(self, n: int):
        work = self.work
        causal, grouped = work["mask"] in ("causal", "packed"), work["h"] != work["h_kv"]
        calls = self.inputs if self.packed else [self.inputs[n % len(self.inputs)]]
        for q, k, v in calls:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=causal, enable_gqa=grouped)
        if self.training:
            return torch.autograd.grad(y, calls[-1], torch.ones_like(y))
        return y


def time_attention(work: dict, device: str) -> float:
    kv_bytes = 2 * work["b"] * work["h_kv"] * work["t_kv"] * work["d"] * DTYPES[work["dtype"]].itemsize
    call = Attention(work, device, -(-CACHED // kv_bytes) if work["t_q"] == 1 else 1)
    return best_of_backends(lambda: milliseconds(call.run, device))


def memory(work: dict, device: str) -> float:
    if device != "cuda":
        raise Skipped("the peak of memory is measured on CUDA devices only")
    call = Attention(work, device, 1)

    def measure() -> float:
        call.run(0)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call.run(0)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    return best_of_backends(measure)


def time_delta_rule(work: dict, device: str) -> float:
    if work["reference"]:
        raise Skipped("a path of this crate")
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as function
    except ImportError:
        try:
            from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule as function
        except ImportError:
            raise Skipped("neither flash-linear-attention nor transformers with Qwen3-Next is installed")
    h, t, d, training = work["h"], work["t"], work["d"], work["training"]

    def variable(tensor):
        return tensor.requires_grad_(training)

    q, k, v = (variable(torch.randn(1, t, h, d, device=device).to(torch.bfloat16)) for _ in range(3))
    g = variable(-0.1 * torch.rand(1, t, h, device=device))
    beta = variable(torch.rand(1, t, h, device=device).to(torch.bfloat16))

    def call(_):
        y = function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]
        return torch.autograd.grad(y, [q, k, v, g, beta], torch.ones_like(y)) if training else y

    return milliseconds(call, device)


class Layer(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (torch.nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, xs):
        b, t, width = xs.shape
        q, k, v = (projection(xs).view(b, t, self.heads, -1).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, t, width))


def time_layer(work: dict, device: str) -> float:
    layer = Layer(work["embed_dim"], work["h"]).to(device, DTYPES[work["dtype"]])
    shape = (work["b"], work["t"], work["embed_dim"])
    xs = torch.randn(shape, device=device).to(DTYPES[work["dtype"]]).requires_grad_()
    inputs = [xs, *layer.parameters()]

    def step(_):
        y = layer(xs)
        return torch.autograd.grad(y, inputs, torch.ones_like(y))

    return best_of_backends(lambda: milliseconds(step, device))


# The model, which two cells share.
MODELS: dict = {}


def time_model(cell: dict, device: str) -> float:
    try:
        from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise Skipped("transformers is not installed")
    if "llama" not in MODELS:
        config = LlamaConfig(**{name: value for name, value in cell["config"].items() if name != "model_type"})
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(device):
            MODELS["llama"] = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    model, vocabulary = MODELS["llama"], cell["config"]["vocab_size"]
    ids = (torch.arange(cell["prompt"], device=device) * 7919 + 13) % vocabulary

    @torch.inference_mode()
    def prompt(_=0):
        cache = DynamicCache()
        model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    if cell["work"]["step"] == "prompt":
        return milliseconds(prompt, device)

    @torch.inference_mode()
    def token() -> float:
        cache = prompt()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(TOKENS):
            model(ids[None, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
        synchronize(device)
        return 1e3 * (time.perf_counter() - start) / TOKENS

    return min(token() for _ in range(2))
