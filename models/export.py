"""Makes every folder of models/ from PyTorch, or exports a layer of your own.

python models/export.py                                   everything below models/
python models/export.py --only book_mha gqa_48            some folders
python models/export.py --check                           writes nothing; names the files that would change
python models/export.py --layer my_module:build out.safetensors
"""

import argparse
import sys
from pathlib import Path

sys.dont_write_bytecode = True  # models/ is a folder of data, without __pycache__

import torch

from _systems import all_systems
from _systems.cards import card, index
from _systems.printed import printed_numbers
from _systems.record import F32_TOLERANCE, LOOPS_TOLERANCE, json_bytes, sha256
from _systems.user_layer import export_layer

ROOT = Path(__file__).resolve().parent

# nn.Linear(3, 2, bias=False) after seed 123, and nn.Embedding(7, 48) after seed 0: uniform and normal draws.
KNOWN_DRAWS = (
    (
        123,
        lambda: torch.nn.Linear(3, 2, bias=False),
        "e9350c67358a876f09008fb04e124793039d8f76828421be0ae64a65e6a9194c",
    ),
    (0, lambda: torch.nn.Embedding(7, 48), "db4536e697a028fa63b6d47b5be61d8b335df8f07447d3d9f2c5e8cbdc43d034"),
)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FOLDER", help="rebuild these folders and nothing else")
    parser.add_argument("--check", action="store_true", help="compare with the files that are there, and write nothing")
    parser.add_argument(
        "--layer", nargs=2, metavar=("MODULE:CALLABLE", "OUT"), help="export the nn.Module that the callable returns"
    )
    arguments = parser.parse_args()
    if arguments.layer:
        if arguments.only or arguments.check:
            parser.error("--layer cannot be combined with other options")
        return export_layer(*arguments.layer)
    torch.set_num_threads(1)  # one order of summation
    torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention by explicit matmul and softmax
    check_draws()
    files = build(all_systems(), arguments.only)
    return compare(files) if arguments.check else write(files)


def build(systems, only=None):
    """Every file as {path below models/: bytes}, made and checked before the first is written."""
    unknown = set(only or ()) - {system.name for system in systems}
    if unknown:
        raise SystemExit(
            f"no such folder: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in systems)}"
        )
    files, records = {}, {}
    for system in systems:
        if only and system.name not in only:
            continue
        print(system.name)
        record = records[system.name] = system.record()
        folder = record.files | {"config.json": json_bytes(record.config), "README.md": card(system, record.config)}
        files.update({f"{system.name}/{name}": data for name, data in folder.items()})
    if not only:
        files["printed_numbers.json"] = json_bytes(printed_numbers(records))
        files["README.md"] = index(systems, (F32_TOLERANCE, LOOPS_TOLERANCE))
    return files


def write(files):
    for name, data in files.items():
        path = ROOT / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")


def compare(files):
    changed = [name for name, data in files.items() if not (ROOT / name).exists() or (ROOT / name).read_bytes() != data]
    print("\n".join(["would change:", *changed]) if changed else f"{len(files)} files, none would change")
    return 1 if changed else 0


def check_draws():
    """Stops where PyTorch's seeded initialisation draws other numbers than on x86 with AVX2."""
    for seed, make, expected in KNOWN_DRAWS:
        torch.manual_seed(seed)
        if sha256(make().weight) != expected:
            raise SystemExit(
                f"after torch.manual_seed({seed}) this PyTorch draws other weights than the ones recorded here"
            )


if __name__ == "__main__":
    sys.exit(main())
