"""Runs `device_times`, times the same with PyTorch in turn, and prints a table with the aim of each row.

    python beside_pytorch.py PATH/TO/device_times [--device cuda] [--sections forward,training] [--seconds 120]

Both are timed section by section on the same device, within one run. PyTorch's time is that of its fastest backend
except cuDNN. A row is skipped, with the reason, if the device or the Python lacks what it needs.
"""

import argparse
import json
import subprocess
import sys
import time

SECTIONS = ["forward", "masks", "training", "f32", "decode", "linear", "layer", "memory", "model"]
FIRST_CALL = "Llama, bf16: first call of a process"
FIRST_CALL_MS = 3000


class Results:
    """The results of all rows, by name: milliseconds, MiB, or a text with the reason why there are none."""

    def __init__(self):
        self.here: dict[str, float | str] = {}
        self.pytorch: dict[str, float | str] = {}
        self.bandwidth: float | None = None  # GB/s


def number(value) -> float | None:
    return value if isinstance(value, float) else None


def run_program(command: list[str], deadline: float) -> tuple[list[dict], str]:
    """Returns the JSON objects that a program prints, and the reason why there are no more."""
    left = deadline - time.monotonic()
    if left < 1:
        return [], "no time left"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left)
        output, reason = done.stdout, done.stderr.strip().splitlines()[-1] if done.returncode else ""
        if done.returncode and not reason:
            reason = f"the program ended with {done.returncode}"
    except subprocess.TimeoutExpired as error:
        printed = error.stdout or b""
        output, reason = printed.decode() if isinstance(printed, bytes) else printed, "no time left"
    entries = []
    for line in output.splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            # A line that was cut off by the end of the time.
            pass
    return entries, reason


def time_here(args, section: str, cells: list[dict], results: Results) -> None:
    command = [args.program, "--device", args.device, "--sections", section, "--longest", str(args.longest)]
    entries, reason = run_program(command, args.deadline)
    for cell in cells:
        results.here[cell["name"]] = f"skipped: {reason or 'not printed'}"
    for entry in entries:
        value = entry.get("ms", entry.get("mebibytes"))
        results.here[entry["name"]] = f"skipped: {entry['skipped']}" if value is None else float(value)


def time_pytorch(args, cells: list[dict], results: Results) -> None:
    import pytorch_times

    for cell in cells:
        if time.monotonic() > args.deadline:
            results.pytorch[cell["name"]] = "skipped: no time left"
            continue
        try:
            results.pytorch[cell["name"]] = float(pytorch_times.time_cell(cell, args.device))
        except pytorch_times.Skipped as reason:
            results.pytorch[cell["name"]] = f"skipped: {reason}"
        except Exception as error:  # One call that fails does not keep the others from being timed.
            results.pytorch[cell["name"]] = f"skipped: {type(error).__name__}: {str(error).splitlines()[0][:80]}"
        pytorch_times.torch.cuda.empty_cache()


def assess(cell: dict, results: Results, pairs: dict[str, int]) -> tuple[str, str]:
    """Returns the aim of a row in words, and whether the row meets it."""
    name, mark = cell["name"], cell["mark"]
    here = number(results.here.get(name))
    if mark is None:
        return "", ""

    def verdict(value: float | None, least: float | None = None, most: float | None = None) -> str:
        if value is None:
            return "skipped"
        met = (least is None or value >= least) and (most is None or value <= most)
        return f"{value:.3g}, {'met' if met else 'NOT met'}"

    def of_other(value) -> float | None:
        other = number(results.here.get(mark["other"]))
        return value(other) if other is not None and here is not None else None

    match mark["kind"]:
        case "pytorch":
            pytorch = number(results.pytorch.get(name))
            speed = pytorch / here if pytorch is not None and here is not None else None
            return f"{mark['share']} of PyTorch", verdict(speed, least=mark["share"])
        case "pairs":
            per_pair = of_other(lambda other: other / pairs[mark["other"]] / (here / pairs[name]))
            return f"{mark['share']} of the plain call for each pair", verdict(per_pair, least=mark["share"])
        case "time":
            return f"at most {mark['share']} of the row before", verdict(of_other(lambda other: here / other), most=mark["share"])
        case "bandwidth":
            gb_s = cell["kv_bytes"] / here / 1e6 if here is not None else None
            share = gb_s / results.bandwidth if gb_s is not None and results.bandwidth else None
            return f"{mark['share']} of the bandwidth", verdict(share, least=mark["share"])
        case "milliseconds":
            return f"at most {mark['most']:g} ms", verdict(here, most=mark["most"])
        case "mebibytes":
            return f"at most {mark['most']:g} MiB", verdict(here, most=mark["most"])
    raise ValueError(f"{mark['kind']} is no kind of aim")


def cell_text(value) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else "skipped"


def print_table(cells: list[dict], results: Results) -> None:
    pairs = {cell["name"]: cell.get("pairs") for cell in cells}
    print(f"\n{'what':<54}{'here':>10}{'PyTorch':>10}{'ratio':>8}  aim")
    for cell in cells:
        name = cell["name"]
        here, pytorch = results.here.get(name), results.pytorch.get(name)
        ratio = ""
        if number(here) is not None and number(pytorch) is not None:
            ratio = f"{pytorch / here:.2f}"
        aim, verdict = assess(cell, results, pairs)
        row = f"{name:<54}{cell_text(here):>10}{cell_text(pytorch):>10}{ratio:>8}  {aim}{': ' if aim else ''}{verdict}"
        print(row.rstrip())
    print("\nTimes are in milliseconds, memory is in MiB. The ratio is PyTorch's time by the time here.")
    if results.bandwidth:
        print(f"The device reads {results.bandwidth:.0f} GB/s.")
    reasons: dict[str, list[str]] = {}
    for side, values in (("here", results.here), ("PyTorch", results.pytorch)):
        for name, value in values.items():
            if isinstance(value, str) and name in pairs:
                reasons.setdefault(f"{side}: {value}", []).append(name)
    for reason, names in reasons.items():
        print(f"{reason}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}")


def import_pytorch(device: str) -> str | None:
    """Returns the reason why PyTorch takes no part, if there is one."""
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no PyTorch"
    if device == "cuda" and not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no CUDA device"
    print(f"PyTorch {torch.__version__}{f' on {torch.cuda.get_device_name()}' if device == 'cuda' else ''}")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="the path of device_times")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--sections", type=lambda text: text.split(","), default=SECTIONS, help="of " + ", ".join(SECTIONS))
    parser.add_argument("--longest", type=int, default=131072, help="time no longer sequences")
    parser.add_argument("--seconds", type=float, default=120, help="skip what is left after this time")
    args = parser.parse_args()
    start = time.monotonic()
    args.deadline = start + args.seconds
    listed, reason = run_program([args.program, "--list", "--longest", str(args.longest)], args.deadline)
    if not listed:
        print(f"beside_pytorch.py: {args.program}: {reason}", file=sys.stderr)
        return 1
    results, cells = Results(), []
    without_pytorch = import_pytorch(args.device)
    if without_pytorch:
        print(f"PyTorch is skipped: {without_pytorch}")
    else:
        import pytorch_times

        results.bandwidth = pytorch_times.bandwidth(args.device)
    for section in args.sections:
        of_section = [cell for cell in listed if cell["section"] == section]
        cells += of_section
        time_here(args, section, of_section, results)
        if not without_pytorch:
            time_pytorch(args, of_section, results)
    if "model" in args.sections:
        command = [args.program, "--device", args.device, "--first-call", "--longest", str(args.longest)]
        entries, reason = run_program(command, args.deadline)
        mark = {"kind": "milliseconds", "most": FIRST_CALL_MS}
        cells.append({"name": FIRST_CALL, "section": "model", "mark": mark})
        results.here[FIRST_CALL] = float(entries[0]["ms"]) if entries else f"skipped: {reason}"
        if entries:
            parts = ", ".join(f"{name} {ms:.0f} ms" for name, ms in entries[0]["parts"].items())
            print(f"The first call of a process: {parts}")
    print_table(cells, results)
    print(f"{time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
