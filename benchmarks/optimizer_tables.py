"""The tables of docs/optimizers.md, made from the recorded results.

    python benchmarks/optimizer_tables.py     # rewrites the page

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. tests/test_docs.py compares the page with
the results.
"""

from __future__ import annotations

import json
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.transfer_lr import Losses, summary  # noqa: E402
from titanlite.models.llama3 import Llama3  # noqa: E402
from titanlite.optim.orthogonalize import num_flops  # noqa: E402

PAGE = ROOT / "docs/optimizers.md"
RESULTS, PICTURE = ROOT / "benchmarks/results", "assets/optimizer_curves.png"
CURVES, STEPS = "optimizer_curves_h200.json", "optimizer_steps_*.json"
FIXED = "optimizer_fixed_weights_h200x2.json"
TRANSFER = [f"transfer_lr_h200{part}.json" for part in ("", "_seeds", "_seeds_more")]
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
VALIDATION, LOSS = "eval/loss", "train/loss"
SPEED, RESERVED = "throughput/tokens_per_second_per_device", "memory/peak_reserved_gib"


def refreshed(page: str) -> str:
    """The page with the tables of the present results."""
    return TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", page)


def with_tables(
    page: str, tables: Mapping[str, Callable[[dict[str, Any]], str]], result: dict[str, Any] | None
) -> str:
    """The page with these tables of a result; None: of no result. Other tables of the page stay."""

    def refresh(match: re.Match[str]) -> str:
        if match[2] not in tables:
            return match[0]
        text = tables[match[2]](result) if result else "Unmeasured.\n"
        return f"{match[1]}\n{text}\n{match[3]}"

    return TABLE.sub(refresh, page)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def paragraph(*parts: str) -> str:
    """A paragraph of lines of at most 120 characters."""
    return textwrap.fill(" ".join(parts), 120, break_long_words=False, break_on_hyphens=False)


def muon_cost() -> str:
    """The arithmetic of Muon's Newton-Schulz steps for Llama 3."""
    rows = []
    for flavor, seq_len in (("125M", 2048), ("1B", 2048), ("8B", 8192), ("70B", 8192)):
        net = Llama3(flavor=flavor).build_on_meta()
        matrices = [p for name, p in net.named_parameters() if net.parameter_role(name) == "matrix"]
        flops = sum(num_flops(p.size(0), p.size(1), 5) for p in matrices)
        per_token = net.flops_per_token(seq_len)
        shares = (f"{flops / (per_token * tokens):.2%}" for tokens in (2**17, 2**20, 2**22))
        num, num_matrix = sum(p.numel() for p in net.parameters()), sum(p.numel() for p in matrices)
        state = (4 * num_matrix + 8 * (num - num_matrix)) / num
        rows.append([flavor, f"{flops:.1e}", *shares, f"{state:.1f}"])
    head = [
        "Llama 3",
        "FLOPs per step",
        "share at 131k tokens per step",
        "at 1M",
        "at 4M",
        "state, bytes per parameter",
    ]
    return table(head, rows)


def curves() -> str:
    """The text, the runs and what follows from them."""
    if not (RESULTS / CURVES).exists():
        return "Unmeasured.\n"
    result = json.loads((RESULTS / CURVES).read_text())
    runs = [run for run in result["runs"].values() if "final" in run]
    runs.sort(key=lambda run: (run["optimizer"].split()[0], run["optimizer"], run["seed"], run["lr"]))
    rows = [
        [
            run["optimizer"],
            f"{run['lr']:g}",
            str(run["seed"]),
            f"{run['final'][VALIDATION]:.4f}",
            f"{run['final'][LOSS]:.3f}",
            f"{run['tokens_per_second']:,.0f}",
            f"{run['final']['seconds']:.0f}",
        ]
        for run in runs
    ]
    head = [
        "optimizer",
        "peak learning rate",
        "seed",
        "validation loss",
        "training loss",
        "tokens/s",
        "seconds",
    ]
    picture = (
        f"![Validation losses by tokens and by time](../{PICTURE})\n\n" if (ROOT / PICTURE).exists() else ""
    )
    sentences = compared(result["summary"], runs)
    return f"{about_text(result, runs[0])}\n\n{picture}{table(head, rows)}\n{sentences}\n"


def about_text(result: dict[str, Any], run: dict[str, Any]) -> str:
    """One paragraph on the text that the runs trained on, and on the machine."""
    text, tokens, env = result["text"], run["final"]["tokens"], run["env"]
    return paragraph(
        f"Each run took {result['steps']} steps of {tokens / result['steps']:,.0f} tokens,",
        f"{tokens / 1e6:.1f} million tokens or {tokens / text['train_tokens']:.2f} epochs of",
        f"{text['files']:,} files ({text['bytes'] / 1e6:.0f} MB), on one {env['device']} with torch",
        f"{env['torch']}. The seconds count from the end of the first step, with validation and without",
        "compilation.",
        f"All runs took {result['gpu_minutes']:.0f} GPU minutes (`{CURVES}`).",
    )


def compared(summary: dict[str, Any], runs: Sequence[dict[str, Any]]) -> str:
    """Sentences on the best rates, the spread of seeds, the dtypes of AdamW's state, and what Muon saved."""
    adamw, muon = summary["adamw"], summary["muon"]
    sentences = [
        f"At its best rate, {muon['best_lr']:g}, Muon's validation loss is "
        f"{_difference(muon['losses'][0], adamw['losses'][0])} AdamW's at {adamw['best_lr']:g}."
    ]
    for name, numbers in (("AdamW", adamw), ("Muon", muon)):
        if len(numbers["losses"]) > 1:
            difference = abs(numbers["losses"][1] - numbers["losses"][0])
            sentences.append(f"Two seeds of {name} differ by {difference:.4f}.")
        if not numbers["best_is_inside"]:
            sentences.append(f"The best rate of {name} is at the edge of those tried.")
    variants = {r["optimizer"]: r["final"][VALIDATION] for r in runs if r["optimizer"].startswith("adamw ")}
    for name, loss in variants.items():
        sentences.append(
            f"With {name.removeprefix('adamw ')} state, AdamW's loss is "
            f"{_difference(loss, adamw['losses'][0])} the loss with float32 state."
        )
    if where := summary.get("muon_reaches_adamw"):
        sentences.append(
            f"Muon has AdamW's final loss after {where['tokens']:.0%} of the tokens and "
            f"{where['seconds']:.0%} of the time, when its learning rate has not decayed to the end yet."
        )
    return paragraph(*sentences)


def _difference(loss: float, reference: float) -> str:
    return f"{abs(loss - reference):.4f} {'below' if loss < reference else 'above'}"


def fixed_weights() -> str:
    """The phases of a step of AdamW and Muon on the same weights."""
    if not (RESULTS / FIXED).exists():
        return "Unmeasured.\n"
    result = json.loads((RESULTS / FIXED).read_text())
    rows = []
    for name, numbers in result["summaries"].items():
        last = result["runs"][name][-1]["reports"][-1]
        phases = [f"{1000 * last[f'time/{phase}_s']:.0f} ms" for phase in ("forward", "backward")]
        optimizer = f"{1000 * last['time/optimizer_s']:.1f} ms"
        rows.append([name, f"{numbers['time/step_s']:.3f} s", *phases, optimizer])
    head = ["optimizer", "step", "forward", "backward", "gradient norm, clipping, optimizer"]
    return f"{table(head, rows)}\n`{FIXED}`\n"


def steps() -> str:
    """One table for each recorded result."""
    parts = []
    for path in sorted(RESULTS.glob(STEPS)):
        result = json.loads(path.read_text())
        env = next(run["env"] for runs in result["runs"].values() for run in runs if "env" in run)
        num = f"{result['ngpu']} x {env['device']}" if result["ngpu"] > 1 else f"one {env['device']}"
        head = [
            "optimizer",
            "tokens/s per GPU",
            "step",
            "gradient norm, clipping, optimizer",
            "memory",
            "state per parameter",
        ]
        rows = [step_row(name, result) for name in result["summaries"]]
        parts.append(
            f"`{result['config']}`, {result['tokens_per_step']:,} tokens per step on {num}, torch "
            f"{env['torch']} (`{path.name}`):\n\n{table(head, rows)}"
        )
    return "\n".join(parts) or "Unmeasured.\n"


def step_row(name: str, result: dict[str, Any]) -> list[str]:
    """The numbers of one optimizer, with their ratios to AdamW's."""
    numbers, ratios = result["summaries"][name], result["ratios_to_adamw"].get(name, {})
    if "error" in numbers or not numbers:
        return [name, *["failed"] * 5]
    state, memory = numbers["state_bytes_per_parameter"], numbers.get(RESERVED)
    return [
        name,
        f"{numbers[SPEED]:,.0f} ({ratios[SPEED]:.3f})" if SPEED in ratios else f"{numbers[SPEED]:,.0f}",
        f"{numbers['time/step_s']:.3f} s",
        f"{numbers['time/optimizer_s'] * 1000:.1f} ms",
        "" if memory is None else f"{memory:.1f} GiB",
        "" if state is None else f"{state:.2f} bytes",
    ]


def transfer() -> str:
    """The losses and the optima of transfer_lr.py, by search and seed: of the searches, and of the runs with
    further seeds."""
    searches = [json.loads(path.read_text()) for name in TRANSFER if (path := RESULTS / name).exists()]
    if not searches:
        return "Unmeasured.\n"
    losses: dict[str, Losses] = {}
    for result in searches[1:]:
        for name, by_seed in result["summary"]["losses"].items():
            mine = losses.setdefault(name, {})
            for seed, by_rate in by_seed.items():
                mine.setdefault(int(seed), {}).update({float(rate): by_rate[rate] for rate in by_rate})
    env = searches[0]["env"]
    words = f"One {env['device']}, torch {env['torch']} ({', '.join(f'`{name}`' for name in TRANSFER)})."
    tables = [_search(searches[0]["summary"])]
    if losses:
        tables.append(_search(json.loads(json.dumps(summary(losses)))))  # with keys as in the files
    return "\n".join([*tables, f"{paragraph(words)}\n"])


def _search(searches: Mapping[str, Any]) -> str:
    """The table of a summary of transfer_lr.py, and a sentence with the ratios of the best rates."""
    columns = [(name, seed) for name, seeds in searches["losses"].items() for seed in seeds]
    losses = [searches["losses"][name][seed] for name, seed in columns]
    rates = sorted({rate for of_column in losses for rate in of_column}, key=float)
    rows = [[rate, *(_loss(of_column, rate) for of_column in losses)] for rate in rates]
    rows.append(["best rate", *(_optimum(searches["optima"][name].get(seed)) for name, seed in columns)])
    head = ["peak learning rate", *(f"`{name}`, seed {seed}" for name, seed in columns)]
    ratios = [
        f"The best rate of `{name}` is {' and '.join(f'{ratio:.2f}' for ratio in by_seed.values())} times"
        " the rate of `narrow` with the same seed."
        for name, by_seed in searches["ratios"].items()
        if by_seed
    ]
    return f"{table(head, rows)}\n{paragraph(*ratios)}\n"


def _loss(losses: Mapping[str, float | None], rate: str) -> str:
    loss = losses.get(rate, math.inf)
    return "diverged" if loss is None else "" if math.isinf(loss) else f"{loss:.4f}"


def _optimum(fit: dict[str, float] | None) -> str:
    if fit is None:
        return "at an end"
    between = "" if fit["low"] is None else f" ({fit['low']:.2e} to {fit['high']:.2e})"
    return f"{fit['value']:.2e}{between}"


TABLES: dict[str, Callable[[], str]] = {
    "muon_cost": muon_cost,
    "curves": curves,
    "steps": steps,
    "fixed": fixed_weights,
    "transfer": transfer,
}

if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
