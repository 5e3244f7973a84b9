"""The command line of every verb: its help, its options, and the TOML file that it names.

Does not import torch, so that help and errors in a command appear in a fraction of a second.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from titanlite import __version__
from titanlite.config import reference, schema, toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS, import_components
from titanlite.config.overrides import Bare, split_arguments, split_overrides, split_words
from titanlite.config.shipped import shipped_configs

DTYPES = ("float32", "bfloat16", "float16")  # dtypes of exported weights; as in interop/export.py
SIZE_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

KEYS = """
Precedence: command line, then file, then defaults; of several values for one key the last counts.
--section.key sets true, --no-section.key sets false. Lists and tables are in TOML syntax:
--generation.prompts='["a", "b"]'. --section={...} is merged into the section. Entries of a list are numbered:
--data.sources.0.weight=2.
"""
TRAIN = """usage: titanlite train CONFIG.toml [--section.key=value ...]

Train from a TOML file, in this process; ./run_train.sh and `titanlite launch` start several processes.
`titanlite train [CONFIG.toml] --help` lists every key, with those of components that the file imports;
`titanlite train [CONFIG.toml] --help SECTION` lists the keys of one section.
"""
RENAMED_OPTIONS = {"--row": "--sequence", "--rows": "--num-sequences"}  # old option -> new option
# Keys that titanlite does not have. Every TOML file of torchtitan has at least one of them.
TORCHTITAN = {
    "training.dataset", "training.dataset_path", "training.compile", "model.tokenizer_path",
    "model.hf_assets_path", "model.converters",
    "checkpoint.enable_checkpoint", "experimental", "quantize", "fault_tolerance",
}  # fmt: skip

# Modules and classes of the tables, imported only to explain keys of components from outside the package.
SCHEMAS = {"job": ("titanlite.job", "Job"), "prepare": ("titanlite.tools.prepare", "Prepare")}


@dataclass(frozen=True)
class Verb:
    """A verb of the command, described without importing its `module`, whose `main` runs the verb.

    `about`: one line for the overview. `usage`: the help; if empty, the module's docstring and the options.
    `options`: adds the options to a parser. `table`: the schema of the keys that the command line may
    override, `job` or `prepare`. `config_of`: maps the command line to its TOML file (None: no file) and
    overrides, or to None if it uses no configuration. `own`: options that are neither keys nor in `options`.
    """

    module: str
    about: str
    usage: str = ""
    options: Callable[[Options], None] | None = None
    table: str = ""
    config_of: Callable[[Sequence[str]], tuple[str | None, Sequence[str]] | None] | None = None
    own: tuple[str, ...] = ()

    def help(self, name: str) -> str:
        """Return the text of `titanlite VERB --help`."""
        if self.options:
            return parser(name).format_help()
        return self.usage or self.doc()

    def doc(self) -> str:
        """Return the docstring of the module, read from its source."""
        spec = importlib.util.find_spec(self.module)
        path = spec.origin if spec else None
        tree = ast.parse(Path(path).read_text(encoding="utf-8") if path else "")
        return (ast.get_docstring(tree) or "") + "\n"


class Options(argparse.ArgumentParser):
    """A parser of options. `-` and `_` in names are equal, names cannot be abbreviated, and errors are raised
    as ConfigError."""

    def __init__(self, **kwargs: Any):
        self._known: dict[str, str] = {}
        super().__init__(allow_abbrev=False, **kwargs)

    def add(self, *names: str, **kwargs: Any) -> None:
        """Add an argument as `add_argument` does."""
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


def parser(name: str) -> Options:
    """Return the parser of a verb's own options."""
    verb = VERBS[name]
    options = Options(prog=f"titanlite {name}", description=verb.doc())
    if verb.options:
        verb.options(options)
    return options


def take_flag(argv: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Return whether a command line has `flag`, and the command line without it."""
    rest = [word for word in argv if word.replace("_", "-") != flag]
    return len(rest) < len(argv), rest


def take_numbers(overrides: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """Return the options of these names, which take integers from 0, and the overrides without them. Raises
    ConfigError."""
    own, others = dict[str, int](), list[str]()
    for key, value in split_overrides(overrides):
        if key not in names:
            others.append(f"--{key}" if isinstance(value, Bare) else f"--{key}={value}")
        elif not value.isdecimal():
            raise ConfigError(f"command line, --{key}: {value!r} is not an integer from 0")
        else:
            own[key] = int(value)
    return own, others


# ---- options


def _launch(options: Options) -> None:
    add = options.add
    options.usage = "titanlite launch [options] CONFIG.toml [--section.key=value ...]"
    add("--nproc-per-node", default="1", help="number of processes on this node (1)")
    add("--nnodes", default="1", help="number of nodes (1), or MIN:MAX to continue while MIN nodes are left")
    add("--node-rank", default="0", help="rank of this node, from 0 (0)")
    add("--rdzv-endpoint", default="", help="host:port of the first node; required for several nodes")
    add("--rdzv-id", default="", help="secret word of this run; nodes with another word cannot join")
    add("--max-restarts", default="0", help="number of restarts of all processes after crashes (0)")


def launch_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Return the launcher's options, the TOML file, and its overrides. Raises ConfigError."""
    options, rest = parser("launch").read_known(argv)
    for key, least in (("nproc_per_node", 1), ("node_rank", 0), ("max_restarts", 0)):
        setattr(options, key, _number(key, getattr(options, key), least))
    options.max_nodes = max(_number("nnodes", text, 1) for text in options.nnodes.split(":", 1))
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
    name = {"nproc_per_node": "NGPU"}.get(key, key.upper())
    raise ConfigError(f"{name}={text}: expected an integer >= {least}")


def _generate(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, checkpoint folder, step-N folder or Hugging Face directory")
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    add("--prompt-file", type=Path, help="a file with one prompt per line")
    add("--max-new-tokens", type=int, default=64, help="maximum number of tokens after the prompt (64)")
    add("--temperature", type=float, default=0.7, help="sampling temperature; 0: the likeliest token (0.7)")
    add("--top-k", type=int, default=0, help="sample from the K likeliest tokens only; 0: from all (0)")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of probability P (1)")
    add("--seed", type=int, default=0, help="seed of the sampling; prompt i has seed + i (0)")
    add("--ema", action="store_true", help="use the checkpoint's average of the weights ([ema])")
    _add_allow_imports(options)


def _export(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, its checkpoint folder, or one step-N folder")
    add("target", type=Path, help="the directory to make")
    _add_format(options, default_dtype="bfloat16")
    add("--keep-padding", action="store_true", help="keep rows of embedding and head without a token id")
    add("--ema", action="store_true", help="export the checkpoint's average of the weights ([ema])")
    _add_allow_imports(options)


def _import(options: Options) -> None:
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
    options.add("--max-shard-size", type=parse_size, default="5GB", help="maximum size of one file (5GB)")


def parse_size(text: str) -> int:
    """Return `5GB`, `500MB`, `2GiB` or a number in bytes. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    if not match or match[2].upper() not in SIZE_UNITS or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def _migrate(options: Options) -> None:
    options.add("source", type=Path, help="a TOML file of torchtitan 0.1 or 0.2")
    options.add("-o", "--output", type=Path, help="the file to write (standard output)")


def _compare(options: Options) -> None:
    options.add("runs", type=Path, nargs="+", metavar="RUN", help="a run folder, which has metrics.jsonl")
    options.add(
        "--price-per-gpu-hour",
        type=parse_price,
        metavar="PRICE",
        help="adds what the GPU hours of each run cost",
    )


def _tune(options: Options) -> None:
    add = options.add
    options.usage = "titanlite tune CONFIG --coordinate-check [options] [--section.key=value ...]"
    add("config", help="a job's TOML file; keys may be overridden as for `titanlite train`")
    add("--coordinate-check", action="store_true", help="compare what blocks learn at several widths")
    widths = [128, 256, 512, 1024]
    add("--widths", type=parse_widths, default=widths, help="widths to compare (128,256,512,1024)")
    add("--base-width", type=int, default=128, help="width that the settings in CONFIG are for (128)")
    add("--target-width", type=int, default=0, help="width to print the settings for (see above)")
    add("--standard", action="store_true", help="use the settings in CONFIG at every width, without rules")
    add("--steps", type=int, default=5, help="training steps at each width (5)")
    add("--seeds", type=int, default=3, help="number of seeds, from training.seed on, to average over (3)")
    add("--output", type=Path, help="also write all numbers to this JSON file")


def tune_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `titanlite tune` and the overrides. Raises ConfigError."""
    options, overrides = parser("tune").read_known(argv)
    if not options.coordinate_check:
        raise ConfigError("name what to do: --coordinate-check; see `titanlite tune --help`")
    for key in ("base_width", "steps", "seeds"):
        if getattr(options, key) < 1:
            raise ConfigError(f"command line, --{key.replace('_', '-')}: {getattr(options, key)} is below 1")
    if options.target_width < 0:
        raise ConfigError(f"command line, --target-width: {options.target_width} is below 0")
    return options, overrides


def parse_widths(text: str) -> list[int]:
    """Return `128,256` as two or more different numbers in order. Raises ArgumentTypeError."""
    words = text.split(",")
    widths = sorted({int(word) for word in words if word.strip().isdecimal() and int(word) > 0})
    if len(widths) < len(words) or len(widths) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of two or more widths such as 128,256,512")
    return widths


def parse_price(text: str) -> float:
    """Return `2.50` as a number. Raises ArgumentTypeError."""
    if not re.fullmatch(r"\d{1,9}(\.\d*)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a price such as 2.50")
    return float(text)


def _report(options: Options) -> None:
    _compare(options)
    options.add(
        "-o", "--output", type=Path, default=Path("report.html"), help="the file to write (report.html)"
    )


# ---- the configuration of a command line: TOML file and overrides


def _launch_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    return launch_arguments(argv)[1:]


def _import_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = parser("import").read_known(argv)
    return options.config, overrides


def _tune_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = tune_arguments(argv)
    return options.config, overrides


def _config_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    path, overrides = split_arguments(take_flag(argv, ALLOW_IMPORTS)[1])
    return path, take_numbers(overrides, ["ranks"])[1]


def shown_config(path: str) -> str | None:
    """Return the configuration whose sequences `titanlite data show PATH` prints: a TOML file, the job.toml
    of a run folder, or the name of a configuration that comes with titanlite. None for a dataset."""
    if path.endswith(".toml"):
        return path
    here = Path(path)
    if here.exists():
        is_run = (here / "job.toml").is_file() and not (here / "dataset.json").exists()
        return str(here / "job.toml") if is_run else None
    return path if path in shipped_configs() else None


def _data_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    path, overrides = split_arguments(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    config = shown_config(path) if argv[0] == "show" and path is not None else None
    if config is None:
        return None
    return config, take_numbers(overrides, ["sequence", "num_sequences"])[1]


def _tokenizer_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    named = argv[0] == "show" and words and words[0].endswith(".toml")
    return (words[0], overrides) if named else None


def _metrics_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    return (str(Path(words[0]) / "job.toml"), overrides) if argv[0] == "push" and words else None


def _prepare_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    words, overrides = split_words(argv)
    return (words[0] if words and words[0].endswith(".toml") else None), overrides


# ---- the verbs

VERBS = {
    "train": Verb(
        "titanlite.train",
        "train from a TOML file, in this process",
        usage=TRAIN,
        table="job",
        config_of=split_arguments,
    ),
    "launch": Verb(
        "titanlite.tools.launch",
        "train on several processes through torchrun; run_train.sh calls it",
        options=_launch,
        table="job",
        config_of=_launch_config,
    ),
    "generate": Verb("titanlite.tools.generate", "sample text from a checkpoint", options=_generate),
    "export": Verb("titanlite.tools.export", "write a checkpoint as a Hugging Face model", options=_export),
    "import": Verb(
        "titanlite.tools.import_weights",
        "convert torchtitan's or Meta's weights to a Hugging Face directory",
        options=_import,
        table="job",
        config_of=_import_config,
    ),
    "checkpoint": Verb(
        "titanlite.tools.checkpoint",
        "list, verify, show and average checkpoints",
        own=("--tensors", "--last", "--steps", "--weights", "--output", "--allow-decayed", ALLOW_IMPORTS),
    ),
    "compare": Verb("titanlite.tools.compare", "compare runs on the terminal", options=_compare),
    "report": Verb("titanlite.tools.report", "write an HTML report on runs", options=_report),
    "tune": Verb(
        "titanlite.tools.tune",
        "check that settings carry over to wider models",
        options=_tune,
        table="job",
        config_of=_tune_config,
    ),
    "prepare": Verb(
        "titanlite.tools.prepare",
        "make a dataset of token shards from text",
        table="prepare",
        config_of=_prepare_config,
    ),
    "data": Verb(
        "titanlite.tools.data",
        "verify and show datasets",
        table="job",
        config_of=_data_config,
        own=("--sequence", "--num-sequences", "--seq-len", "--packing", "--cache-dir", ALLOW_IMPORTS),
    ),
    "tokenizer": Verb(
        "titanlite.tools.tokenizer",
        "train and show tokenizers",
        table="job",
        config_of=_tokenizer_config,
        own=(ALLOW_IMPORTS,),
    ),
    "metrics": Verb(
        "titanlite.tools.metrics",
        "send the metrics of a run to experiment trackers",
        table="job",
        config_of=_metrics_config,
        own=(ALLOW_IMPORTS,),
    ),
    "migrate": Verb("titanlite.tools.migrate", "translate a TOML file of torchtitan", options=_migrate),
    "config": Verb(
        "titanlite.tools.config",
        "check a configuration and print it resolved, or print the reference of all keys",
        table="job",
        config_of=_config_config,
        own=("--ranks", "--reference", ALLOW_IMPORTS),
    ),
}


def find(name: str) -> Verb:
    """Return the verb called `name`. Raises ConfigError, which lists all verbs."""
    if name in VERBS:
        return VERBS[name]
    close = get_close_matches(name, VERBS, n=1)
    hint = f"; did you mean `titanlite {close[0]}`?" if close else ""
    raise ConfigError(f"unknown verb {name!r}{hint} (known: {', '.join(VERBS)})")


def overview() -> str:
    """Return the text of `titanlite --help`."""
    verbs = "\n".join(f"  {name:10} {verb.about}" for name, verb in VERBS.items())
    return (
        f"usage: titanlite VERB ...\n\n{verbs}\n\n"
        "`titanlite VERB --help` explains a verb; `titanlite --version` prints the versions in use."
    )


def version() -> str:
    """Return the versions of titanlite, torch and Python."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    return f"titanlite {__version__} (torch {torch}, Python {platform.python_version()})"


def text(name: str, words: Sequence[str]) -> str | None:
    """Return the output of a command that asks for help or for the reference; None for other commands."""
    verb = VERBS[name]
    if name in ("config", "prepare") and "--reference" in words:
        head = reference.JOB_HEAD if name == "config" else reference.PREPARE_HEAD
        return head + reference.markdown(_keys(verb, [word for word in words if word != "--reference"]))
    if not {"-h", "--help"} & set(words):
        return None
    at = next(i for i, word in enumerate(words) if word in ("-h", "--help"))
    section = next(iter(words[at + 1 :]), "--")
    if name in ("train", "launch", "config", "prepare") and not section.startswith("--"):
        chosen = reference.section(_keys(verb, words[:at]), section)
        return reference.help_text(chosen) + "\n"
    if name == "launch" and any(word.endswith(".toml") for word in words):  # run_train.sh CONFIG.toml --help
        name = "train"
    lists = name in ("train", "prepare")
    keys = reference.help_text(reference.sections(_keys(verb, words[:at]))) if lists else ""
    return VERBS[name].help(name) + (f"{KEYS}\n{keys}\n" if lists else "")


def _keys(verb: Verb, words: Sequence[str]) -> schema.Node:
    """Return all keys of a verb. If the command names a configuration with imports, they run first, so that
    the keys of the components that they register are included. Raises ConfigError if they fail."""
    allowed, words = take_flag(words, ALLOW_IMPORTS)
    tree, locator = toml.read(None)
    with suppress(ConfigError):  # help is also for commands with mistakes
        if words and verb.config_of and (config := verb.config_of(words)):
            tree, locator = toml.read(*config)
    if not schema.imports_of(tree)[1]:
        return schema.table(verb.table)
    import_components(tree, locator, allowed or ALLOW_IMPORTS not in verb.own)
    module, cls = SCHEMAS[verb.table]
    return schema.describe(getattr(importlib.import_module(module), cls), docs=True)


def check(name: str, words: Sequence[str]) -> None:
    """Check a command and its configuration without importing the verb. Raises ConfigError, with one line per
    mistake."""
    verb = VERBS[name]
    _check_options(name, words)
    if verb.config_of is None and verb.options:
        parser(name).read(words)
    config = verb.config_of(words) if verb.config_of else None
    if config is None:
        return
    tree, locator = toml.read(*config)
    try:
        toml.check(schema.table(verb.table), tree, locator)
    except ConfigError as e:
        unknown = {str(error.key) for error in e.errors if not locator.overrides(error.key or "")}
        if name != "prepare" and (theirs := sorted(TORCHTITAN & unknown)):
            raise ConfigError(
                f"{locator.path} is a torchtitan file (it has {theirs[0]}); translate it first: "
                f"titanlite migrate {locator.path} -o NEW.toml"
            ) from None
        raise


def _check_options(name: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a misspelled option: similar to an option of the verb, and neither an option nor
    a top-level section or key of the configuration."""
    verb = VERBS[name]
    own = [*verb.own, *(parser(name).known if verb.options else ())]
    keys = schema.table(verb.table)["keys"] if own and verb.table else {}
    for word in words if own else ():
        given = word.partition("=")[0]
        option = given.replace("_", "-")
        if not option.startswith("--") or "." in option:
            continue
        if (renamed := RENAMED_OPTIONS.get(option)) in own:
            parser(name).error(f"unknown option {given!r}; did you mean {renamed!r}?")
        if option not in own and given[2:].replace("-", "_") not in keys and get_close_matches(option, own):
            parser(name).error(f"unknown option {given!r}{suggest(option, own)}")
