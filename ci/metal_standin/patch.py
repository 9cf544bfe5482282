"""Puts the stand-in for Metal into copies of candle-core and candle-nn: `python3 patch.py CORE NN`."""

import pathlib
import shutil
import sys

HERE = pathlib.Path(__file__).parent
# The beginning of what a custom operation of Candle computes on Metal.
METAL_FORWARD = '    #[cfg(feature = "metal-real")]\n    fn metal_fwd('


def replace(path: pathlib.Path, old: str, new: str) -> None:
    """Replaces a text that occurs in a file."""
    text = path.read_text()
    if old not in text:
        sys.exit(f"{path} has no {old!r}, so this version of Candle needs another stand-in")
    path.write_text(text.replace(old, new))


def select_dummy_backend(crate: pathlib.Path, enables: str) -> None:
    """Lets the feature `metal` enable nothing of Apple's: the real backend is behind a feature `metal-real`."""
    replace(crate / "Cargo.toml", "\nmetal = [\n", f"\nmetal = {enables}\nmetal-real = [\n")
    for path in (crate / "src").rglob("*.rs"):
        text = path.read_text()
        if 'feature = "metal"' in text:
            path.write_text(text.replace('feature = "metal"', 'feature = "metal-real"'))
    # A crate of the registry prints no warnings, and a crate of a folder does.
    lib = crate / "src/lib.rs"
    lines = lib.read_text().splitlines(keepends=True)
    first = next(n for n, line in enumerate(lines) if not line.startswith("//!"))
    lib.write_text("".join([*lines[:first], "#![allow(warnings)]\n", *lines[first:]]))


def add_forward(path: pathlib.Path, bodies: list[str]) -> None:
    """Adds the stand-in's function before each function for Metal in a file, in their order."""
    parts = path.read_text().split(METAL_FORWARD)
    if len(parts) != len(bodies) + 1:
        sys.exit(f"{path} has {len(parts) - 1} operations on Metal, expected {len(bodies)}")
    text = parts[0]
    for body, part in zip(bodies, parts[1:]):
        text += body + METAL_FORWARD + part
    path.write_text(text)


def forward(inputs: int, body: str) -> str:
    """Returns the function of an operation of some inputs (s1, l1), (s2, l2), .."""
    numbers = range(1, inputs + 1)
    arguments = ", ".join(f"s{i}: &candle::MetalStorage, l{i}: &Layout" for i in numbers)
    pairs = ", ".join(f"(s{i}, l{i})" for i in numbers)
    on_cpu = "self.cpu_fwd(" + ", ".join(f"&s[{i - 1}], l{i}" for i in numbers) + ")"
    body = body.replace("PAIRS", pairs).replace("ON_CPU", on_cpu)
    result = "Result<(candle::MetalStorage, Shape)>"
    return f"    fn metal_fwd(&self, {arguments}) -> {result} {{\n        {body}\n    }}\n\n"


SORT = """\
    fn metal_fwd(
        &self,
        storage: &crate::MetalStorage,
        layout: &crate::Layout,
    ) -> Result<(crate::MetalStorage, crate::Shape)> {
        use crate::backend::BackendStorage;
        crate::dummy_metal_backend::limits::arg_sort(storage, self.asc, self.last_dim)?;
        let (result, shape) = self.cpu_fwd(&storage.numbers(), layout)?;
        Ok((crate::MetalStorage::launched(result, storage.device()), shape))
    }

"""


def main() -> None:
    core, nn = map(pathlib.Path, sys.argv[1:3])
    select_dummy_backend(core, "[]")
    select_dummy_backend(nn, '["candle/metal"]')
    replace(core / "src/utils.rs", 'cfg!(feature = "metal-real")', 'cfg!(feature = "metal")')
    shutil.copy(HERE / "backend.rs", core / "src/dummy_metal_backend.rs")
    shutil.copy(HERE / "limits.rs", core / "src/limits.rs")
    shutil.copy(HERE / "quantized.rs", core / "src/quantized/dummy_metal.rs")
    add_forward(core / "src/sort.rs", [SORT])

    shutil.copy(HERE / "nn.rs", nn / "src/standin.rs")
    with (nn / "src/lib.rs").open("a") as lib:
        lib.write("\nmod standin;\n")
    one_input = "crate::standin::{}((s1, l1), |s, l| self.cpu_fwd(s, l))"
    norm = 'crate::standin::norm("{}", &[PAIRS], |s| ON_CPU)'
    rope = 'crate::standin::rope("{}", [PAIRS], |s| ON_CPU)'
    options = "self.mask.is_some(), self.do_causal, self.scale, self.softcapping"
    add_forward(
        nn / "src/ops.rs",
        [
            forward(1, one_input.format("sigmoid")),
            forward(1, one_input.format("softmax")),
            forward(2, norm.format("rmsnorm")),
            forward(3, norm.format("layernorm")),
            forward(3, f"crate::standin::sdpa([PAIRS], {options})"),
        ],
    )
    add_forward(nn / "src/rotary_emb.rs", [forward(3, rope.format(name)) for name in ("rope-i", "rope", "rope")])


main()
