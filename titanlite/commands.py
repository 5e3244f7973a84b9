"""The verbs of the command line: where they are found, their help, and the check of a command before its verb
runs.

Each package of titanlite with a module `verbs` adds the verbs in its VERBS. Does not import torch, so that
help and errors in a command appear in a fraction of a second.
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
from functools import cache
from pathlib import Path

from titanlite import __version__
from titanlite.config import reference, schema, toml
from titanlite.config.component import ConfigError, suggest
from titanlite.config.imports import ALLOW_IMPORTS, import_components, import_own_components, own_modules
from titanlite.config.overrides import Bare, split_overrides
from titanlite.options import Options, take_flag

CORE = "titanlite.tools.verbs"  # the verbs that are listed first
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


@dataclass(frozen=True)
class Verb:
    """A verb of the command, described without importing its `module`, whose `main` runs the verb.

    `about`: one line for the overview. `usage`: the help; if empty, the module's docstring and the options.
    `options`: adds the options to a parser. `check`: checks their values. `table`: the name of the schema of
    the keys that the command line may override, in schema.json. `schema`: module and class of that schema,
    imported only to explain keys of components from outside the package. `config_of`: maps the command line
    to its TOML file (None: no file) and overrides, or to None if it uses no configuration. `own`: options
    that are neither keys nor in `options`. `explains_keys`: whether `--help SECTION` explains keys.
    `reference`: the beginning of the page that `--reference` prints.
    """

    module: str
    about: str
    usage: str = ""
    options: Callable[[Options], None] | None = None
    check: Callable[[argparse.Namespace], None] | None = None
    table: str = ""
    schema: tuple[str, str] = ("titanlite.job", "Job")
    config_of: Callable[[Sequence[str]], tuple[str | None, Sequence[str]] | None] | None = None
    own: tuple[str, ...] = ()
    explains_keys: bool = False
    reference: str = ""

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


@cache
def verbs() -> dict[str, Verb]:
    """Return all verbs by their names, the core's first."""
    modules = sorted(own_modules("verbs"), key=lambda module: (module != CORE, module))
    return {name: verb for module in modules for name, verb in importlib.import_module(module).VERBS.items()}


def parser(name: str) -> Options:
    """Return the parser of a verb's own options."""
    verb = verbs()[name]
    options = Options(prog=f"titanlite {name}", description=verb.doc())
    if verb.options:
        verb.options(options)
    return options


def find(name: str) -> Verb:
    """Return the verb called `name`. Raises ConfigError, which lists all verbs."""
    if name in verbs():
        return verbs()[name]
    close = get_close_matches(name, verbs(), n=1)
    hint = (
        EVALUATES if name.startswith("eval") else f"; did you mean `titanlite {close[0]}`?" if close else ""
    )
    raise ConfigError(f"unknown verb {name!r}{hint} (known: {', '.join(verbs())})")


def overview() -> str:
    """Return the text of `titanlite --help`."""
    lines = "\n".join(f"  {name:10} {verb.about}" for name, verb in verbs().items())
    return (
        f"usage: titanlite VERB ...\n\n{lines}\n\n"
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
    verb = verbs()[name]
    if verb.reference and "--reference" in words:
        return verb.reference + reference.markdown(_keys(verb, [w for w in words if w != "--reference"]))
    if not {"-h", "--help"} & set(words):
        return None
    at = next(i for i, word in enumerate(words) if word in ("-h", "--help"))
    section = next(iter(words[at + 1 :]), "--")
    if (verb.explains_keys or verb.reference) and not section.startswith("--"):
        keys = _keys(verb, words[:at])
        chosen = reference.sections(keys) if section == "all" else reference.section(keys, section)
        return reference.help_text(chosen) + "\n"
    if name == "launch" and any(word.endswith(".toml") for word in words):  # run_train.sh CONFIG.toml --help
        name = "train"
    help = verbs()[name].help(name)
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
    import_own_components()
    module, cls = verb.schema
    return schema.describe(getattr(importlib.import_module(module), cls), docs=True)


def check(name: str, words: Sequence[str]) -> None:
    """Check a command and its configuration without importing the verb. Raises ConfigError, with one line per
    mistake."""
    verb = verbs()[name]
    _check_options(name, words)
    if verb.config_of is None and verb.options:
        options = parser(name).read(words)
        if verb.check:
            verb.check(options)
    config = verb.config_of(words) if verb.config_of else None
    if config is None:
        return
    tree, locator = toml.read(*config)
    try:
        toml.check(schema.table(verb.table), tree, locator)
    except ConfigError as e:
        wrong = {str(error.key) for error in e.errors}
        if verb.table != "job":
            raise
        if given := [key for key in FILE_KEYS if key in wrong & locator.overridden]:
            file = dict(split_overrides(config[1]))[given[0]]
            usage = f"titanlite {name} {'CONFIG.toml' if isinstance(file, Bare) else file}"
            text = f"command line, --{given[0]}: the TOML file comes first, without an option: {usage}"
            raise ConfigError(text) from None
        unknown = {key for key in wrong if not locator.overrides(key)}
        if theirs := sorted(TORCHTITAN & unknown):
            raise ConfigError(
                f"{locator.path} is a torchtitan file (it has {theirs[0]}); translate it first: "
                f"titanlite migrate {locator.path} -o NEW.toml"
            ) from None
        raise


def _check_options(name: str, words: Sequence[str]) -> None:
    """Raise ConfigError for a misspelled option: similar to an option of the verb, and neither an option nor
    a top-level section or key of the configuration."""
    verb = verbs()[name]
    own = [*verb.own, *(parser(name).known if verb.options else ())]
    keys = schema.table(verb.table)["keys"] if own and verb.table else {}
    for word in words if own else ():
        given = word.partition("=")[0]
        option = given.replace("_", "-")
        if not option.startswith("--") or "." in option:
            continue
        if option not in own and given[2:].replace("-", "_") not in keys and get_close_matches(option, own):
            parser(name).error(f"unknown option {given!r}{suggest(option, own)}")
