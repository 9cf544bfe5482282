"""Runs `device_check` in several processes, each of which checks a part of the rows, and prints one table.

    python in_parallel.py PATH/TO/device_check --device cuda --widths 64,128

The options are those of device_check. Kernels are compiled at first use, which several processes do at the same time.
A process that ends early, for example by a fault on the device, takes only its own rows with it.
"""

import collections
import os
import re
import subprocess
import sys
import time

MOST = 16


class Part:
    """The output of a process by its kinds of lines."""

    def __init__(self, output: str):
        self.header, self.rows, self.remarks, self.paths, self.totals = "", [], [], collections.Counter(), None
        for line in output.splitlines():
            if line.startswith("check "):
                self.header = line
            elif line.startswith(("FAILED: ", "skipped: ", "noted: ")):
                self.remarks.append(line)
            elif match := re.fullmatch(r"(\d+) passed, (\d+) skipped, (\d+) failed", line):
                self.totals = [int(count) for count in match.groups()]
            elif match := re.fullmatch(r" *(\d+) ((?:Fused|Reference): .*)", line):
                self.paths[match[2]] += int(match[1])
            elif len(line) > 60 and self.header:
                self.rows.append(line)


def main() -> int:
    program, *options = sys.argv[1:]
    count = min(os.cpu_count() or 1, MOST)
    start = time.monotonic()
    # All processes together have a thread for each core.
    environment = os.environ | {"RAYON_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    processes = []
    for number in range(1, count + 1):
        command = [program, *options, "--part", f"{number}/{count}"]
        processes.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    parts, broken = [], []
    for number, process in enumerate(processes, 1):
        output, errors = process.communicate()
        part = Part(output)
        parts.append(part)
        if part.totals is None:
            last = (errors.strip() or output.strip() or "no output").splitlines()[-1]
            broken.append(f"FAILED: part {number}/{count} ended with {process.returncode}: {last}")
    print(next((part.header for part in parts if part.header), "no row was checked"))
    longest = max(len(part.rows) for part in parts)
    # Rows were dealt out in turn.
    for at in range(longest):
        for part in parts:
            if at < len(part.rows):
                print(part.rows[at])
    for part in parts:
        for remark in part.remarks:
            print(remark)
    for message in broken:
        print(message)
    paths = sum((part.paths for part in parts), collections.Counter())
    for path, calls in sorted(paths.items()):
        print(f"{calls:>6} {path}")
    passed, skipped, failed = (sum(part.totals[n] for part in parts if part.totals) for n in range(3))
    print(f"{passed} passed, {skipped} skipped, {failed + len(broken)} failed, {time.monotonic() - start:.0f} s")
    return 1 if failed or broken else 0


if __name__ == "__main__":
    sys.exit(main())
