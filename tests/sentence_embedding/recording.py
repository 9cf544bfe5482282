"""What the scripts share that record sentence-transformers on tiny random models: `pipelines.py` and `published.py` here,
and `cross_encoders.py` and `late.py` in `tests/rerank`."""

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file


def write(path, value):
    """Writes a file of JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n")


class Recorder:
    """A folder with a model and its runs."""

    def __init__(self, path, model=None):
        self.path = path
        shutil.rmtree(self.path, ignore_errors=True)
        if model is not None:
            model.eval().save(str(self.path), create_model_card=False)
            (self.path / "generation_config.json").unlink(missing_ok=True)
        self.runs = []
        self.tensors = {}

    def read(self, name):
        """Returns the settings in a file of the folder."""
        return json.loads((self.path / name).read_text())

    @contextlib.contextmanager
    def copy(self, files=None):
        """The path of a copy of the folder, with some files replaced."""
        with tempfile.TemporaryDirectory() as folder:
            copied = Path(folder) / "model"
            shutil.copytree(self.path, copied)
            for file, content in (files or {}).items():
                (copied / file).write_text(json.dumps(content))
            yield str(copied)

    def record(self, name, args, files, result):
        """Adds a run: options of the program, files that are replaced before it, and its result."""
        self.tensors[name] = result.cpu().contiguous()
        self.runs.append({"name": name, "args": list(args), **({"files": files} if files else {})})

    def save(self):
        """Writes the runs and their results, and prints what they are."""
        save_file(self.tensors, self.path / "golden.safetensors")
        (self.path / "golden.json").write_text(json.dumps(self.runs, indent=1) + "\n")
        size = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())
        for name, tensor in self.tensors.items():
            first = [round(number, 3) for number in tensor.flatten()[:4].tolist()]
            print(self.path.name, name, tuple(tensor.shape), first, file=sys.stderr)
        print(f"{self.path.name}: {size} bytes", file=sys.stderr)


def make_all(kinds):
    """Makes the models that the command line names, or all of them."""
    torch.set_num_threads(1)
    for name, make in kinds.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(folder)
