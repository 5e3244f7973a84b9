"""The console sink: one line per logged step, and one per validation."""

from __future__ import annotations

import math
import re
from datetime import timedelta

from titanlite.log import logger
from titanlite.metrics.sinks.base import Values, Writer

MAX_ETA_S = 1e10  # 300 years: a run that is to be stopped by hand has no end to expect


class Console(Writer):
    """One line per logged step, and one per validation, through the logger."""

    def __init__(self, total_steps: int):
        self.total_steps = total_steps

    def write(self, step: int, values: Values) -> None:
        logger.info(console_line(step, self.total_steps, values))
        if line := validation_line(values):
            logger.info(line)


def console_line(step: int, total_steps: int, values: Values) -> str:
    """`step 10/200  loss 5.1234  ...`: the metrics that a person watches, as far as `values` has them."""
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    formats = {
        "train/loss": "loss {:.4f}",
        "eval/loss": "validation loss {:.4f}",
        "eval/ema_loss": "ema loss {:.4f}",
        "train/grad_norm": "grad_norm {:.3f}",
        "train/learning_rate": "lr {:.2e}",
        "moe/max_violation": "max violation {:.2f}",
        "moe/forced": "forced load balance",
        "throughput/tokens_per_second": "{:,.0f} tok/s",
        "memory/peak_reserved_gib": "mem {:.1f} GiB",
        "throughput/mfu": "mfu {:.1%}",
    }
    formats |= {"time/to_first_step_s": "started in {:.0f} s", "compile/seconds": "compiled in {:.0f} s"}
    parts += [text.format(values[key]) for key, text in formats.items() if key in values]
    if values.get("time/data_wait_pct", 0) >= 1:  # below 1%, not worth a column
        parts.append(f"waiting for data {values['time/data_wait_pct']:.0f}%")
    # Tokens that are left say more than steps, whose size may change.
    tokens_per_s = values.get("throughput/tokens_per_second", 0)
    remaining_s = (
        values.get("progress/remaining_tokens", math.inf) / tokens_per_s if tokens_per_s else math.inf
    )
    if remaining_s < MAX_ETA_S and "compile/seconds" not in values:  # later steps do not compile
        parts.append(f"eta {timedelta(seconds=round(remaining_s))}")
    return "  ".join(parts)


def validation_line(values: Values) -> str:
    """`validation: 16,384 tokens in 0.4 s; tasks in 1.2 s: arc_easy 31.2%`: the cost of a validation, and the
    accuracies in the tasks; empty if `values` has no validation."""
    parts = []
    if "time/validation_s" in values:
        parts.append(f"{values['eval/tokens']:,} tokens in {values['time/validation_s']:.1f} s")
    if "time/tasks_s" in values:
        parts.append(f"tasks in {values['time/tasks_s']:.1f} s: {task_accuracies(values)}")
    return f"validation: {'; '.join(parts)}" if parts else ""


def task_accuracies(values: Values) -> str:
    """`arc_easy 31.2%, lambada 4.0%, core 0.1523 centered`: the accuracies in the tasks, and the centered
    accuracies of groups."""
    matches = [match for key in values if (match := re.fullmatch(r"tasks/(.+)/(acc|centered)", key))]
    return ", ".join(
        f"{match[1]} {values[match[0]]:.1%}"
        if match[2] == "acc"
        else f"{match[1]} {values[match[0]]:.4f} centered"
        for match in matches
    )
