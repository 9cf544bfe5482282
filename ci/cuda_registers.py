#!/usr/bin/env python3
"""Compiles the CUDA kernels with NVRTC, without a GPU, and holds their registers and memory to crates/cuda/registers.txt.

    cargo run -q -p candle-attention-cuda --example specializations | python3 ci/cuda_registers.py --nvrtc FOLDER

Standard input has a line of JSON for each program and for each specialisation, as the Rust package compiles them. FOLDER
has libnvrtc.so.13 and its builtins. Without an option, every specialisation is compiled, and a kernel that is not in
the table, or that takes more registers, spilled bytes or shared memory than the table says, is an error.

`--quick` compiles a selection with each kernel and element type, for one capability each. `--update` writes the table;
with `--quick`, the rest of the table stays.

`--oldest FOLDER` has libnvrtc.so.12 of the oldest version that is supported, which compiles the quick specialisations of
compute capability 9.0 as well; with `--quick`, the fused backward pass alone.
"""

import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import re
import sys
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = ROOT / "crates/cuda/registers.txt"
HEADER = """\
# Registers, spilled bytes and shared memory of kernels in their specialisations, as NVRTC 13.0 compiles them.
# `bash ci/cuda.sh update` writes this file, and `bash ci/cuda.sh all` checks it.
# capability | specialisation | kernel | registers | bytes spilled | bytes of shared memory
"""
# The shared memory that a block may have, in KiB.
SHARED_KIB = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}


@dataclass(frozen=True)
class Key:
    capability: str
    specialization: str
    kernel: str


@dataclass(frozen=True)
class Usage:
    registers: int
    spilled: int
    shared: int


@dataclass(frozen=True)
class Program:
    text: str
    headers: dict[str, str]


@dataclass(frozen=True)
class Specialization:
    program: str
    name: str
    capability: str
    options: list[str]
    is_quick: bool
    # The dynamic shared memory of each kernel that is launched.
    shared: dict[str, int]


class Nvrtc:
    def __init__(self, folder: str, major: int = 13):
        # The library looks for its builtins among loaded libraries and in LD_LIBRARY_PATH only.
        for name in sorted(pathlib.Path(folder).glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(name), mode=ctypes.RTLD_GLOBAL)
        self.library = ctypes.CDLL(str(pathlib.Path(folder) / f"libnvrtc.so.{major}"))

    def compile(self, program: Program, options: list[str]) -> str:
        """Returns the log of a compilation.

        Raises RuntimeError with the log if the program does not compile."""
        handle, headers = ctypes.c_void_p(), program.headers
        texts = (ctypes.c_char_p * len(headers))(*(text.encode() for text in headers.values()))
        names = (ctypes.c_char_p * len(headers))(*(name.encode() for name in headers))
        status = self.library.nvrtcCreateProgram(
            ctypes.byref(handle), program.text.encode(), b"kernels.cu", len(headers), texts, names
        )
        if status:
            raise RuntimeError(f"nvrtcCreateProgram failed with {status}")
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status = self.library.nvrtcCompileProgram(handle, len(options), encoded)
        size = ctypes.c_size_t()
        self.library.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        self.library.nvrtcGetProgramLog(handle, log)
        self.library.nvrtcDestroyProgram(ctypes.byref(handle))
        if status:
            raise RuntimeError(f"NVRTC failed with {status}: {log.value.decode()}")
        return log.value.decode()


def read_input(lines) -> tuple[dict[str, Program], list[Specialization]]:
    programs, specializations = {}, []
    for line in lines:
        entry = json.loads(line)
        if "text" in entry:
            programs[entry["program"]] = Program(entry["text"], entry.get("headers", {}))
            continue
        shared = {kernel["name"]: kernel["shared_bytes"] for kernel in entry["kernels"]}
        specializations.append(
            Specialization(entry["program"], entry["name"], entry["capability"], entry["options"], entry["quick"], shared)
        )
    return programs, specializations


def usages(log: str) -> dict[str, Usage]:
    """Returns what each kernel of a log of `--ptxas-options=-v` uses. Shared memory is the static part."""
    found, kernel, spilled = {}, None, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel, spilled = match[1], 0
        elif match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spilled = int(match[1]) + int(match[2])
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            static = re.search(r"(\d+) bytes smem", line)
            found[kernel] = Usage(int(match[1]), spilled, int(static[1]) if static else 0)
            kernel = None
    return found


# Set in each worker process.
NVRTC: Nvrtc
PROGRAMS: dict[str, Program]


def start_worker(folder: str, programs: dict[str, Program]) -> None:
    global NVRTC, PROGRAMS
    NVRTC, PROGRAMS = Nvrtc(folder), programs


def compile_one(specialization: Specialization) -> dict[Key, Usage]:
    """Returns what the launched kernels of a specialisation use, with their dynamic shared memory."""
    capability = specialization.capability
    architecture = "sm_" + capability.replace(".", "")
    options = [f"--gpu-architecture={architecture}", *specialization.options, "--ptxas-options=-v"]
    try:
        by_kernel = usages(NVRTC.compile(PROGRAMS[specialization.program], options))
    except RuntimeError as error:
        raise RuntimeError(f"{capability}, {specialization.name}: {error}") from error
    found = {}
    for kernel, dynamic in specialization.shared.items():
        if kernel not in by_kernel:
            raise RuntimeError(f"{capability}, {specialization.name}: there is no kernel {kernel}")
        usage = by_kernel[kernel]
        key = Key(capability, specialization.name, kernel)
        found[key] = Usage(usage.registers, usage.spilled, usage.shared + dynamic)
    return found


def choose(specializations: list[Specialization], is_quick: bool) -> list[Specialization]:
    """Returns what to compile: everything, or the quick specialisations, each for one of the capabilities in turn."""
    if not is_quick:
        return specializations
    by_name: dict[str, list[Specialization]] = {}
    for specialization in specializations:
        if specialization.is_quick:
            by_name.setdefault(specialization.name, []).append(specialization)
    return [of_name[number % len(of_name)] for number, of_name in enumerate(by_name.values())]


def problems_of_oldest(
    folder: str, programs: dict[str, Program], specializations: list[Specialization], is_quick: bool
) -> list[str]:
    """Returns the specialisations that the oldest version does not compile."""
    of_hopper = [one for one in specializations if one.is_quick and one.capability == "9.0"]
    fused = [one for one in of_hopper if "-DFUSED_BACKWARD=1" in one.options]
    nvrtc, messages = Nvrtc(folder, 12), []
    for one in fused[:1] if is_quick else of_hopper:
        try:
            nvrtc.compile(programs[one.program], ["--gpu-architecture=sm_90", *one.options])
        except RuntimeError as error:
            messages.append(f"the oldest NVRTC, {one.name}: {error}")
    if not fused:
        messages.append("the oldest NVRTC: there is no fused backward pass to compile")
    return messages


def read_table() -> dict[Key, Usage]:
    table = {}
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    for line in lines:
        if line.startswith("#"):
            continue
        capability, specialization, kernel, registers, spilled, shared = (cell.strip() for cell in line.split("|"))
        table[Key(capability, specialization, kernel)] = Usage(int(registers), int(spilled), int(shared))
    return table


def write_table(found: dict[Key, Usage]) -> None:
    def order(key: Key):
        return float(key.capability), key.specialization, key.kernel

    lines = []
    for key in sorted(found, key=order):
        usage = found[key]
        cells = [key.capability, key.specialization, key.kernel, usage.registers, usage.spilled, usage.shared]
        lines.append(" | ".join(str(cell) for cell in cells) + "\n")
    TABLE.write_text(HEADER + "".join(lines))


def too_large(specializations: list[Specialization]) -> list[str]:
    """Returns the kernels that ask for more shared memory than a block has, which needs no compilation."""
    messages = []
    for specialization in specializations:
        most = SHARED_KIB[specialization.capability] * 1024
        for kernel, dynamic in specialization.shared.items():
            if dynamic > most:
                name = f"{specialization.capability}, {specialization.name}, {kernel}"
                messages.append(f"{name}: {dynamic} bytes of shared memory, but a block has at most {most}")
    return messages


def problems(found: dict[Key, Usage], table: dict[Key, Usage], is_all: bool) -> list[str]:
    messages = []
    for key, usage in found.items():
        name = f"{key.capability}, {key.specialization}, {key.kernel}"
        if key not in table:
            messages.append(f"{name}: not in the table")
            continue
        for field in ("registers", "spilled", "shared"):
            now, limit = getattr(usage, field), getattr(table[key], field)
            if now > limit:
                messages.append(f"{name}: {field} is {now}, expected at most {limit}")
    if is_all:
        for key in table.keys() - found.keys():
            messages.append(f"{key.capability}, {key.specialization}, {key.kernel}: in the table, but not compiled")
    return messages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvrtc", required=True, metavar="FOLDER", help="the folder of libnvrtc.so.13")
    parser.add_argument("--quick", action="store_true", help="a selection with each kernel and element type")
    parser.add_argument("--update", action="store_true", help="write the table")
    parser.add_argument("--oldest", metavar="FOLDER", help="the folder of libnvrtc.so.12 of the oldest version")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many are compiled at the same time")
    args = parser.parse_args()
    programs, specializations = read_input(sys.stdin)
    chosen = choose(specializations, args.quick)
    if not chosen:
        print("ci/cuda_registers.py: no specialisation on standard input", file=sys.stderr)
        return 1
    found: dict[Key, Usage] = {}
    start = (args.nvrtc, programs)
    with concurrent.futures.ProcessPoolExecutor(args.jobs, initializer=start_worker, initargs=start) as pool:
        try:
            for compiled in pool.map(compile_one, chosen):
                found |= compiled
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            print(error, file=sys.stderr)
            return 1
    if args.update:
        write_table(read_table() | found if args.quick else found)
    messages = too_large(specializations) + problems(found, read_table(), is_all=not args.quick)
    if args.oldest:
        messages += problems_of_oldest(args.oldest, programs, specializations, args.quick)
    print("\n".join(messages), file=sys.stderr, end="\n" if messages else "")
    spilling = sum(usage.spilled > 0 for usage in found.values())
    print(f"{len(chosen)} of {len(specializations)} specialisations, {len(found)} kernels, {spilling} of which spill")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
