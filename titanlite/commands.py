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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from titanlite import __version__
from titanlite.config import reference, schema, toml
from titanlite.config.axes import take_axes
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS, import_components
from titanlite.config.overrides import Bare, split_arguments, split_overrides, split_words
from titanlite.config.paths import check_folder
from titanlite.config.shipped import find_config, shipped_configs
from titanlite.options import (
    Options,
    add_compare,
    add_export,
    add_generate,
    add_import,
    add_launch,
    add_migrate,
    add_plan,
    add_report,
    add_tune,
)

TRAIN = """usage: titanlite train CONFIG.toml [--section.key=value ...]

Train from a TOML file, in this process; ./run_train.sh and `titanlite launch` start several processes.
`titanlite train [CONFIG.toml] --help SECTION` lists the keys of one section, `--help SECTION.KEY` explains a
key, and `--help all` lists every key. With CONFIG.toml, they include the components that the file imports.
"""
EVALUATES = (
    "; `titanlite compare RUN` prints the validation losses of a run, and docs/howto.md#evaluate shows how "
    "to evaluate an export"
)
FILE_KEYS = ("config", "config_file", "job.config_file")  # options for the file in torchtitan and elsewhere
# Keys that titanlite does not have. Every TOML file of torchtitan has at least one of them.
TORCHTITAN = {
    "training.dataset", "training.dataset_path", "training.compile", "model.tokenizer_path",
    "model.hf_assets_path", "model.converters",
    "checkpoint.enable_checkpoint", "experimental", "quantize", "fault_tolerance",
}  # fmt: skip

NO_FILES = "--no-files"
# Options of `titanlite tune` for what it can do beside a search.
TUNE_ACTIONS = ("coordinate_check", "find_batch", "ladder", "measure")
CONFIG_NUMBERS = ("ranks", "gpus_per_node")  # options of `titanlite config` that take integers

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
        usage, *about = (self.usage or f"usage: {self.doc()}").split("\n\n", 1)
        return "\n\n".join([usage.replace("\n", "\n" + " " * len("usage: ")), *about])

    def doc(self) -> str:
        """Return the docstring of the module, read from its source."""
        spec = importlib.util.find_spec(self.module)
        path = spec.origin if spec else None
        tree = ast.parse(Path(path).read_text(encoding="utf-8") if path else "")
        return (ast.get_docstring(tree) or "") + "\n"


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


def take_numbers(
    overrides: Sequence[str], names: Sequence[str], least: int = 0
) -> tuple[dict[str, int], list[str]]:
    """Return the options of these names, which take integers from `least`, and the overrides without them.
    Raises ConfigError."""
    own, others = dict[str, int](), list[str]()
    for key, value in split_overrides(overrides):
        if key not in names:
            others.append(f"--{key}" if isinstance(value, Bare) else f"--{key}={value}")
        elif not value.isdecimal() or int(value) < least:
            option = key.replace("_", "-")
            raise ConfigError(f"command line, --{option}: {value!r} is not an integer from {least}")
        else:
            own[key] = int(value)
    return own, others


# ---- arguments that are checked together


def launch_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, str, list[str]]:
    """Return the launcher's options, the TOML file, and its overrides. Raises ConfigError."""
    options, rest = parser("launch").read_known(argv)
    for key, least in (("nproc_per_node", 1), ("node_rank", 0), ("max_restarts", 0)):
        setattr(options, key, _number(key, getattr(options, key), least))
    nodes = [_number("nnodes", text, 1) for text in options.nnodes.split(":", 1)]
    options.min_nodes, options.max_nodes = nodes[0], nodes[-1]
    if options.min_nodes > options.max_nodes:
        raise ConfigError(f"NNODES={options.nnodes}: expected MIN:MAX with MIN <= MAX")
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


def tune_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `titanlite tune` and the overrides, among them the ranges of a search. Raises
    ConfigError."""
    options, overrides = parser("tune").read_known(argv)
    actions = [f"--{name.replace('_', '-')}" for name in TUNE_ACTIONS if getattr(options, name)]
    if len(actions) > 1:
        raise ConfigError(f"command line, {actions[1]}: not together with {actions[0]}")
    if not actions and not take_axes(overrides)[0]:
        raise ConfigError(
            "name what to do: --coordinate-check, --find-batch, --ladder, --measure, or several values of "
            "a key to search: --optimizer.lr=1e-4:3e-3:5 or, without spaces, --optimizer.lr=1e-4,3e-4"
        )
    options.seeds = options.seeds if options.seeds is not None else 3 if options.coordinate_check else 2
    for key in ("base_width", "steps", "seeds", "gpus_per_trial", "rungs"):
        if (value := getattr(options, key)) is not None and value < 1:
            raise ConfigError(f"command line, --{key.replace('_', '-')}: {value} is below 1")
    if options.seeds > 2 and not actions:
        raise ConfigError(f"command line, --seeds: {options.seeds} is not 1 or 2, the seeds of a search")
    if actions and take_axes(overrides)[0]:
        key = take_axes(overrides)[0][0].key
        raise ConfigError(f"command line, --{key}: several values are for a search, not for {actions[0]}")
    for key in ("sizes", "write_only"):
        if getattr(options, key) and not options.ladder:
            raise ConfigError(f"command line, --{key.replace('_', '-')}: it needs --ladder")
    if options.target_width < 0:
        raise ConfigError(f"command line, --target-width: {options.target_width} is below 0")
    if options.standard and options.target_width:
        raise ConfigError(
            "command line, --target-width: --standard prints no settings; leave out one of the two"
        )
    return options, overrides


def plan_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `titanlite plan`, whose config is a TOML file or, with --fit, None, and the
    overrides. Raises ConfigError."""
    no_config = argv[0].startswith("--") and any(word.partition("=")[0] == "--fit" for word in argv)
    options, overrides = parser("plan").read_known(["", *argv] if no_config else argv)
    for key, least in (("gpus_per_node", 1), ("top", 0)):
        if (value := getattr(options, key)) is not None and value < least:
            raise ConfigError(f"command line, --{key.replace('_', '-')}: {value} is below {least}")
    if options.flops is not None and not options.fit:
        raise ConfigError("command line, --flops: it needs the runs of a law; see --fit")
    if no_config:
        options.config = None
        given = [key for key in ("gpus", "price", "mtbf", "top", "svg", "measured") if getattr(options, key)]
        if words := [*overrides, *(f"--{key}" for key in given)]:
            raise ConfigError(
                f"{words[0]} needs a CONFIG, which comes first: titanlite plan CONFIG --fit RUN ..."
            )
        return options, []
    path = shown_config(options.config)
    if path is None and Path(options.config).exists():
        raise ConfigError(f"name a TOML file or a run folder to plan: {options.config} is neither")
    options.config = path or str(find_config(options.config))
    return options, overrides


# ---- the configuration of a command line: TOML file and overrides


def _launch_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    return launch_arguments(argv)[1:]


def _import_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = parser("import").read_known(argv)
    return options.config, overrides


def _tune_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = tune_arguments(argv)
    searches = not any(getattr(options, name) for name in TUNE_ACTIONS)
    axes, rest = take_axes(overrides) if searches else ([], overrides)
    return options.config, [*rest, *(f"--{axis.key}={axis.values[0]}" for axis in axes)]


def _plan_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    options, overrides = plan_arguments(argv)
    return None if options.config is None else (options.config, overrides)


def _config_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    path, overrides = split_arguments(take_flag(take_flag(argv, ALLOW_IMPORTS)[1], NO_FILES)[1])
    return path, take_numbers(overrides, CONFIG_NUMBERS, least=1)[1]


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


def _data_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    own = {"show": ["sequence", "num_sequences"], "plan": ["ranks"]}.get(argv[0])
    rest = take_flag(take_flag(argv[1:], ALLOW_IMPORTS)[1], "--json")[1]
    path, overrides = split_arguments(rest)
    config = shown_config(path) if own is not None and path is not None else None
    if own is None or config is None:
        return None
    return config, take_numbers(overrides, own)[1]


def _tokenizer_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    named = argv[0] == "show" and words and words[0].endswith(".toml")
    return (words[0], overrides) if named else None


def _metrics_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    words, overrides = split_words(take_flag(argv[1:], ALLOW_IMPORTS)[1])
    return (str(Path(words[0]) / "job.toml"), overrides) if argv[0] == "push" and words else None


def _prepare_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    words, overrides = split_words(take_flag(argv, ALLOW_IMPORTS)[1])
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
        options=add_launch,
        table="job",
        config_of=_launch_config,
    ),
    "generate": Verb("titanlite.tools.generate", "sample text from a checkpoint", options=add_generate),
    "export": Verb(
        "titanlite.tools.export", "write a checkpoint as a Hugging Face model", options=add_export
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
        "list, verify, show and average checkpoints",
        own=("--tensors", "--last", "--steps", "--weights", "--output", "--allow-decayed", ALLOW_IMPORTS),
    ),
    "compare": Verb("titanlite.tools.compare", "compare runs on the terminal", options=add_compare),
    "report": Verb("titanlite.tools.report", "write an HTML report on runs", options=add_report),
    "tune": Verb(
        "titanlite.tools.tune",
        "find good settings by runs, and check that they carry over to wider models",
        options=add_tune,
        table="job",
        config_of=_tune_config,
    ),
    "plan": Verb(
        "titanlite.tools.plan",
        "say what a run will need and cost, before it is started",
        options=add_plan,
        table="job",
        config_of=_plan_config,
    ),
    "prepare": Verb(
        "titanlite.tools.prepare",
        "make a dataset of token shards from text",
        table="prepare",
        config_of=_prepare_config,
    ),
    "data": Verb(
        "titanlite.tools.data",
        "verify and show datasets, and plan what a run reads of them",
        table="job",
        config_of=_data_config,
        own=(
            "--sequence",
            "--num-sequences",
            "--seq-len",
            "--packing",
            "--cache-dir",
            "--ranks",
            "--json",
            ALLOW_IMPORTS,
        ),
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
    "migrate": Verb("titanlite.tools.migrate", "translate a TOML file of torchtitan", options=add_migrate),
    "config": Verb(
        "titanlite.tools.config",
        "check a configuration and print it resolved, or print the reference of all keys",
        table="job",
        config_of=_config_config,
        own=("--ranks", NO_FILES, "--gpus-per-node", "--reference", ALLOW_IMPORTS),
    ),
}


def find(name: str) -> Verb:
    """Return the verb called `name`. Raises ConfigError, which lists all verbs."""
    if name in VERBS:
        return VERBS[name]
    close = get_close_matches(name, VERBS, n=1)
    hint = (
        EVALUATES if name.startswith("eval") else f"; did you mean `titanlite {close[0]}`?" if close else ""
    )
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
        keys = _keys(verb, words[:at])
        chosen = reference.sections(keys) if section == "all" else reference.section(keys, section)
        return reference.help_text(chosen) + "\n"
    if name == "launch" and any(word.endswith(".toml") for word in words):  # run_train.sh CONFIG.toml --help
        name = "train"
    help = VERBS[name].help(name)
    if name not in ("train", "prepare"):
        return help
    keys = _keys(verb, words[:at])
    common = (
        reference.COMMON if name == "train" else [key.name for key in next(reference.sections(keys)).keys]
    )
    return f"{help}{reference.FORMS}\n{reference.overview(keys, common)}\n"


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
        options = parser(name).read(words)
        if name in ("generate", "export"):
            check_folder(options.path)
    config = verb.config_of(words) if verb.config_of else None
    if config is None:
        return
    tree, locator = toml.read(*config)
    try:
        toml.check(schema.table(verb.table), tree, locator)
    except ConfigError as e:
        wrong = {str(error.key) for error in e.errors}
        if verb.table == "job" and (given := [key for key in FILE_KEYS if key in wrong & locator.overridden]):
            file = dict(split_overrides(config[1]))[given[0]]
            usage = f"titanlite {name} {'CONFIG.toml' if isinstance(file, Bare) else file}"
            text = f"command line, --{given[0]}: the TOML file comes first, without an option: {usage}"
            raise ConfigError(text) from None
        unknown = {key for key in wrong if not locator.overrides(key)}
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
        if option not in own and given[2:].replace("-", "_") not in keys and get_close_matches(option, own):
            parser(name).error(f"unknown option {given!r}{suggest(option, own)}")
