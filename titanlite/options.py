"""The options of the verbs that have some, as argparse's parsers, and the values that they take.

Does not import torch, so that help and errors in a command appear in a fraction of a second.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.config.amount import SUFFIXES, Amount
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.paths import expand_home

DTYPES = ("float32", "bfloat16", "float16")  # dtypes of exported weights; as in interop/export.py
BASE = "the directory of the base model of adapters ([lora]), if it has moved"
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Options(argparse.ArgumentParser):
    """A parser of options. `-` and `_` in names are equal, names cannot be abbreviated, and errors are raised
    as ConfigError."""

    def __init__(self, **kwargs: Any):
        self._known: dict[str, str] = {}
        super().__init__(allow_abbrev=False, **kwargs)

    def add(self, *names: str, **kwargs: Any) -> None:
        """Add an argument as `add_argument` does. For a Path, a leading `~` is expanded."""
        if kwargs.get("type") is Path:
            kwargs["type"] = _path
        self._known |= {name.replace("-", "_"): name for name in names if name.startswith("--")}
        self.add_argument(*names, **kwargs)

    def read_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Return the options, and the words that are not options. Raises ConfigError."""
        return self.parse_known_args([self._spelled(word) for word in argv])

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """Return the options. Raises ConfigError, also for a word that is not an option."""
        options, rest = self.read_known(argv)
        if rest:
            word = rest[0].partition("=")[0]
            known = suggest(word, self.known) if word.startswith("-") else ""
            self.error(f"unknown {'option' if known else 'argument'} {word!r}{known}")
        return options

    @property
    def known(self) -> list[str]:
        """The names of the options, such as --top-k."""
        return list(self._known.values())

    def error(self, message: str) -> Any:
        """Raise ConfigError. argparse would print the usage and exit."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return self._known.get(name.replace("-", "_"), name) + equals + value


def _path(text: str) -> Path:
    try:
        return Path(expand_home(text))
    except ConfigError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def add_launch(options: Options) -> None:
    add = options.add
    options.usage = "titanlite launch [options] CONFIG.toml [--section.key=value ...]"
    add("--nproc-per-node", default="1", help="number of processes on this node (1)")
    add("--nnodes", default="1", help="number of nodes (1), or MIN:MAX to continue while MIN nodes are left")
    add("--node-rank", default="0", help="rank of this node, from 0 (0)")
    add("--rdzv-endpoint", default="", help="host:port of the first node; required for several nodes")
    add("--rdzv-id", default="", help="secret word of this run; nodes with another word cannot join")
    add("--max-restarts", default="0", help="number of restarts of all processes after crashes (0)")


def add_generate(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, checkpoint folder, step-N folder or Hugging Face directory")
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    add("--prompt-file", type=Path, help="a file with one prompt per line")
    add(
        "--chat",
        action="store_true",
        help="answer prompts, or standard input, by the chat template",
    )
    add("--max-new-tokens", type=int, default=64, help="maximum number of tokens after the prompt (64)")
    add("--temperature", type=float, default=0.7, help="sampling temperature; 0: the likeliest token (0.7)")
    add("--top-k", type=int, default=0, help="sample from the K likeliest tokens only; 0: from all (0)")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of probability P (1)")
    add("--seed", type=int, default=0, help="seed of the sampling; prompt i has seed + i (0)")
    add("--ema", action="store_true", help="use the checkpoint's average of the weights ([ema])")
    add("--base", type=Path, help=BASE)
    _add_allow_imports(options)


def add_export(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, its checkpoint folder, or one step-N folder")
    add("target", type=Path, help="the directory to make")
    _add_format(options, default_dtype="bfloat16")
    add("--keep-padding", action="store_true", help="keep rows of embedding and head without a token id")
    add("--ema", action="store_true", help="export the checkpoint's average of the weights ([ema])")
    add("--adapter", action="store_true", help="export adapters ([lora]) for PEFT, not merged into a model")
    add("--base", type=Path, help=BASE)
    _add_allow_imports(options)


def add_import(options: Options) -> None:
    add = options.add
    options.usage = "titanlite import [options] SRC DIR CONFIG.toml [--section.key=value ...]"
    add("source", type=Path, help="the directory to read")
    add("target", type=Path, help="the directory to make")
    add("config", help="a job's TOML file; keys may be overridden as for `titanlite train`")
    _add_format(options, default_dtype="as-is")
    _add_allow_imports(options)


def _add_allow_imports(options: Options) -> None:
    options.add(ALLOW_IMPORTS, action="store_true", help="run the modules that the job imports")


def _add_format(options: Options, default_dtype: str) -> None:
    dtypes = [*DTYPES, "as-is"]
    options.add("--dtype", choices=dtypes, default=default_dtype, help=f"dtype of weights ({default_dtype})")
    options.add("--max-shard-size", type=parse_size, help="maximum size of one file (5GB)")


def parse_size(text: str) -> int:
    """Return `5GB`, `500MB`, `2GiB` or a number in bytes. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in SIZE_UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def add_migrate(options: Options) -> None:
    options.add("source", type=Path, help="a TOML file of torchtitan 0.1 or 0.2")
    options.add("-o", "--output", type=Path, help="the file to write (standard output)")


def add_compare(options: Options) -> None:
    options.add("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, which has metrics.jsonl")
    options.add(
        "--price-per-gpu-hour",
        type=parse_price,
        metavar="PRICE",
        help="adds what the GPU hours of each run cost",
    )


def add_tune(options: Options) -> None:
    add, number = options.add, {"type": int, "metavar": "N"}
    options.usage = """titanlite tune CONFIG --section.key=LOW:HIGH:NUM [...] [options]
       titanlite tune CONFIG --coordinate-check [options] [--section.key=value ...]
       titanlite tune CONFIG (--ladder | --find-batch | --measure) [options]"""
    add("config", help="a job's TOML file; its keys may be overridden")
    add("--gpus-per-trial", **number, default=1, help="GPUs of each run, or to measure (1)")
    add("--rungs", **number, help="at most so many rungs; 1: no halving (down to 3 runs)")
    add("--ladder", action="store_true", help="train smaller models, for a scaling law")
    add(
        "--sizes", type=parse_model_sizes, default={}, metavar="LIST", help="parameters, such as 10M,30M,0.1B"
    )
    ratios = "10,20,40"
    add(
        "--ratios", type=parse_ratios, default=ratios, metavar="LIST", help=f"tokens per parameter ({ratios})"
    )
    add("--write-only", action="store_true", help="only write the TOML files of a ladder")
    add("--find-batch", action="store_true", help="find the largest micro-batch that fits")
    add("--measure", action="store_true", help="measure this machine's speed, for `titanlite plan`")
    add("--coordinate-check", action="store_true", help="compare what blocks learn at several widths")
    widths, names = [128, 256, 512, 1024], "128,256,512,1024"
    add("--widths", type=parse_widths, default=widths, metavar="LIST", help=f"widths to compare ({names})")
    add("--base-width", **number, default=128, help="width that CONFIG's settings are for (128)")
    add("--target-width", **number, default=0, help="width to print the settings for (see above)")
    add("--standard", action="store_true", help="use CONFIG's settings at every width, without rules")
    add("--steps", **number, default=5, help="training steps at each width (5)")
    add("--seeds", **number, help="2, or 1: no second seed (2); of the check (3)")
    add("--output", type=Path, help="folder of the runs; JSON file of the others")


def add_plan(options: Options) -> None:
    add = options.add
    options.usage = """titanlite plan CONFIG [options] [--section.key=value ...]
       titanlite plan [CONFIG] --fit RUN ... [options] [--section.key=value ...]"""
    add("config", help="a job's TOML file; keys may be overridden as for `titanlite train`")
    add("--gpus", help="number and kind of the GPUs, such as 64xH100 (the fewest possible, H100)")
    add(
        "--measured",
        type=Path,
        metavar="FILE",
        help="take the speed that `titanlite tune --measure` measured; --gpus may then be a number",
    )
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of one machine (8)")
    add("--price", type=parse_price, metavar="PRICE", help="of a GPU hour; adds what the run costs")
    add("--mtbf", type=parse_hours, metavar="HOURS", help="mean time between failures of the whole job")
    tokens = "tokens to train on, such as 160B, instead of training.steps"
    add("--tokens", type=parse_tokens, metavar="AMOUNT", help=tokens)
    add("--top", type=int, default=0, help="also list this many layouts of the same GPUs that fit (0)")
    runs = "finished runs, or folders with some: fit a scaling law to them, and forecast CONFIG's loss by it"
    add("--fit", type=Path, nargs="+", metavar="RUN", help=runs)
    add("--flops", type=parse_flops, help="with --fit: FLOPs to find the compute-optimal run for")
    add("--json", action="store_true", help="print the plan as JSON")
    add("--svg", type=Path, metavar="FILE", help="write a picture of a rank's memory over a step to FILE")
    _add_allow_imports(options)


def parse_widths(text: str) -> list[int]:
    """Return `128,512` as two or more different numbers in order. Raises ArgumentTypeError."""
    words = text.split(",")
    widths = sorted({int(word) for word in words if word.strip().isdecimal() and int(word) > 0})
    if len(widths) < len(words) or len(widths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of two or more widths such as 128,256,512")
    if widths[-1] < 4 * widths[0]:
        raise argparse.ArgumentTypeError(
            f"{widths[-1]} is less than 4 times {widths[0]}: seeds scatter too much for a slope over so "
            f"few widths; for example {widths[0]},{2 * widths[0]},{4 * widths[0]}"
        )
    return widths


def parse_model_sizes(text: str) -> dict[str, int]:
    """Return `100M,1.5B` as numbers of parameters by their texts, in order. Raises ArgumentTypeError."""
    sizes = dict[str, int]()
    for word in text.split(","):
        match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)([KMB]?)", word.strip().upper())
        if not match or not (size := round(float(match[1]) * SUFFIXES.get(match[2], 1))):
            raise argparse.ArgumentTypeError(f"{word!r} of {text!r} is not a size such as 30M or 1.5B")
        if size in sizes.values():
            raise argparse.ArgumentTypeError(f"{text!r} has {word.strip()} twice")
        sizes[match[0]] = size
    return dict(sorted(sizes.items(), key=lambda item: item[1]))


def parse_ratios(text: str) -> list[str]:
    """Return `10,20,40` as texts of different numbers above 0, in order. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", word) or float(word) == 0:
            raise argparse.ArgumentTypeError(
                f"{word!r} of {text!r} is not a number such as 20 or 0.5, from 0.000001 to 999999"
            )
    if len({float(word) for word in words}) < len(words):
        raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
    return sorted(words, key=float)


def parse_flops(text: str) -> float:
    """Return `1e21` as a number. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,30}(\.\d*)?([eE]\+?\d{1,2})?", text) or float(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of FLOPs such as 1e21")
    return float(text)


def parse_tokens(text: str) -> str:
    """Return `160B`, which is an amount of tokens. Raises ArgumentTypeError."""
    try:
        Amount.parse(f"{text} tokens")
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 160B") from None
    return text


def parse_price(text: str) -> float:
    """Return `2.50` as a number. Raises ArgumentTypeError."""
    price = _number(text)
    if price is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price such as 2.50, below 1e12")
    return price


def parse_hours(text: str) -> float:
    """Return `36.5` as a number above 0. Raises ArgumentTypeError."""
    hours = _number(text)
    if not hours:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of hours such as 36.5, above 0 and below 1e12"
        )
    return hours


def _number(text: str) -> float | None:
    """The number of a text such as `2.50` or `1e6`, from 0 to 1e12; None for any other text."""
    form = r"(\d{1,20}(\.\d*)?|\.\d+)([eE][+-]?\d{1,2})?"
    number = float(text) if re.fullmatch(form, text, re.ASCII) else math.inf
    return number if number < 1e12 else None


def add_report(options: Options) -> None:
    add_compare(options)
    options.add(
        "-o", "--output", type=Path, default=Path("report.html"), help="the file to write (report.html)"
    )
