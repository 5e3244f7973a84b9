"""The core verbs of the command line: their help, their options, and the TOML file that each names.

Does not import torch, so that help and errors in a command appear in a fraction of a second.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands import Verb, parser
from titanlite.config import reference
from titanlite.config.component import ConfigError
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import split_arguments
from titanlite.config.paths import check_folder
from titanlite.config.shipped import shipped_configs
from titanlite.object_store import location
from titanlite.options import Options, add_allow_imports, take_flag, take_numbers

DTYPES = ("float32", "bfloat16", "float16")  # dtypes of exported weights; as in interop/export.py
BASE = "the directory of the base model of adapters ([lora]), if it has moved"
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
NO_FILES = "--no-files"
CONFIG_NUMBERS = ("ranks", "gpus_per_node")  # options of `titanlite config` that take integers

TRAIN = """usage: titanlite train CONFIG.toml [--section.key=value ...]

Train from a TOML file, in this process; ./run_train.sh and `titanlite launch` start several processes.
`titanlite train [CONFIG.toml] --help SECTION` lists the keys of one section, `--help SECTION.KEY` explains a
key, and `--help all` lists every key. With CONFIG.toml, they include the components that the file imports.
"""


# ---- options


def add_launch(options: Options) -> None:
    add = options.add
    options.usage = "titanlite launch [options] CONFIG.toml [--section.key=value ...]"
    add("--nproc-per-node", default="1", help="number of processes on this node (1)")
    add("--nnodes", default="1", help="number of nodes (1), or MIN:MAX to continue while MIN nodes are left")
    add("--node-rank", default="0", help="rank of this node, from 0 (0)")
    add("--rdzv-endpoint", default="", help="host:port of the first node; required for several nodes")
    add("--rdzv-id", default="", help="secret word of this run; nodes with another word cannot join")
    add("--max-restarts", default="0", help="number of restarts of all processes after crashes (0)")
    add("--grace", default="", help="seconds from a signal to stop until this node is killed (no limit)")
    add(
        "--notice",
        default="",
        help="stop at a notice that the node is taken away: of aws, azure, google, at a URL or in a file",
    )
    add(
        "--exclude-slow",
        action="store_true",
        help="at a restart, this node leaves the run if a rank of it was named as slow and enough nodes stay",
    )


def add_generate(options: Options) -> None:
    add = options.add
    add(
        "path", type=location, help="a run folder, checkpoint folder, step-N folder or Hugging Face directory"
    )
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
    add_allow_imports(options)


def add_export(options: Options) -> None:
    add = options.add
    add("path", type=location, help="a run folder, its checkpoint folder, or one step-N folder")
    add("target", type=location, help="the directory to make")
    _add_format(options, default_dtype="bfloat16")
    add("--format", default="huggingface", help="huggingface, or nanochat for the model gpt (huggingface)")
    add("--keep-padding", action="store_true", help="keep rows of embedding and head without a token id")
    add("--ema", action="store_true", help="export the checkpoint's average of the weights ([ema])")
    add("--adapter", action="store_true", help="export adapters ([lora]) for PEFT, not merged into a model")
    add("--base", type=Path, help=BASE)
    add_allow_imports(options)


def add_import(options: Options) -> None:
    add = options.add
    options.usage = "titanlite import [options] SRC DIR CONFIG.toml [--section.key=value ...]"
    add("source", type=location, help="the directory to read")
    add("target", type=location, help="the directory to make")
    add("config", help="a job's TOML file; keys may be overridden as for `titanlite train`")
    _add_format(options, default_dtype="as-is")
    add_allow_imports(options)


def _add_format(options: Options, default_dtype: str) -> None:
    dtypes = [*DTYPES, "as-is"]
    options.add("--dtype", choices=dtypes, help=f"dtype of weights ({default_dtype})")
    options.add("--max-shard-size", type=parse_size, help="maximum size of one file (5GB)")


def parse_size(text: str) -> int:
    """Return `5GB`, `500MB`, `2GiB` or a number in bytes. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in SIZE_UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


# ---- arguments that are checked together, and the TOML file and overrides of a command line


def launch_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Return the launcher's options, the TOML file, and its overrides. Raises ConfigError."""
    options, rest = parser("launch").read_known(argv)
    for key, least in (("nproc_per_node", 1), ("node_rank", 0), ("max_restarts", 0)):
        setattr(options, key, _number(key, getattr(options, key), least))
    options.grace = _number("grace", options.grace, 1) if options.grace else None
    nodes = [_number("nnodes", text, 1) for text in options.nnodes.split(":", 1)]
    options.min_nodes, options.max_nodes = nodes[0], nodes[-1]
    if options.min_nodes > options.max_nodes:
        raise ConfigError(f"NNODES={options.nnodes}: expected MIN:MAX with MIN <= MAX")
    options.node_numbers = range(options.min_nodes, options.max_nodes + 1)  # on which the job may train
    if options.max_nodes > 1 and not options.rdzv_endpoint:
        raise ConfigError(
            "several nodes need --rdzv-endpoint=host:port (RDZV_ENDPOINT for run_train.sh), equal on all "
            "nodes, with the host of the first node"
        )
    path, overrides = split_arguments(rest)
    if path is None:
        raise ConfigError("name a TOML file before its overrides; see `titanlite launch --help`")
    return options, path, list(overrides)


def _number(key: str, text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    variable = {"nproc_per_node": "NGPU"}.get(key, key.upper())
    option = f"--{key.replace('_', '-')}={text} ({variable} of run_train.sh)"
    hint = "; torchrun's words are not known here" if text in ("auto", "cpu", "gpu") else ""
    raise ConfigError(f"command line, {option}: expected an integer >= {least}{hint}")


def shown_config(path: str) -> str | None:
    """Return the configuration that `titanlite data show PATH` and `titanlite data plan PATH` are about:
    a TOML file, the job.toml of a run folder, or the name of a configuration that comes with titanlite. None
    for a dataset."""
    if path.endswith(".toml"):
        return path
    here = Path(path)
    if here.exists():
        is_run = (here / "job.toml").is_file() and not (here / "dataset.json").exists()
        return str(here / "job.toml") if is_run else None
    return path if path in shipped_configs() else None


def _import_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = parser("import").read_known(argv)
    return options.config, overrides


def _config_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    path, overrides = split_arguments(take_flag(take_flag(argv, ALLOW_IMPORTS)[1], NO_FILES)[1])
    return path, take_numbers(overrides, CONFIG_NUMBERS, least=1)[1]


def _check_path(options: argparse.Namespace) -> None:
    if isinstance(options.path, Path):
        check_folder(options.path)


VERBS = {
    "train": Verb(
        "titanlite.train",
        "train from a TOML file, in this process",
        usage=TRAIN,
        table="job",
        config_of=split_arguments,
        explains_keys=True,
    ),
    "launch": Verb(
        "titanlite.tools.launch",
        "train on several processes through torchrun; run_train.sh calls it",
        options=add_launch,
        table="job",
        config_of=lambda argv: launch_arguments(argv)[1:],
        explains_keys=True,
    ),
    "generate": Verb(
        "titanlite.tools.generate",
        "sample text from a checkpoint",
        options=add_generate,
        check=_check_path,
    ),
    "export": Verb(
        "titanlite.tools.export",
        "write a checkpoint as a Hugging Face model",
        options=add_export,
        check=_check_path,
    ),
    "import": Verb(
        "titanlite.tools.import_weights",
        "convert torchtitan's or Meta's weights to a Hugging Face directory",
        options=add_import,
        table="job",
        config_of=_import_config,
    ),
    "checkpoint": Verb(
        "titanlite.tools.checkpoint",
        "list, verify, show, average and digest checkpoints",
        own=("--tensors", "--last", "--steps", "--weights", "--output", "--allow-decayed", ALLOW_IMPORTS),
    ),
    "config": Verb(
        "titanlite.tools.config",
        "check a configuration and print it resolved, or print the reference of all keys",
        table="job",
        config_of=_config_config,
        own=("--ranks", NO_FILES, "--gpus-per-node", "--reference", ALLOW_IMPORTS),
        explains_keys=True,
        reference=reference.JOB_HEAD,
    ),
}
