"""BENCHMARKS.md and its plot."""

import os

import machine

# Others' share of the processor from which a cell is marked as disturbed.
DISTURBED = 0.05
OURS = "candle-attention"
TITLES = {
    "sdpa": ("Attention", "GFLOP/s of visible (query, key) pairs: what a mask hides is not counted as work."),
    "decode": ("Decoding", "GB/s of keys and values read; each call takes the next of many copies, which no cache holds."),
    "layer": ("Whole layers", "Four projections, no biases, around causal attention; GFLOP/s count both."),
    "linear": (
        "Projections",
        "Rows, inputs x outputs. From memory each call takes the next of many copies of the weight, which no cache holds; the\n"
        "limit is then what reading it allows.",
    ),
}
HEAD = """# Benchmarks

This file is written by a command, and overwritten by the next run of it:

```text
{command}
```

Processor: {processor}. Every engine uses {threads} threads. {versions}.

A cell is timed in rounds in which each engine has its turn, so that what slows the machine slows all of them; times
are medians of the rounds. A ratio is the engine's time over this crate's in the same cell: above 1, this crate is
faster. Each engine's numbers are checked against the definition in f64 before it is timed. The limit is measured in
the same run: the multiply-adds that all threads reach on registers for the dtype, and for decoding the speed at which
they read memory.
"""


def write(path, plot, results, run):
    """Writes the document and the plot."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    processor = machine.processor()
    parts = [HEAD.format(processor=processor, threads=run["threads"], versions=versions, command=run["command"])]
    notes = []
    for bench, (title, explanation) in TITLES.items():
        chosen = [result for result in results if result["cell"].bench == bench]
        if chosen:
            parts.append(f"## {title}\n\n{explanation}\n\n{_table(bench, chosen, notes)}\n")
    if notes:
        lines = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
        parts.append("## Notes\n\n" + "\n".join(lines) + "\n")
    plot.parent.mkdir(parents=True, exist_ok=True)
    if _draw(plot, results):
        parts.insert(1, f"![Speed by engine]({os.path.relpath(plot, path.parent)})\n")
    path.write_text("\n".join(parts))


def _engines(results):
    """This crate first, then the others in the order in which they turn up."""
    return list(dict.fromkeys([OURS] + [name for result in results for name in result["times"]]))


def speed(result, name):
    """GB/s when decoding, else GFLOP/s; None where the engine was not timed."""
    ms = result["times"].get(name, {}).get("ms")
    return None if ms is None else result["work"]["gb" if result["cell"].bench == "decode" else "gflop"] / ms * 1e3


def _table(bench, results, notes):
    engines = [name for name in _engines(results) if any(name in result["times"] for result in results)]
    unit = "GB/s" if bench == "decode" else "GFLOP/s"
    head = ["cell", f"limit, {unit}"] + [f"{name}, {unit} ({'of limit' if name == OURS else 'ratio'})" for name in engines]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for result in results:
        limit = _limit(result)
        rows.append([_name(result, notes), "" if limit is None else f"{limit:.{1 if bench == 'decode' else 0}f}"])
        rows[-1] += [_entry(result, name, limit, notes) for name in engines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _limit(result):
    """GB/s when decoding, else GFLOP/s: what the registers reach, or what reading the weight from memory allows."""
    cell, limits, work = result["cell"], result["limits"], result["work"]
    if cell.bench == "decode":
        return limits.get("peak_gb_s")
    if cell.bench != "linear" or not cell.from_memory or "peak_gb_s" not in limits:
        return limits.get("peak_gflops")
    return min(limits["peak_gflops"], limits["peak_gb_s"] * work["gflop"] / work["gb"])


def _name(result, notes):
    others = result["others"]
    plan = result["times"].get(OURS, {}).get("plan", "")
    marks = ""
    if others is not None and others > DISTURBED:
        marks += _mark("Other processes used more than a twentieth of the processor meanwhile: not to be relied on.", notes)
    if plan.startswith("Reference"):
        marks += _mark(f"{OURS} ran its reference path ({plan}).", notes)
    return result["cell"].cell + marks


def _entry(result, name, limit, notes):
    times = result["times"].get(name)
    if times is None:
        return ""
    if "ms" not in times:
        return "—" + _mark(f"{name}: {times['skipped']}.", notes)
    value = speed(result, name)
    text = f"{value:.1f}" if result["cell"].bench == "decode" else f"{value:.0f}"
    ours = result["times"].get(OURS, {}).get("ms")
    if name == OURS:
        return text if limit is None else f"**{text}** ({100 * value / limit:.0f} %)"
    return text if ours is None else f"{text} ({times['ms'] / ours:.2f})"


def _mark(note, notes):
    if note not in notes:
        notes.append(note)
    return f" [{notes.index(note) + 1}]"


def _draw(path, results):
    """Bars of each engine's speed in each cell; whether there was something to draw and something to draw with."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("svg")
    # Text stays text, and the same results give the same file.
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "benchmarks"}
    from matplotlib import pyplot

    panels = [(bench, dtype) for bench in TITLES for dtype in ("f32", "bf16", "f16")]
    groups = [
        [r for r in results if (r["cell"].bench, r["cell"].dtype) == panel and any("ms" in t for t in r["times"].values())]
        for panel in panels
    ]
    drawn = [(panel, group) for panel, group in zip(panels, groups) if group]
    if not drawn:
        return False
    engines = _engines(results)
    bar = 0.8 / len(engines)
    heights = [len(group) for _, group in drawn]
    figure, axes = pyplot.subplots(
        len(drawn), 1, figsize=(10, 1.2 + 0.17 * len(engines) * sum(heights)), squeeze=False,
        gridspec_kw={"height_ratios": heights}, layout="constrained",
    )
    for axis, ((bench, dtype), group) in zip(axes[:, 0], drawn):
        for at, name in enumerate(engines):
            values = [speed(result, name) or 0 for result in group]
            axis.barh([row + at * bar for row in range(len(group))], values, bar, label=name, color=f"C{at}")
        axis.set_yticks([row + 0.4 - bar / 2 for row in range(len(group))], [r["cell"].cell for r in group], fontsize=7)
        axis.invert_yaxis()
        axis.set_title(f"{TITLES[bench][0]}, {dtype}: {'GB/s' if bench == 'decode' else 'GFLOP/s'}", fontsize=9, loc="left")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(engines), fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True
