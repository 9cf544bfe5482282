"""Times this crate, PyTorch, ONNX Runtime and OpenVINO in turn, and writes BENCHMARKS.md: see README.md."""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

PEERS = {"torch": "PyTorch", "onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
# Worker threads spin for a while after a call; they stop within this, so that they are not in the next engine's way.
PAUSE = 0.03


def main():
    args = arguments()
    settle_threads(args.threads)
    # Imports come after the settings that the libraries read when they are loaded.
    import report
    from ours import Benches, ROOT

    peers, versions = load_peers(args)
    benches = Benches(args.threads, args.total)
    cells = [c for c in benches.cells() if (args.only or "") in c.cell and args.dtype in (None, c.dtype)]
    cells = [c for c in cells if args.bench in (None, c.bench)]
    results = []
    for number, cell in enumerate(cells, 1):
        result = time_cell(cell, peers, benches, args)
        results.append(result)
        disturbed = result["others"] is not None and result["others"] > report.DISTURBED
        note = f" (others used {result['others']:.0%} of the processor)" if disturbed else ""
        summary = ", ".join(f"{name} {t['ms']:.2f} ms" for name, t in result["times"].items() if "ms" in t)
        say(f"[{number}/{len(cells)}] {cell.bench} {cell.cell}: {summary}{note}")
    out = Path(args.out) if args.out else ROOT / "BENCHMARKS.md"
    plot = Path(args.plot) if args.plot else ROOT / "docs" / "benchmarks.svg"
    report.write(out, plot, results, {"threads": args.threads, "versions": versions, "command": command_line()})
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1, default=vars))
    say(f"wrote {out} and {plot}")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="SUBSTRING", help="only the cells whose name contains this")
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"], help="only the cells of this dtype")
    parser.add_argument("--bench", choices=["sdpa", "decode", "layer", "linear"], help="only the cells of this bench")
    parser.add_argument("--peers", default=",".join(PEERS), help="which peers, by comma (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each engine has its turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="for every engine")
    parser.add_argument("--total", type=int, default=1024, metavar="MIB", help="keys and values, or weights, when decoding")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds that one call may take")
    parser.add_argument("--out", metavar="FILE", help="the document (default: BENCHMARKS.md of the repository)")
    parser.add_argument("--plot", metavar="FILE", help="the plot (default: docs/benchmarks.svg of the repository)")
    parser.add_argument("--json", metavar="FILE", help="also every result, as JSON")
    return parser.parse_args()


def settle_threads(threads):
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    # NumPy asks for huge pages for its arrays. Tensors of the libraries and of Candle lie in plain memory.
    os.environ["NUMPY_MADVISE_HUGEPAGE"] = "0"


def load_peers(args):
    """Engine modules by name, None for one that is not installed, and what to write about each."""
    peers, versions = {}, {}
    for module in args.peers.split(","):
        name = PEERS.get(module, module)
        try:
            peers[name] = importlib.import_module(f"{module}_engine")
            peers[name].start(args.threads)
            versions[name] = peers[name].VERSION
        except ImportError as error:
            peers[name], versions[name] = None, f"missing ({error})"
    return peers, versions


def time_cell(cell, peers, benches, args):
    """Everything about one cell: `times` holds `ms` (the median) and `ms_min`, or `skipped` with the reason, by engine."""
    from machine import Load

    calls, times = prepare(cell, peers, args), {}
    for name, call in calls.items():
        if isinstance(call, str):
            times[name] = {"skipped": call}
    ready = {name: call for name, call in calls.items() if not isinstance(call, str)}
    turns = {name: [] for name in ready}
    ours = []
    load = Load()
    try:
        for _ in range(args.rounds):
            ours += benches.time(cell, "ours", 5)
            for name, call in ready.items():
                turns[name].append(turn(call))
        others = load.others()
        lines = benches.time(cell, "reference,flash,hand-written,linear", 3)
    except RuntimeError as error:
        others, lines = load.others(), []
        times["candle-attention"] = {"skipped": str(error)}
    for name, taken in turns.items():
        if taken:
            each = [ms for one in taken for ms in one]
            times[name] = {"ms": statistics.median(map(statistics.median, taken)), "ms_min": min(each)}
    timed = [line for line in ours if "ms" in line]
    if timed:
        ms = statistics.median(line["ms"] for line in timed)
        times["candle-attention"] = {"ms": ms, "ms_min": min(line["ms_min"] for line in timed), "plan": timed[0]["plan"]}
    for line in (ours[:1] if not timed else []) + lines:
        times[line["name"]] = {key: line[key] for key in ("ms", "ms_min", "skipped") if key in line}
    return {"cell": cell, "times": times, "others": others, "work": cell.work(), "limits": limits(timed + lines)}


def prepare(cell, peers, args):
    """A checked call for each peer that is timed in cells of this kind, or the reason why there is none."""
    from cells import check

    inputs = cell.make_inputs(args.total << 20)
    calls = {}
    for name, module in peers.items():
        if module is None:
            calls[name] = "not installed"
            continue
        if not hasattr(module, cell.call):
            continue
        try:
            call = getattr(module, cell.call)(cell, inputs)
            start = time.perf_counter()
            found = call.result()
            seconds = time.perf_counter() - start
            check(cell, inputs, found)
            calls[name] = call if seconds < args.patience else f"about {seconds:.0f} s a call"
        except Exception as error:  # A peer fails in its own ways, and its row says how.
            calls[name] = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    return calls


def turn(call, seconds=0.2):
    """Milliseconds of each call in one turn, after one that is not counted."""
    time.sleep(PAUSE)
    call.run()
    taken, end = [], time.perf_counter() + seconds
    while not taken or time.perf_counter() < end:
        start = time.perf_counter()
        call.run()
        taken.append((time.perf_counter() - start) * 1e3)
    return taken


def limits(lines):
    """What the machine reached on registers and memory while the cell was timed: the best of the measurements."""
    best = {}
    for line in lines:
        if line.get("peak_gflops", 0) > best.get("peak_gflops", 0):
            best |= {"peak_gflops": line["peak_gflops"], "peak_name": line["peak_name"]}
        if line.get("peak_gb_s", 0) > best.get("peak_gb_s", 0):
            best["peak_gb_s"] = line["peak_gb_s"]
    return best


def command_line():
    return "python crates/compare/peers/run.py" + "".join(f" {argument}" for argument in sys.argv[1:])


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
