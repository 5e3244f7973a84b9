"""`titanlite plan [CONFIG] --fit RUN ...`: the scaling law of finished runs, and what it forecasts.

A run's N is the number of its parameters in matrix products, with the head and without the rows that an
separate embedding looks up, as in the FLOPs 6 N D; D is the tokens that it trained on. Its loss is
`eval/loss` after the last step. docs/planning.md says which runs are refused, and why."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titanlite.checkpoint.run_identity import differences, spell
from titanlite.config import json_file
from titanlite.config.amount import Amount
from titanlite.config.component import ConfigError
from titanlite.data.dataset import RunSequences
from titanlite.job import Job, load_job
from titanlite.lab import scaling_law
from titanlite.lab.scaling_law import FittedLaw
from titanlite.report.charts import short
from titanlite.report.recorded_run import METRICS, SEQUENCES, TOKENS, RecordedRun, names_of, read_run
from titanlite.table import table

LOSS, RATE = "eval/loss", "train/learning_rate"
MIN_RUNS = 8  # five constants are fitted
MIN_SPREAD = 4.0  # of parameters, of tokens and of tokens per parameter: the largest divided by the smallest
SAME_BATCH = 1.01  # the most tokens per step divided by the fewest, in runs of one batch size
DECAYED = 0.15  # of the peak: a learning rate at the end of a run that has decayed; cosines end at 0.1
SAME_END = 0.05  # of the peak: by how much the ends of two runs' learning rates may differ
MAX_EPOCHS = 4.0  # from there on repeated text is worth less (Muennighoff et al. 2023, arXiv 2305.16264)
REPEATED = f"from {MAX_EPOCHS:g} epochs on it is worth less than new text, and the law has no term for that"
DATA_KEYS = ("sources", "tokenizer", "packing", "mask_documents", "holdout_sequences", "streamed")
MAX_EXTRAPOLATION = 1000.0  # of the largest run's FLOPs: the form of the law is a guess, too
MAX_WIDTH = 0.2  # nats: of the interval of a forecast
MAX_RATIO = 4.0  # of the bounds of the compute-optimal number of parameters


class FinishedRun(NamedTuple):
    """A run that a law may be fitted to. `tokens_per_step`: the mean, if the batch grew. `conditions`: what
    all runs of a law must have in common. `end`: the learning rate in the last step, as a factor of its
    peak."""

    name: str
    parameters: int
    tokens: float
    tokens_per_step: float
    loss: float
    end: float
    conditions: dict[str, Any]


class Target(NamedTuple):
    """The job that a law forecasts. `job`: resolved. `tokens`, `epochs`: of the whole run; None: not known.
    `sequences`: its data; None if it is not known here, because of `why_not`."""

    job: Job
    parameters: int
    tokens: int
    epochs: float | None
    sequences: RunSequences | None
    why_not: str

    @property
    def flops(self) -> float:
        return 6.0 * self.parameters * self.tokens


def main(options: Namespace) -> int:
    """Print the law, and the compute-optimal run for --flops or --tokens."""
    result = law(options)
    print(json.dumps(result, indent=1) if options.json else text(result))
    return 0


def law(options: Namespace, target: Target | None = None) -> dict[str, Any]:
    """The law of the runs of --fit; the forecast of `target`; and the compute-optimal run: for --flops, else
    for the FLOPs of `target`, else for --tokens. Raises ConfigError for what the runs do not tell; but a
    forecast is not refused because the optimum for its FLOPs is not known."""
    runs = finished_runs(options)
    if target is not None:
        _check_target(target, runs[0])
    parameters, tokens, losses = (
        np.array([getattr(run, key) for run in runs], np.float64) for key in ("parameters", "tokens", "loss")
    )
    fitted = scaling_law.fit(parameters, tokens, losses)
    flops = 6 * parameters * tokens
    largest = {"parameters": parameters.max(), "tokens": tokens.max(), "flops": flops.max()}
    rows = zip(runs, fitted.law.loss(parameters, tokens).tolist())
    result = {
        "runs": [_row(run, expected) for run, expected in rows],
        "constants": {name: constant._asdict() for name, constant in fitted.constants().items()},
        "noise": fitted.noise,
        "exponent": fitted.exponent()._asdict(),
        "forecast": None if target is None else _forecast(fitted, target, largest),
        "optimum": None,
        "optimum_unknown": "",
    }
    asked = options.flops
    if asked is None and target is None and options.tokens:
        amount = Amount.parse(f"{options.tokens} tokens")
        asked = float(fitted.law.flops_for(float(amount.value))[0])
    if asked is not None:
        result["optimum"] = _optimum(fitted, asked, largest["flops"])
    elif target is not None:
        try:
            result["optimum"] = _optimum(fitted, target.flops, largest["flops"])
        except ConfigError as e:
            result["optimum_unknown"] = str(e)
    return result


def _row(run: FinishedRun, expected: float) -> dict[str, Any]:
    about = {key: getattr(run, key) for key in ("name", "parameters", "tokens", "tokens_per_step", "loss")}
    return about | {"fitted": expected, "residual": run.loss / expected - 1}


def _check_near(flops: float, largest: float) -> None:
    """Raise ConfigError for FLOPs far beyond the largest run's."""
    if flops > MAX_EXTRAPOLATION * largest:
        raise ConfigError(
            f"{flops:.3g} FLOPs are {flops / largest:.3g} times those of the largest run; a law is "
            f"extrapolated to at most {MAX_EXTRAPOLATION:g} times: train larger runs"
        )


def _optimum(fitted: FittedLaw, flops: float, largest: float) -> dict[str, Any]:
    _check_near(flops, largest)
    parameters, tokens, loss = fitted.optimum(flops)
    if parameters.high > MAX_RATIO * parameters.low:
        raise ConfigError(
            f"the compute-optimal number of parameters for {flops:.3g} FLOPs is not known: 95% of the "
            f"bootstrap are between {short(parameters.low)} and {short(parameters.high)}, more than a factor "
            f"of {MAX_RATIO:g} apart; train more runs, or ones closer to {flops:.3g} FLOPs than {largest:.3g}"
        )
    values = {"parameters": parameters, "tokens": tokens, "loss": loss}
    return {"flops": flops, "extrapolation": float(flops / largest)} | {
        key: value._asdict() for key, value in values.items()
    }


def _forecast(fitted: FittedLaw, target: Target, largest: dict[str, float]) -> dict[str, Any]:
    loss = fitted.forecast(target.parameters, target.tokens)
    sizes = {"parameters": target.parameters, "tokens": target.tokens, "flops": target.flops}
    _check_near(target.flops, largest["flops"])
    factors = {key: float(size / largest[key]) for key, size in sizes.items()}
    if loss.high - loss.low > MAX_WIDTH:
        raise ConfigError(
            f"the loss of this job is not known: 95% of the bootstrap are between {loss.low:.3f} and "
            f"{loss.high:.3f}, more than {MAX_WIDTH} nats apart, at {factors['flops']:.3g} times the FLOPs "
            "of the largest run; train more runs, or larger ones"
        )
    unknown = target.why_not if target.sequences is None else ""
    return sizes | {
        "tokens_per_step": target.tokens / target.job.training.steps,
        "loss": loss._asdict(),
        "extrapolation": factors,
        "data_unknown": unknown,
    }


def _check_target(target: Target, first: FinishedRun) -> None:
    """Raise ConfigError if a law of runs like `first` does not hold for the job."""
    job = target.job
    check_from_scratch(job, "the law is of runs from scratch")
    if target.epochs is not None and target.epochs > MAX_EPOCHS:
        raise ConfigError(f"the job reads its data {target.epochs:.1f} times: {REPEATED}", "training.steps")
    end = job.lr_scheduler.checked_factor(job.training.steps, job.training.steps)
    if abs(end - first.end) > SAME_END:
        raise ConfigError(
            f"the learning rate ends at {end:.0%} of the peak, that of the runs at {first.end:.0%}: the law "
            "does not hold for it",
            "lr_scheduler",
        )
    ours = conditions(job, None if target.sequences is None else target.sequences.identity)
    theirs = {key: value for key, value in first.conditions.items() if key in ours}
    if change := _change(theirs, ours, first.name):
        raise ConfigError(f"the law does not hold for this job: {change}")


def check_from_scratch(job: Job, reason: str) -> None:
    """Raise ConfigError with `reason` for a job that trains adapters, starts from weights or has stages."""
    given = {
        "lora.enable": job.lora.enable,
        "checkpoint.initial_load_path": job.checkpoint.initial_load_path,
        "stages": job.stages,
    }
    for key, value in given.items():
        if value:
            raise ConfigError(f"{reason} with one mixture" if key == "stages" else reason, key)


# ---- the runs


def finished_runs(options: Namespace) -> list[FinishedRun]:
    """The runs of --fit. Raises ConfigError, with a line for each run that cannot be used."""
    folders = [folder for path in options.fit for folder in _folders(path)]
    folders = list({folder.resolve(): folder for folder in folders}.values())
    runs, errors = list[FinishedRun](), list[ConfigError]()
    for folder, name in zip(folders, names_of(folders)):
        try:
            runs.append(_finished(read_run(folder, name), options.allow_imports))
            if refusal := _unlike(runs[0], runs[-1]):
                raise ConfigError(refusal)
        except ConfigError as e:
            errors.append(ConfigError(f"{name}: {e}"))
    if not errors:
        errors = [ConfigError(refusal) for refusal in _too_few(runs)]
    if errors:
        raise ConfigError("\n".join(map(str, errors)), errors=errors)
    return runs


def _folders(path: Path) -> list[Path]:
    """The run folder `path`, or the run folders in it."""
    below = sorted(path.iterdir()) if path.is_dir() else []
    runs = [folder for folder in (path, *below) if _is_run(folder)]
    if not runs and (path / "search.json").exists():
        raise ConfigError(
            f"--fit: {path} is a search, whose runs differ in more than size and length: name a ladder"
        )
    if not runs:
        raise ConfigError(f"--fit: {path} is neither a run folder nor a folder with run folders")
    return [path] if path in runs else runs


def _is_run(folder: Path) -> bool:
    return (folder / "job.toml").is_file() or (folder / METRICS).is_file()


def _finished(run: RecordedRun, allow_imports: bool) -> FinishedRun:
    """A run's size and final loss. Raises ConfigError, without the run's name, if it cannot be used."""
    job = load_job(Path(run.folder, "job.toml"), world_size=None, allow_imports=allow_imports)
    last, steps = run.records[-1]["step"] if run.records else 0, job.training.steps
    if last < steps:
        raise ConfigError(f"it has not ended: it is at step {last} of {steps}")
    if last > steps:
        raise ConfigError(f"it took {last} steps, but its job.toml has training.steps = {steps}: correct it")
    losses, rates, tokens = (run.series(key).finite() for key in (LOSS, RATE, TOKENS))
    if not len(losses) or losses.steps[-1] != last:
        raise ConfigError(f"it has no {LOSS} after its last step: it ran without validation.enable")
    if not len(rates) or rates.steps[-1] != last or not len(tokens):
        raise ConfigError(f"its last record has no {RATE}, or none has {TOKENS}")
    end = float(rates.values[-1] / max(job.optimizer.lr, rates.values.max()))
    if end > DECAYED:
        raise ConfigError(
            f"its learning rate ends at {end:.0%} of the peak: the law is of losses after a decay, which are "
            "lower; branch a decay (docs/howto.md), or train with another [lr_scheduler]"
        )
    try:
        check_from_scratch(job, "the law is of runs from scratch")
    except ConfigError as e:
        raise ConfigError(f"it has {e.key}; {e}") from None
    data = _data(Path(run.folder, "run_identity.json"))
    _check_epochs(run, data)
    return FinishedRun(
        name=run.name,
        parameters=job.build_on_meta().num_matmul_parameters(),
        tokens=float(tokens.values[-1]),
        tokens_per_step=float(tokens.values[-1]) / last,
        loss=float(losses.values[-1]),
        end=end,
        conditions=conditions(job, data) | {"eval/tokens": int(run.last("eval/tokens") or 0)},
    )


def _data(path: Path) -> dict[str, Any]:
    """The section on data of a run identity. Raises ConfigError."""
    identity = json_file.read_object(path)
    try:
        json_file.expect(identity, data=dict)
    except ValueError as e:
        raise ConfigError(f"{path} cannot be read: {e}") from None
    return dict(identity["data"])


def _check_epochs(run: RecordedRun, data: dict[str, Any]) -> None:
    """Raise ConfigError if the run repeated a source too often, or if that is not known."""
    sequences = run.last(SEQUENCES)
    if data.get("streamed"):  # read once
        return
    if sequences is None or not run.sources:
        raise ConfigError(f"its epochs are not known: it has no sources.json, or no record has {SEQUENCES}")
    epochs, label = max((source.epochs(sequences), source.label) for source in run.sources)
    if epochs > MAX_EPOCHS:
        raise ConfigError(f"it read {label} {epochs:.1f} times: {REPEATED}")


def conditions(job: Job, data: dict[str, Any] | None) -> dict[str, Any]:
    """Settings that the runs of a law share: the data and how it is read, and the kinds of model and
    optimizer. `data`: the identity of the sequences; None: not known."""
    known = {} if data is None else {"data": {key: data.get(key) for key in DATA_KEYS}}
    return known | {
        "data.validation_sources": [source.label for source in job.data.validation_sources],
        "training.seq_len": job.training.seq_len,
        "loss": job.loss.objective,
        "model.name": job.model.name,
        "optimizer.name": job.optimizer.name,
    }


def _unlike(first: FinishedRun, run: FinishedRun) -> str:
    """Why a run cannot be compared with the first one, or empty."""
    if change := _change(first.conditions, run.conditions, first.name):
        return f"{change}; the runs of a law have this in common"
    if abs(run.end - first.end) > SAME_END:
        return (
            f"its learning rate ends at {run.end:.0%} of the peak, that of {first.name} at {first.end:.0%}: "
            "their losses cannot be compared"
        )
    return ""


def _change(theirs: dict[str, Any], ours: dict[str, Any], name: str) -> str:
    """The first difference from the conditions of the run `name`, or empty."""
    for key, a, b in differences(theirs, ours):
        if key.startswith("data.sources."):  # a fingerprint of the content, and its share
            return f"the content or the weights of data.sources are not those of {name}"
        return f"{key} is {spell(b)}, but {spell(a)} in {name}"
    return ""


def _too_few(runs: Sequence[FinishedRun]) -> list[str]:
    """Reasons why the runs do not determine the five constants of a law."""
    if len(runs) < MIN_RUNS:
        return [f"--fit: {len(runs)} runs; a law of five constants needs at least {MIN_RUNS}"]
    sizes: dict[str, list[float]] = {
        "parameters": [run.parameters for run in runs],
        "tokens": [run.tokens for run in runs],
        "tokens per parameter": [run.tokens / run.parameters for run in runs],
    }
    return [
        f"--fit: the {name} of the runs are between {short(min(values))} and {short(max(values))}; a law "
        f"needs runs with at least {MIN_SPREAD:g} times as many as others"
        for name, values in sizes.items()
        if max(values) < MIN_SPREAD * min(values)
    ]


# ---- the law as text


def text(result: dict[str, Any]) -> str:
    """The law, its runs, and what it says on other runs, as text."""
    runs = result["runs"]
    lines = [
        f"law of {len(runs)} runs: loss = E + A / N^alpha + B / D^beta; brackets: 95% of a bootstrap",
        table([[name, *_bounds(constant)] for name, constant in result["constants"].items()], num_texts=1),
        f"noise of a run: {result['noise']:.2%} of its loss",
        f"compute-optimal N is proportional to FLOPs^{' '.join(_bounds(result['exponent']))}",
        "",
    ]
    rows = [["run", "N", "D", "D / N", LOSS, "law", "difference"]]
    for run in sorted(runs, key=lambda run: (run["parameters"], run["tokens"])):
        n, d = run["parameters"], run["tokens"]
        losses = f"{run['loss']:.4f}", f"{run['fitted']:.4f}", f"{run['residual']:+.2%}"
        rows.append([run["name"], short(n), short(d), f"{d / n:.3g}", *losses])
    lines += [
        table(rows, num_texts=1),
        "N: parameters in matrix products, with the head; D: tokens trained on",
    ]
    sizes = [run["tokens_per_step"] for run in [*runs, *filter(None, [result["forecast"]])]]
    if max(sizes) > SAME_BATCH * min(sizes):
        lines.append(
            f"note: a step has {short(min(sizes))} to {short(max(sizes))} tokens in these runs"
            f"{' and this job' * bool(result['forecast'])}; the law has no term for that"
        )
    if result["forecast"] or result["optimum"]:
        lines.append("")
    if job := result["forecast"]:
        factors = {key: f"{factor:.3g}" for key, factor in job["extrapolation"].items()}
        lines.append(
            f"forecast for this job, N {short(job['parameters'])}, D {short(job['tokens'])}: loss "
            f"{_between(job['loss'])}, with the noise of a run, at {factors['parameters']} times the N, "
            f"{factors['tokens']} times the D and {factors['flops']} times the FLOPs of the largest run"
        )
        if job["data_unknown"]:
            lines.append(f"note: the forecast is for the data of the runs; {job['data_unknown']}")
    if best := result["optimum"]:
        n, d, loss = (best[key] for key in ("parameters", "tokens", "loss"))
        lines.append(
            f"compute-optimal for {best['flops']:.3g} FLOPs (6 N D), {best['extrapolation']:.3g} times those "
            f"of the largest run: N {_between(n, short)}, D {_between(d, short)}, loss {_between(loss)}, "
            "without the noise of a run",
        )
    elif result["optimum_unknown"]:
        lines.append(result["optimum_unknown"])
    return "\n".join(lines)


def _bounds(interval: dict[str, float]) -> tuple[str, str]:
    """A value, and its bounds in brackets."""
    value, low, high = (f"{interval[key]:.4g}" for key in ("value", "low", "high"))
    return value, f"[{low}, {high}]"


def _between(interval: dict[str, float], spelled: Callable[[float], str] = "{:.3f}".format) -> str:
    """A value and its bounds in one text."""
    value, low, high = (spelled(interval[key]) for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"
