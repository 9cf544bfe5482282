"""Records layers of other libraries, each in a file that its library saved, with inputs and outputs.

python crates/compare/conformance/layers.py [LIBRARY ..]    writes tests/conformance/layers/

requirements-layers.txt lists the packages. `cargo test --test conformance layers` loads what was recorded.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

sys.dont_write_bytecode = True

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "conformance" / "layers"
LIBRARIES = ["flax", "keras", "mlx", "torchtune", "tutorial", "x_transformers"]


class Recorded:
    """The layers of one library, whose weights are in `<library>.safetensors`."""

    def __init__(self, library, version):
        self.library = library
        self.version = version
        self.layers = []
        self.numbers = {}

    @property
    def file(self):
        return FOLDER / f"{self.library}.safetensors"

    def add(self, prefix, layout, config, output, **inputs):
        """Adds the layer below a prefix of the file, with the config that this crate loads it with."""
        name = f"{self.library}.{len(self.layers)}"
        for part, array in (inputs | {"output": output}).items():
            self.numbers[f"{name}.{part}"] = np.ascontiguousarray(np.asarray(array, dtype=np.float32))
        case = dict(name=name, prefix=prefix, layout=layout, config=config, inputs=list(inputs))
        self.layers.append(case)

    def write(self):
        save_file(self.numbers, FOLDER / f"{self.library}.numbers.safetensors")
        layers = ",\n".join(json.dumps(layer) for layer in self.layers)
        text = f'{{"library": "{self.library}", "version": "{self.version}", "layers": [\n{layers}\n]}}\n'
        (FOLDER / f"{self.library}.json").write_text(text)
        print(f"{self.library} {self.version}: {len(self.layers)} layers")


def biases(has):
    """The fields of a config with biases in all projections or in none."""
    return {name: has for name in ("q_bias", "k_bias", "v_bias", "out_bias")}


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def main(libraries):
    if len(libraries) == 1:
        recorded = importlib.import_module(f"{libraries[0]}_layers").record()
        recorded.write()
        return 0
    # One process each: JAX, PyTorch and MLX do not have to be in one.
    runs = [subprocess.run([sys.executable, __file__, library]) for library in libraries or LIBRARIES]
    return max(run.returncode for run in runs)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    sys.exit(main(sys.argv[1:]))
