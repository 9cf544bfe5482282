"""Cells: what is measured, in the words of the Rust benches, which print the list (`cargo bench -- --list --json`)."""

from dataclasses import dataclass, fields

import ml_dtypes
import numpy as np

DTYPES = {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Cell:
    """One shape, dtype and mask; B batch, T_q queries, T_kv keys, H heads, H_kv key/value heads, D head size, E of a layer."""

    bench: str
    cell: str
    dtype: str
    b: int
    h: int
    h_kv: int
    t_q: int
    t_kv: int
    d: int
    mask: str
    window: int | None = None
    lens: tuple[int, ...] | None = None
    e: int | None = None

    @classmethod
    def from_json(cls, line):
        """The cell of one JSON object; fields that a cell does not have are left out."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in line.items() if name in known}
        if values.get("lens") is not None:
            values["lens"] = tuple(values["lens"])
        return cls(**values)

    @property
    def call(self):
        """The class of an engine that makes the cell ready."""
        return "Call" if self.e is None else "LayerCall"

    def make_inputs(self, total):
        """What the engines are fed: for decoding `total` bytes of keys and values."""
        if self.e is not None:
            return LayerInputs(self)
        return Inputs(self, 1 if self.bench != "decode" else max(1, -(-total // self.kv_bytes())))

    def work(self):
        """GFLOP of a call, 4 · D a visible pair and head and a layer's projections, and the bytes of k and v in GB."""
        keep = self.keep()
        pairs = self.b * self.t_q * self.t_kv if keep is None else int(keep.sum()) * (self.b // keep.shape[0])
        projections = 8 * self.b * self.t_q * (self.e or 0) ** 2
        return {"gflop": (4 * self.d * pairs * self.h + projections) / 1e9, "gb": self.kv_bytes() / 1e9}

    def samples(self, inputs):
        """A few rows of the result by the definition in f64: the index of each, and what it should be."""
        last, middle = (self.b - 1, self.h - 1, self.t_q - 1), (self.b // 2, self.h // 2, self.t_q // 2)
        for row in {(0, 0, 0), last, middle}:
            at = row if self.e is None else (row[0], row[2])
            yield at, (by_definition if self.e is None else layer_by_definition)(self, inputs, at)

    @property
    def causal(self):
        return self.mask.startswith("causal")

    @property
    def square_causal(self):
        """Causal, nothing else, and as many queries as keys: what every engine calls causal."""
        return self.mask == "causal" and self.t_q == self.t_kv

    @property
    def unmasked(self):
        """Whether every query sees every key: also one causal query, which stands at the last key."""
        return self.mask == "none" or (self.mask == "causal" and self.t_q == 1)

    def keep(self):
        """Which keys each query sees: bool (B or 1, 1, T_q, T_kv), or None when it sees all of them."""
        if self.unmasked:
            return None
        key = np.arange(self.t_kv)
        keep = np.ones((1, 1, self.t_q, self.t_kv), dtype=bool)
        if self.causal:
            own = np.arange(self.t_q)[:, None] + self.t_kv - self.t_q
            keep &= key <= own
            if self.window is not None:
                keep &= key > own - self.window
        if self.lens is not None:
            keep = keep & (key < np.array(self.lens)[:, None, None, None])
        return keep

    def additive(self):
        """The mask as a tensor to add to the scores, in the cell's dtype; None when nothing is hidden."""
        keep = self.keep()
        if keep is None:
            return None
        return np.where(keep, np.float32(0), np.float32(-np.inf)).astype(DTYPES[self.dtype])

    def kv_bytes(self):
        """Bytes of K and V that one call reads."""
        return 2 * self.b * self.h_kv * self.t_kv * self.d * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Projection:
    """(rows, inputs) times a weight (outputs, inputs), a copy after the other where it comes from memory."""

    bench: str
    cell: str
    dtype: str
    rows: int
    inputs: int
    outputs: int
    from_memory: bool

    call = "LinearCall"

    @classmethod
    def from_json(cls, line):
        """The cell of one JSON object."""
        sizes = line["rows"], line["in"], line["out"]
        return cls(line["bench"], line["cell"], line["dtype"], *sizes, line["from_memory"])

    def make_inputs(self, total):
        """What the engines are fed: where the weight comes from memory, `total` bytes of it."""
        return LinearInputs(self, max(1, -(-total // self.weight_bytes())) if self.from_memory else 1)

    def weight_bytes(self):
        """Bytes of the weight, which one call reads."""
        return self.inputs * self.outputs * DTYPES[self.dtype].itemsize

    def work(self):
        """GFLOP of a call, and the bytes of the weight in GB."""
        return {"gflop": 2 * self.rows * self.inputs * self.outputs / 1e9, "gb": self.weight_bytes() / 1e9}

    def samples(self, inputs):
        """A few rows of the result by the definition in f64: the index of each, and what it should be."""
        weight = inputs.weights[0].astype(np.float64)
        for row in {0, self.rows // 2, self.rows - 1}:
            yield row, weight @ inputs.x[row].astype(np.float64)


def from_json(line):
    """The cell of one JSON object."""
    return (Projection if line["bench"] == "linear" else Cell).from_json(line)


class LinearInputs:
    """x (rows, inputs) and copies of a weight (outputs, inputs), no bias."""

    def __init__(self, cell, copies):
        draw = np.random.default_rng(7)
        make = lambda *shape: draw.standard_normal(shape, dtype=np.float32)
        self.x = make(cell.rows, cell.inputs).astype(DTYPES[cell.dtype])
        weight = (make(cell.outputs, cell.inputs) / np.sqrt(cell.inputs)).astype(DTYPES[cell.dtype])
        self.weights = [weight] + [weight.copy() for _ in range(copies - 1)]


class Inputs:
    """q (B, H, T_q, D) and copies of k and v (B, H_kv, T_kv, D): several for decoding, so that no cache holds them."""

    def __init__(self, cell, copies):
        draw = np.random.default_rng(7)
        make = lambda *shape: draw.standard_normal(shape, dtype=np.float32).astype(DTYPES[cell.dtype])
        self.q = make(cell.b, cell.h, cell.t_q, cell.d)
        k = make(cell.b, cell.h_kv, cell.t_kv, cell.d)
        v = make(cell.b, cell.h_kv, cell.t_kv, cell.d)
        self.kv = [(k, v)] + [(k.copy(), v.copy()) for _ in range(copies - 1)]


def by_definition(cell, inputs, at):
    """Attention in f64 by its definition, for one (sequence, head, query): (D,)."""
    sequence, head, query = at
    k, v = (part[sequence, head // (cell.h // cell.h_kv)].astype(np.float64) for part in inputs.kv[0])
    scores = k @ inputs.q[sequence, head, query].astype(np.float64) / np.sqrt(cell.d)
    keep = cell.keep()
    if keep is not None:
        scores = np.where(keep[sequence % keep.shape[0], 0, query], scores, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights @ v / weights.sum()


class LayerInputs:
    """x (B, T, E), the packed projection (3 E, E) of q, k and v, and the output projection (E, E); no biases."""

    def __init__(self, cell):
        draw = np.random.default_rng(7)
        make = lambda *shape: draw.standard_normal(shape, dtype=np.float32)
        self.x = make(cell.b, cell.t_q, cell.e).astype(DTYPES[cell.dtype])
        self.w_in = (make(3 * cell.e, cell.e) / np.sqrt(cell.e)).astype(DTYPES[cell.dtype])
        self.w_out = (make(cell.e, cell.e) / np.sqrt(cell.e)).astype(DTYPES[cell.dtype])


def layer_by_definition(cell, inputs, at):
    """A causal layer in f64 by its definition, for one (sequence, query): (E,)."""
    sequence, query = at
    seen = inputs.x[sequence, : query + 1].astype(np.float64) @ inputs.w_in.astype(np.float64).T
    q, k, v = (part.reshape(query + 1, cell.h, cell.d) for part in np.split(seen, 3, axis=1))
    scores = np.einsum("hd,thd->ht", q[query], k) / np.sqrt(cell.d)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.einsum("ht,thd->hd", weights, v).reshape(-1) @ inputs.w_out.astype(np.float64).T


# The largest gap to the definition, relative to the row's largest entry. f32: sums of some thousand terms in another
# order. f16 and bf16: the weights are rounded to 11 and 8 bits before they meet the values.
TOLERANCE = {"f32": 1e-4, "f16": 1e-2, "bf16": 5e-2}


def check(cell, inputs, found):
    """Raises ArithmeticError when a context (B, H, T_q, D), a layer's output (B, T, E) or a product (rows, outputs) is not
    what the definition gives, on a few rows."""
    for at, want in cell.samples(inputs):
        gap = np.abs(found[at].astype(np.float64) - want).max() / np.abs(want).max()
        if not gap <= TOLERANCE[cell.dtype]:
            raise ArithmeticError(f"differs from the definition by {gap:.1e} at {at}")
