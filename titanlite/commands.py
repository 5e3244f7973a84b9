"""The command line of every verb: its help, its options, and the configuration file that it names.

Imports no torch, so that help and mistakes in a command take a fraction of a second.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from titanlite import __version__
from titanlite.config import reference, schema, toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS
from titanlite.config.overrides import Bare, split_arguments, split_overrides, split_words

DTYPES = ("float32", "bfloat16", "float16")  # of exported weights; as in interop/export.py

KEYS = """
The command line goes before the file, the file before the defaults; of several values for one key the last
counts. --section.key is true, --no-section.key is false. Lists and tables are in TOML syntax:
--generation.prompts='["a", "b"]'. --section={...} is merged into the section. A table of a list has a number:
--data.sources.0.weight=2.
"""
TRAIN = """usage: titanlite train CONFIG.toml [--section.key=value ...]

Train from a TOML file, in this process; ./run_train.sh and `titanlite launch` start several processes.
`titanlite train --help` lists every key, `titanlite train --help SECTION` those of one section.
"""
RENAMED_OPTIONS = {"--row": "--sequence", "--rows": "--num-sequences"}  # of verbs; old name -> new name
# Keys of torchtitan's files that titanlite does not have; every such file has one of them.
TORCHTITAN = {
    "training.dataset", "training.dataset_path", "training.compile", "model.tokenizer_path",
    "model.hf_assets_path", "model.converters",
    "checkpoint.enable_checkpoint", "experimental", "quantize", "fault_tolerance",
}  # fmt: skip


@dataclass(frozen=True)
class Verb:
    """A verb of the command: the module whose `main` runs it, and what is known of it without importing that
    module. The help is `usage`, or the module's docstring, and `options`.

    `table`: the keys that its help lists and its command line may override, `job` or `prepare`; `names`: the
    file of such keys that a command line names, None for an empty one, and its overrides; `own`: options that
    are neither keys nor in `options`.
    """

    module: str
    about: str
    usage: str = ""
    options: Callable[[Options], None] | None = None
    table: str = ""
    names: Callable[[Sequence[str]], tuple[str | None, Sequence[str]] | None] | None = None
    own: tuple[str, ...] = ()

    def help(self, name: str) -> str:
        """The usage and the options."""
        if self.options:
            return parser(name).format_help()
        return self.usage or self.doc()

    def doc(self) -> str:
        """The docstring of the module, read from its source."""
        spec = importlib.util.find_spec(self.module)
        path = spec.origin if spec else None
        tree = ast.parse(Path(path).read_text(encoding="utf-8") if path else "")
        return (ast.get_docstring(tree) or "") + "\n"


class Options(argparse.ArgumentParser):
    """A parser that takes options spelled with `-` or `_`, never abbreviated, and reports a mistake as one
    line."""

    def __init__(self, **kwargs: Any):
        self._known: dict[str, str] = {}
        super().__init__(allow_abbrev=False, **kwargs)

    def add(self, *names: str, **kwargs: Any) -> None:
        """Add an argument as `add_argument` does, and its other spelling."""
        self._known |= {name.replace("-", "_"): name for name in names if name.startswith("--")}
        self.add_argument(*names, **kwargs)

    def read_known(self, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """The options, and the words that are none. Raises ConfigError."""
        return self.parse_known_args([self._spelled(word) for word in argv])

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """The options. Raises ConfigError, also for a word that is none."""
        options, rest = self.read_known(argv)
        if rest:
            word = rest[0].partition("=")[0]
            known = suggest(word, self.known) if word.startswith("-") else ""
            self.error(f"unknown {'option' if known else 'argument'} {word!r}{known}")
        return options

    @property
    def known(self) -> list[str]:
        """The options that have been added, such as --top-k."""
        return list(self._known.values())

    def error(self, message: str) -> Any:
        """Raise ConfigError, for which the command prints one line and ends with exit code 2."""
        raise ConfigError(f"{message}; see `{self.prog} --help`")

    def _spelled(self, word: str) -> str:
        name, equals, value = word.partition("=")
        return self._known.get(name.replace("-", "_"), name) + equals + value


def parser(name: str) -> Options:
    """The parser of a verb's own options."""
    verb = VERBS[name]
    made = Options(prog=f"titanlite {name}", description=verb.doc())
    if verb.options:
        verb.options(made)
    return made


def take_flag(argv: Sequence[str], flag: str) -> tuple[bool, list[str]]:
    """Whether a command line has `flag`, and the command line without it."""
    rest = [word for word in argv if word.replace("_", "-") != flag]
    return len(rest) < len(argv), rest


def take_numbers(overrides: Sequence[str], names: Sequence[str]) -> tuple[dict[str, int], list[str]]:
    """A verb's own options of these names, which take whole numbers from 0, and the overrides without them.
    Raises ConfigError."""
    own, others = dict[str, int](), list[str]()
    for key, value in split_overrides(overrides):
        if key not in names:
            others.append(f"--{key}" if isinstance(value, Bare) else f"--{key}={value}")
        elif not value.isdecimal():
            raise ConfigError(f"command line, --{key}: {value!r} is not a number from 0")
        else:
            own[key] = int(value)
    return own, others


# ---- options


def _launch(options: Options) -> None:
    add = options.add
    options.usage = "titanlite launch [options] CONFIG.toml [--section.key=value ...]"
    add("--nproc-per-node", default="1", help="processes on this node")
    add("--nnodes", default="1", help="nodes, or MIN:MAX: go on while MIN are there")
    add("--node-rank", default="0", help="which of them this is")
    add("--rdzv-endpoint", default="", help="host:port of the first node; needed for several nodes")
    add("--rdzv-id", default="", help="a word that all nodes of this run share; others are not let in")
    add("--max-restarts", default="0", help="restarts of all processes after a failure")


def launch_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """The launcher's own options, the TOML file, and its overrides. Raises ConfigError."""
    options, rest = parser("launch").read_known(argv)
    for key, least in (("nproc_per_node", 1), ("node_rank", 0), ("max_restarts", 0)):
        setattr(options, key, _number(key, getattr(options, key), least))
    options.max_nodes = max(_number("nnodes", text, 1) for text in options.nnodes.split(":", 1))
    if options.max_nodes > 1 and not options.rdzv_endpoint:
        raise ConfigError(
            "several nodes need --rdzv-endpoint=host:port (RDZV_ENDPOINT for run_train.sh), the same on all "
            "nodes; host is the first node"
        )
    path, overrides = split_arguments(rest)
    if path is None:
        raise ConfigError("name a TOML file before its overrides; see `titanlite launch --help`")
    return options, path, list(overrides)


def _number(key: str, text: str, least: int) -> int:
    if text.isdecimal() and int(text) >= least:
        return int(text)
    name = {"nproc_per_node": "NGPU"}.get(key, key.upper())
    raise ConfigError(f"{name}={text}: expected a whole number from {least} on")


def _generate(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, its checkpoint folder, a step-N folder, or a Hugging Face one")
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    add("--prompt-file", type=Path, help="a file with a prompt on each line")
    add("--max-new-tokens", type=int, default=64, help="tokens after the prompt, at most (64)")
    add("--temperature", type=float, default=0.7, help="0: the likeliest token each time (0.7)")
    add("--top-k", type=int, default=0, help="sample from so many of the likeliest tokens; 0: all (0)")
    add("--top-p", type=float, default=1.0, help="sample from the likeliest of this probability; 1: all (1)")
    add("--seed", type=int, default=0, help="seed of the sampling; prompt i has seed + i (0)")
    _add_allow_imports(options)


def _export(options: Options) -> None:
    add = options.add
    add("path", type=Path, help="a run folder, its checkpoint folder, or one step-N folder")
    add("target", type=Path, help="the directory to make")
    _add_format(options, default_dtype="bfloat16")
    add("--keep-padding", action="store_true", help="keep rows of the vocabulary that no id needs")
    _add_allow_imports(options)


def _import(options: Options) -> None:
    add = options.add
    options.usage = (
        "titanlite import SRC DIR CONFIG.toml [--dtype T] [--max-shard-size SIZE] [--a.key=value ...]"
    )
    add("source", type=Path, help="what to read")
    add("target", type=Path, help="the directory to make")
    add("config", help="a job's TOML file; keys may be overridden as in `train`")
    _add_format(options, default_dtype="as-is")
    _add_allow_imports(options)


def _add_allow_imports(options: Options) -> None:
    options.add(ALLOW_IMPORTS, action="store_true", help="run the modules that the job imports")


def _add_format(options: Options, default_dtype: str) -> None:
    """How weights are written."""
    add = options.add
    add(
        "--dtype", choices=[*DTYPES, "as-is"], default=default_dtype, help=f"of the weights ({default_dtype})"
    )
    add("--max-shard-size", default="5GB", help="of one file (5GB)")


def _migrate(options: Options) -> None:
    add = options.add
    add("source", type=Path, help="a TOML file of torchtitan 0.1 or 0.2")
    add("-o", "--output", type=Path, help="the file to write; otherwise to standard output")


# ---- the configuration that a command names


def _of_launch(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    return launch_arguments(argv)[1:]


def _of_import(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = parser("import").read_known(argv)
    return options.config, overrides


def _of_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    path, overrides = split_arguments(take_flag(argv, ALLOW_IMPORTS)[1])
    return path, take_numbers(overrides, ["ranks"])[1]


def _of_data(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    path, overrides = split_arguments(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    if argv[0] != "show" or path is None or not path.endswith(".toml"):
        return None
    return path, take_numbers(overrides, ["sequence", "num_sequences"])[1]


def _of_tokenizer(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    named = argv[0] == "show" and words and words[0].endswith(".toml")
    return (words[0], overrides) if named else None


def _of_prepare(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    words, overrides = split_words(argv)
    return (words[0] if words and words[0].endswith(".toml") else None), overrides


# ---- the verbs

VERBS = {
    "train": Verb(
        "titanlite.train",
        "train from a TOML file, in this process",
        usage=TRAIN,
        table="job",
        names=split_arguments,
    ),
    "launch": Verb(
        "titanlite.tools.launch",
        "train on several processes through torchrun; what run_train.sh calls",
        options=_launch,
        table="job",
        names=_of_launch,
    ),
    "generate": Verb("titanlite.tools.generate", "sample text from a checkpoint", options=_generate),
    "export": Verb(
        "titanlite.tools.export", "write a checkpoint's model as a Hugging Face directory", options=_export
    ),
    "import": Verb(
        "titanlite.tools.import_weights",
        "make a Hugging Face directory of torchtitan's or Meta's weights",
        options=_import,
        table="job",
        names=_of_import,
    ),
    "checkpoint": Verb("titanlite.tools.checkpoint", "list, verify and show checkpoints", own=("--tensors",)),
    "prepare": Verb(
        "titanlite.tools.prepare",
        "make a dataset of token shards from text",
        table="prepare",
        names=_of_prepare,
    ),
    "data": Verb(
        "titanlite.tools.data",
        "verify and show datasets",
        table="job",
        names=_of_data,
        own=("--sequence", "--num-sequences", "--seq-len", "--packing", "--cache-dir", ALLOW_IMPORTS),
    ),
    "tokenizer": Verb(
        "titanlite.tools.tokenizer",
        "train and show tokenizers",
        table="job",
        names=_of_tokenizer,
        own=(ALLOW_IMPORTS,),
    ),
    "migrate": Verb(
        "titanlite.tools.migrate", "turn a torchtitan 0.1 or 0.2 TOML file into titanlite's", options=_migrate
    ),
    "config": Verb(
        "titanlite.tools.config",
        "print a resolved configuration, or the reference of all keys",
        table="job",
        names=_of_config,
        own=("--ranks", "--reference", ALLOW_IMPORTS),
    ),
}


def find(name: str) -> Verb:
    """The verb called `name`, or a ConfigError that lists them."""
    if name in VERBS:
        return VERBS[name]
    close = get_close_matches(name, VERBS, n=1)
    hint = f"; did you mean `titanlite {close[0]}`?" if close else ""
    raise ConfigError(f"unknown verb {name!r}{hint} (known: {', '.join(VERBS)})")


def overview() -> str:
    """The text of `titanlite --help`."""
    verbs = "\n".join(f"  {name:10} {verb.about}" for name, verb in VERBS.items())
    return (
        f"usage: titanlite VERB ...\n\n{verbs}\n\n"
        "`titanlite VERB --help` explains a verb; `titanlite --version` prints the versions in use."
    )


def version() -> str:
    """titanlite's version, torch's, and Python's."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    return f"titanlite {__version__} (torch {torch}, Python {platform.python_version()})"


def text(name: str, words: Sequence[str]) -> str | None:
    """What a command prints that only asks for help or for the reference; None for any other command."""
    if name in ("config", "prepare") and words[:1] == ["--reference"]:
        head = reference.JOB_HEAD if name == "config" else reference.PREPARE_HEAD
        return head + reference.markdown(schema.table(VERBS[name].table))
    if not {"-h", "--help"} & set(words):
        return None
    at = next(i for i, word in enumerate(words) if word in ("-h", "--help"))
    section = next(iter(words[at + 1 :]), "--")
    if name in ("train", "launch", "config", "prepare") and not section.startswith("--"):
        chosen = reference.section(schema.table(VERBS[name].table), section)
        return reference.help_text(chosen) + "\n"
    if name == "launch" and any(word.endswith(".toml") for word in words):  # of run_train.sh CONFIG --help
        name = "train"
    lists = name in ("train", "prepare")
    keys = reference.help_text(reference.sections(schema.table(VERBS[name].table))) if lists else ""
    return VERBS[name].help(name) + (f"{KEYS}\n{keys}\n" if lists else "")


def check(name: str, words: Sequence[str]) -> None:
    """Find mistakes in a command and in the configuration that it names, without importing the verb. Raises
    ConfigError, which has a line for each."""
    verb = VERBS[name]
    _check_options(name, words)
    if verb.names is None:
        if verb.options:
            parser(name).read(words)
        return
    named = verb.names(words)
    if named is None:
        return
    tree, locator = toml.read(*named)
    try:
        toml.check(schema.table(verb.table), tree, locator)
    except ConfigError as e:
        unknown = {str(error.key) for error in e.errors if not locator.overrides(error.key or "")}
        if name != "prepare" and (theirs := sorted(TORCHTITAN & unknown)):
            raise ConfigError(
                f"{locator.path} is a file of torchtitan's (it has {theirs[0]}); make it titanlite's first: "
                f"titanlite migrate {locator.path} -o NEW.toml"
            ) from None
        raise


def _check_options(name: str, words: Sequence[str]) -> None:
    """Raise ConfigError for an option that is nearly one of the verb's own, and neither that nor a section or
    key at the top of its configuration."""
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
