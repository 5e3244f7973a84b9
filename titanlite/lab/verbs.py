"""The verbs `tune` and `plan` of the command line. Does not import torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from titanlite.commands import Verb, parser
from titanlite.config.amount import SUFFIXES, Amount
from titanlite.config.component import ConfigError
from titanlite.config.shipped import find_config
from titanlite.lab.axes import take_axes
from titanlite.object_store import location
from titanlite.options import Options, add_allow_imports, number_of
from titanlite.tools.verbs import shown_config

# Options of `titanlite tune` for other work than a search.
TUNE_ACTIONS = ("coordinate_check", "depth", "find_batch", "ladder", "measure")


def add_tune(options: Options) -> None:
    add, number = options.add, {"type": int, "metavar": "N"}
    options.usage = """titanlite tune CONFIG --section.key=LOW:HIGH:NUM [...] [options]
       titanlite tune CONFIG --coordinate-check [options] [--section.key=value ...]
       titanlite tune CONFIG (--ladder | --depth=N | --find-batch | --measure) [options]"""
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
    add("--depth", **number, help="print the settings of a gpt of another depth, derived from CONFIG's")
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
    add("--output", type=Path, help="folder of the runs; JSON file of a measurement or check; TOML file")


def add_verify_resume(options: Options) -> None:
    add = options.add
    options.usage = "titanlite verify-resume CONFIG --ranks=1,2,4 [options] [--section.key=value ...]"
    add("config", help="a job's TOML file; its keys may be overridden")
    add(
        "--ranks", type=parse_ranks, required=True, metavar="LIST",
        help="ranks of the run that is not stopped, then of each part of the run that is resumed",
    )  # fmt: skip
    add("--steps", type=int, metavar="N", default=6, help="steps to train (6)")
    add("--device", choices=("auto", "cpu"), default="auto", help="cpu: train on the CPU (auto)")


def verify_resume_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `titanlite verify-resume`, and the overrides. Raises ConfigError."""
    options, overrides = parser("verify-resume").read_known(argv)
    if options.steps < (least := max(len(options.ranks), 2)):
        raise ConfigError(f"command line, --steps: {options.steps} is below {least}, for as many --ranks")
    return options, overrides


def parse_ranks(text: str) -> list[int]:
    """Return `1,2,4` as numbers. Raises ArgumentTypeError."""
    words = [word.strip() for word in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", word) for word in words):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 1,2,4")
    return [int(word) for word in words]


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
    price = number_of("price such as 2.50", may_be_zero=True)
    add("--price", type=price, metavar="PRICE", help="of a GPU hour; adds what the run costs")
    tokens = "tokens to train on, such as 160B, instead of training.steps"
    add("--tokens", type=parse_tokens, metavar="AMOUNT", help=tokens)
    add("--top", type=int, default=0, help="also list this many layouts of the same GPUs that fit (0)")
    runs = "finished runs, or folders with some: fit a scaling law to them, and forecast CONFIG's loss by it"
    add("--fit", type=Path, nargs="+", metavar="RUN", help=runs)
    flops = number_of("number of FLOPs such as 1e21")
    add("--flops", type=flops, help="with --fit: FLOPs to find the compute-optimal run for")
    add(
        "--mtbf",
        type=number_of("number of hours such as 6000 or 0.5"),
        metavar="HOURS",
        help="mean time between failures of one node; adds the goodput, and the best checkpoint.interval",
    )
    add(
        "--measured-run",
        type=location,
        metavar="RUN",
        help="with --mtbf: take the times of starts, saves and restarts of this run folder and, without "
        "--gpus, also its GPUs and step time",
    )
    add(
        "--restart",
        type=number_of("number of seconds such as 45", may_be_zero=True),
        metavar="SECONDS",
        help="with --mtbf: time from a failure to the first step after it",
    )
    add("--json", action="store_true", help="print the plan as JSON")
    add_allow_imports(options)


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


def parse_tokens(text: str) -> str:
    """Return `160B`, which is an amount of tokens. Raises ArgumentTypeError."""
    try:
        Amount.parse(f"{text} tokens")
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 160B") from None
    return text


def tune_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of `titanlite tune` and the overrides, among them the ranges of a search. Raises
    ConfigError."""
    options, overrides = parser("tune").read_known(argv)
    actions = [f"--{name.replace('_', '-')}" for name in TUNE_ACTIONS if getattr(options, name)]
    if len(actions) > 1:
        raise ConfigError(f"command line, {actions[1]}: not together with {actions[0]}")
    if not actions and not take_axes(overrides)[0]:
        raise ConfigError(
            "name what to do: --coordinate-check, --depth, --find-batch, --ladder, --measure, or several "
            "values of a key to search: --optimizer.lr=1e-4:3e-3:5 or, without spaces, "
            "--optimizer.lr=1e-4,3e-4"
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
    for key in ("measured_run", "restart"):
        if getattr(options, key) is not None and options.mtbf is None:
            raise ConfigError(f"command line, --{key.replace('_', '-')}: it needs --mtbf")
    if no_config:
        options.config = None
        keys = ("gpus", "price", "top", "measured", "mtbf", "measured_run", "restart")
        given = [f"--{key.replace('_', '-')}" for key in keys if getattr(options, key)]
        if words := [*overrides, *given]:
            raise ConfigError(
                f"{words[0]} needs a CONFIG, which comes first: titanlite plan CONFIG --fit RUN ..."
            )
        return options, []
    path = shown_config(options.config)
    if path is None and Path(options.config).exists():
        raise ConfigError(f"name a TOML file or a run folder to plan: {options.config} is neither")
    options.config = path or str(find_config(options.config))
    return options, overrides


def _tune_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = tune_arguments(argv)
    searches = not any(getattr(options, name) for name in TUNE_ACTIONS)
    axes, rest = take_axes(overrides) if searches else ([], overrides)
    return options.config, [*rest, *(f"--{axis.key}={axis.values[0]}" for axis in axes)]


def _verify_resume_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    options, overrides = verify_resume_arguments(argv)
    return options.config, overrides


def _plan_config(argv: Sequence[str]) -> tuple[str | None, Sequence[str]] | None:
    options, overrides = plan_arguments(argv)
    return None if options.config is None else (options.config, overrides)


VERBS = {
    "tune": Verb(
        "titanlite.lab.tune",
        "find good settings by runs, and check that they carry over to wider models",
        options=add_tune,
        table="job",
        config_of=_tune_config,
    ),
    "plan": Verb(
        "titanlite.lab.plan",
        "say what a run will need and cost, before it is started",
        options=add_plan,
        table="job",
        config_of=_plan_config,
    ),
    "verify-resume": Verb(
        "titanlite.lab.verify_resume",
        "compare a run with one that is resumed on other numbers of ranks",
        options=add_verify_resume,
        table="job",
        config_of=_verify_resume_config,
    ),
}
