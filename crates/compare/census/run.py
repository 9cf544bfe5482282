"""Counts every attention of transformers: what this crate answers for a tiny random model of each `model_type`.

python crates/compare/census/run.py                    records what is not recorded yet, asks, writes docs/architectures.md
python crates/compare/census/run.py --only bert vit    these model types, and writes nothing
python crates/compare/census/run.py --again            records everything anew
python crates/compare/census/run.py --update bert vit  records these anew, and writes what the page says of them; with
                                                       another version of transformers it adds new rows to its counts
python crates/compare/census/run.py --linear           model types with linear attention, and writes its part of the page

It takes PyTorch, transformers (tests/hf/requirements.txt has the versions), torchvision, timm, scipy, pillow and tqdm,
half an hour and half a gigabyte in `target/census`, where a run that was interrupted goes on. With another version of
transformers (it was run on 4.57.6 and 5.12.0) it asks for the model types that have a row alone, and writes the part of
the page that is about other versions, which `other_versions.json` keeps.
"""

import argparse
import collections
import json
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

sys.dont_write_bytecode = True
warnings.filterwarnings("ignore")

import torch
import transformers
from tqdm import tqdm
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

import gguf_files
import linear
import others
import record
import table
import written
from parts import as_models
from tiny import model_classes, options, tiny

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT / "target" / "census" / transformers.__version__
LARGEST = 30_000_000  # parameters
SECONDS = 180
CLASSES = 3  # of a model type that are tried


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="MODEL_TYPE", help="these, without writing the table")
    parser.add_argument("--update", nargs="+", metavar="MODEL_TYPE", help="record these anew, and write their rows")
    parser.add_argument("--again", action="store_true", help="record anew what is recorded")
    parser.add_argument("--linear", action="store_true", help="those with linear attention, and their part of the page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    build = ["cargo", "build", "--quiet", "-p", "candle-attention-compare", "--bin", "census"]
    subprocess.run(build, cwd=ROOT, check=True)
    known = table.known()
    version = transformers.__version__
    is_other = version != others.of_the_page()
    named = arguments.only or arguments.update
    model_types = sorted(named or (linear.known() if arguments.linear else CONFIG_MAPPING.keys()))
    if is_other:
        model_types = [name for name in model_types if name in known]
    bar = tqdm(model_types, unit="model", disable=None)
    for model_type in bar:
        bar.set_description(f"{model_type:28.28}")
        outcome = DATA / model_type / "outcome.json"
        if arguments.again or arguments.update or not outcome.exists():
            shutil.rmtree(outcome.parent, ignore_errors=True)
            outcome.parent.mkdir(parents=True)
            outcome.write_text(json.dumps({"failed": "the process ended"}))
            outcome.write_text(json.dumps(recorded(model_type, outcome.parent, model_type in known)))
    answers = ask([DATA / name for name in model_types])
    page = ROOT / "docs" / "architectures.md"
    if is_other:
        found = others.find(model_types, DATA, answers, version)
        print(json.dumps(found, indent=1))
        if not arguments.only:
            others.keep(version, found, adds=bool(arguments.update))
            page.write_text(gguf_files.with_part(others.with_part(page.read_text())))
        return 1 if found["wrong"] else 0
    entries = table.judge(model_types, DATA, answers, known)
    if arguments.linear:
        page.write_text(linear.with_part(page.read_text(), entries))
    elif arguments.only:
        for entry in entries:
            print(json.dumps(entry.__dict__, indent=1))
    elif arguments.update:
        text = page.read_text()
        kept = [entry for entry in written.entries(text) if entry.model_type not in model_types]
        for entry in entries:
            print(f"{entry.model_type}: {entry.verdict} {entry.why}")
        entries = sorted([*kept, *entries], key=lambda entry: entry.model_type)
        page.write_text(written.with_entries(text, entries, version))
    else:
        page.write_text(gguf_files.with_part(others.with_part(linear.with_part(table.page(entries, version), entries))))
        print(json.dumps(collections.Counter(entry.verdict for entry in entries)))
    return 1 if any(entry.verdict == "wrong" for entry in entries) else 0


class TookTooLong(BaseException):
    pass


def recorded(model_type, folder, is_known):
    """Records a model type in its folder; what there is to say about it."""

    def stop(*_):
        raise TookTooLong

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        return attempt(model_type, folder, is_known)
    except TookTooLong:
        return {"failed": f"it takes more than {SECONDS} seconds"}
    except Exception as error:
        return {"failed": one_line(error)}
    finally:
        signal.alarm(0)


def attempt(model_type, folder, is_known):
    config_class = CONFIG_MAPPING[model_type]
    # transformers has some spellings twice.
    if config_class.model_type != model_type:
        return {"alias": config_class.model_type}
    classes = model_classes(config_class) or as_models(config_class)
    parts = {name: part.model_type for name, part in parts_of(tiny(config_class)).items()}
    if not classes:
        return {"failed": "transformers has no model that takes this configuration by itself", "parts": parts}
    model, classes = first_made(classes, config_class)
    own = record.own_attention(model)
    if not own and not is_known:
        return {"parts": parts, "none": True}
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        return {"failed": f"the smallest has {size // 1_000_000} million parameters", "parts": parts, "classes": own}
    errors = []
    for model_class in classes[:CLASSES]:
        try:
            cores = record.record(model_class, tiny(config_class), folder, model_type)
        except Exception as error:
            errors.append(one_line(error))
            continue
        changed = record_options(model_class, config_class, folder / "options") if is_known else {}
        return {"parts": parts, "cores": cores, "classes": own, "options": changed}
    return {"failed": errors[0], "parts": parts, "classes": own}


def first_made(classes, config_class):
    """The first model that can be made, and its class with those after it: some with a head are of a part's config."""
    errors = []
    for i, model_class in enumerate(classes):
        try:
            return without_data(model_class, tiny(config_class)), classes[i:]
        except Exception as error:
            errors.append(error)
    raise errors[0]


def without_data(model_class, config):
    try:
        with torch.device("meta"):
            return model_class._from_config(config)
    except NotImplementedError:
        # Some modules read what they are made with.
        return model_class._from_config(config)


def record_options(model_class, config_class, folder):
    """Records the model with the options that it takes; which these are."""

    def works(fields):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            record.record(model_class, tiny(config_class, **fields), folder, config_class.model_type)
        except Exception:
            return False
        return True

    fields = options(config_class)
    if not works(fields):
        fields = {name: value for name, value in fields.items() if works({name: value})}
    if not fields or not works(fields):
        shutil.rmtree(folder, ignore_errors=True)
        return {}
    return fields


def parts_of(config):
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    return {name: part for name, part in parts.items() if getattr(part, "model_type", "")}


def one_line(error):
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def ask(folders):
    """What the crate answers, by folder."""
    answers = collections.defaultdict(list)
    folders = [variant for folder in folders for variant in (folder, folder / "options")]
    folders = [folder for folder in folders if (folder / "record.json").exists()]
    for start in tqdm(range(0, len(folders), 20), desc="asking", unit="20 models", disable=None):
        command = [ROOT / "target" / "debug" / "census", *folders[start : start + 20]]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for line in output.splitlines():
            answer = json.loads(line)
            answers[str(Path(answer["folder"]).relative_to(DATA))].append(answer)
    return answers


if __name__ == "__main__":
    sys.exit(main())
