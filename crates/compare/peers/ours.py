"""The Rust side: builds the benches, lists their cells, and times one cell."""

import json
import os
import subprocess
from pathlib import Path

from cells import from_json

ROOT = Path(__file__).resolve().parents[3]
BENCHES = ("sdpa", "decode", "layer", "linear")


class Benches:
    """The executables of `cargo bench`, built once."""

    def __init__(self, threads, total):
        command = ["cargo", "bench", "--no-run", "--message-format=json"]
        for bench in BENCHES:
            command += ["--bench", bench]
        built = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
        messages = (json.loads(line) for line in built.splitlines())
        done = [m for m in messages if m["reason"] == "compiler-artifact" and m.get("executable")]
        self.executables = {m["target"]["name"]: m["executable"] for m in done}
        self.environment = os.environ | {"RAYON_NUM_THREADS": str(threads)}
        self.total = total

    def cells(self):
        """Every cell of every bench."""
        return [from_json(line) for bench in BENCHES for line in self._run(bench, "--list")]

    def time(self, cell, engines, rounds):
        """A line for each engine (`ours`, `reference`, `flash`, `hand-written`, `linear`): timed, or skipped with the reason."""
        asked = ["--only", cell.cell, "--engines", engines, "--rounds", str(rounds), "--total", str(self.total)]
        return [line for line in self._run(cell.bench, *asked) if line["cell"] == cell.cell]

    def _run(self, bench, *arguments):
        command = [self.executables[bench], "--bench", "--json", *arguments]
        ran = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True)
        if ran.returncode != 0:
            raise RuntimeError((ran.stderr.strip().splitlines() or ["no message"])[-1])
        return [json.loads(line) for line in ran.stdout.splitlines()]
