"""Pins the sinks: after a resume metrics.jsonl and TensorBoard show no step twice, what is cut is kept
aside, a line torn by a kill does no harm, every line is JSON whatever the numbers are, and the console shows
what is known and matters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titanlite.metrics.sinks.console import console_line, validation_line
from titanlite.metrics.sinks.jsonl import JsonLines
from titanlite.metrics.sinks.samples import Samples
from titanlite.metrics.sinks.tensorboard import EventFile


def strict_loads(line: str) -> dict[str, Any]:
    """A line as JSON, refusing the NaN and Infinity that Python's reader lets pass."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def steps_in(path: Path) -> list[int]:
    """The steps of a metrics file, all of whose lines must be JSON."""
    return [strict_loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(path: Path, first: int, last: int, from_step: int, run: int = 0) -> None:
    """Log steps first .. last as a run that continues after `from_step`."""
    sink = JsonLines(path, from_step)
    for step in range(first, last + 1):
        sink.write(step, {"train/loss": 5.0 - step / 10, "run": run})
    sink.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def superseded(tmp_path: Path) -> Path:
    return tmp_path / "metrics.superseded.jsonl"


# ---- metrics.jsonl


def test_a_line_a_step_with_the_step_first(path):
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": 2.5, "data/batch_sha": "00ff"})
    assert path.read_text() == '{"step": 1, "train/loss": 2.5, "data/batch_sha": "00ff"}\n', (
        "not flushed at once"
    )
    sink.close()


def test_a_resume_cuts_what_comes_after_its_step(path, superseded):
    write_steps(path, 1, 6, from_step=0, run=1)
    write_steps(path, 4, 8, from_step=3, run=2)
    assert steps_in(path) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [strict_loads(line)["run"] for line in path.read_text().splitlines()] == [1, 1, 1, 2, 2, 2, 2, 2]
    assert steps_in(superseded) == [4, 5, 6]


def test_cut_lines_of_several_resumes_are_all_kept(path, superseded):
    write_steps(path, 1, 6, from_step=0)
    write_steps(path, 5, 7, from_step=4)
    write_steps(path, 3, 4, from_step=2)
    assert steps_in(path) == [1, 2, 3, 4]
    assert steps_in(superseded) == [5, 6, 3, 4, 5, 6, 7]


def test_a_resume_at_the_last_step_cuts_nothing(path, superseded):
    write_steps(path, 1, 3, from_step=0)
    before = path.read_text()
    JsonLines(path, 3).close()
    assert path.read_text() == before
    assert not superseded.exists()


def test_a_fresh_run_in_a_used_folder_keeps_the_old_lines_aside(path, superseded):
    write_steps(path, 1, 3, from_step=0)
    write_steps(path, 1, 1, from_step=0)
    assert steps_in(path) == [1]
    assert steps_in(superseded) == [1, 2, 3]


def test_a_torn_last_line_is_cut(path, superseded):
    write_steps(path, 1, 4, from_step=0)
    whole = path.read_text()
    path.write_text(whole[:-10])
    write_steps(path, 4, 5, from_step=4)
    assert steps_in(path) == [1, 2, 3, 4, 5]
    assert superseded.read_text().startswith('{"step": 4'), "the torn line is not thrown away"


def test_a_line_cut_after_a_torn_one_stays_readable(path, superseded):
    write_steps(path, 1, 4, from_step=0)
    path.write_text(path.read_text()[:-10])
    write_steps(path, 4, 5, from_step=3)
    write_steps(path, 4, 5, from_step=3)
    lines = superseded.read_text().splitlines()
    assert len(lines) == 3, "the torn line runs into the next"
    assert [strict_loads(line)["step"] for line in lines[1:]] == [4, 5]


def test_a_last_line_that_lost_only_its_newline_does_not_run_into_the_next(path):
    write_steps(path, 1, 3, from_step=0)
    path.write_text(path.read_text().removesuffix("\n"))
    write_steps(path, 4, 5, from_step=3)
    assert steps_in(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_strings(path, value):
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": value, "train/grad_norm": 1.0})
    sink.close()
    line = strict_loads(path.read_text())
    assert line == {"step": 1, "train/loss": str(value), "train/grad_norm": 1.0}
    # float() of it is the number again, for those who read it
    assert float(line["train/loss"]) == value or math.isnan(value)


def test_numbers_keep_every_bit(path):
    sink = JsonLines(path, 0)
    sink.write(1, {"train/loss": 1 / 3, "progress/total_tokens": 2**53 + 1})
    sink.close()
    assert strict_loads(path.read_text()) == {
        "step": 1,
        "train/loss": 1 / 3,
        "progress/total_tokens": 2**53 + 1,
    }


# ---- TensorBoard


def write_events(folder: Path, steps: range, from_step: int, values: Callable[[int], dict[str, Any]]) -> None:
    sink = EventFile(folder, from_step)
    for step in steps:
        sink.write(step, values(step))
    sink.close()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) of each tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_and_leaves_out_the_text(tmp_path):
    write_events(
        tmp_path,
        range(1, 3),
        0,
        lambda step: {"train/loss": step / 2, "tokens": step, "data/batch_sha": "00ff"},
    )
    assert scalars(tmp_path) == {"train/loss": [(1, 0.5), (2, 1.0)], "tokens": [(1, 1.0), (2, 2.0)]}


def test_tensorboard_takes_every_number(tmp_path):
    values = {"huge": 1e300, "many": 2**70, "loss": math.nan}
    write_events(tmp_path, range(1, 2), 0, lambda step: values)
    shown = {tag: points[0][1] for tag, points in scalars(tmp_path).items()}
    assert (shown["huge"], shown["many"]) == (math.inf, 2.0**70)
    assert math.isnan(shown["loss"])


def test_tensorboard_shows_no_step_twice_after_a_resume(tmp_path):
    write_events(tmp_path, range(1, 7), 0, lambda step: {"train/loss": 1.0})
    write_events(tmp_path, range(4, 9), 3, lambda step: {"train/loss": 2.0})
    shown = scalars(tmp_path)["train/loss"]
    assert [step for step, _ in shown] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [value for _, value in shown] == [1.0] * 3 + [2.0] * 5


def test_tensorboard_drops_what_the_resumed_run_never_writes_again(tmp_path):
    # TensorBoard sees by itself that a tag went back; only the purge reaches a tag that does not come again.
    write_events(
        tmp_path,
        range(1, 7),
        0,
        lambda step: {"train/loss": 1.0} | ({"eval/loss": 9.0} if step in (3, 6) else {}),
    )
    write_events(tmp_path, range(4, 6), 3, lambda step: {"train/loss": 2.0})
    shown = scalars(tmp_path)
    assert [step for step, _ in shown["train/loss"]] == [1, 2, 3, 4, 5]
    assert shown["eval/loss"] == [(3, 9.0)]


def test_tensorboard_hides_the_steps_after_a_rewind(tmp_path):
    file = EventFile(tmp_path, 0)
    for step in range(1, 7):
        file.write(step, {"train/loss": 1.0} | ({"eval/loss": 9.0} if step in (3, 6) else {}))
    file.event(5, "spike", {"loss": 1.0})  # hides nothing
    file.event(3, "rewound", {})
    for step in range(4, 6):
        file.write(step, {"train/loss": 2.0})
    file.close()
    shown = scalars(tmp_path)
    assert shown["train/loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0)]
    assert shown["eval/loss"] == [(3, 9.0)]


# ---- the console


FULL = {
    "train/loss": 5.12345,
    "train/grad_norm": 0.98765,
    "train/learning_rate": 3e-4,
    "throughput/tokens_per_second": 12345.6,
    "throughput/mfu": 0.4321,
    "memory/peak_reserved_gib": 70.25,
    "time/data_wait_pct": 0.123,
    "time/step_s": 2.0,
    "progress/remaining_tokens": 12345.6 * 380,
    "data/batch_sha": "00ff",
}


def test_console_line():
    assert console_line(10, 200, FULL) == (
        "step  10/200  loss 5.1235  grad_norm 0.988  lr 3.00e-04  12,346 tok/s  mem 70.2 GiB"
        "  mfu 43.2%  eta 0:06:20"
    )


def test_console_does_not_expect_every_step_to_compile():
    assert console_line(1, 200, {**FULL, "compile/seconds": 40.0}).endswith("  mfu 43.2%  compiled in 40 s")


def test_a_line_of_a_cpu_fits_into_100_columns():
    values = {key: value for key, value in FULL.items() if key[:6] not in ("throug", "memory")}
    line = console_line(100, 2000, {**values, "throughput/tokens_per_second": 4321.0})
    assert "mfu" not in line
    assert len("[rank0] 19:13:13 " + line) <= 100


@pytest.mark.parametrize(
    ("percent", "shown"), [(0.99, ""), (1.0, "  waiting for data 1%"), (23.4, "data 23%")]
)
def test_console_shows_the_wait_for_data_where_it_matters(percent, shown):
    line = console_line(10, 200, {**FULL, "time/data_wait_pct": percent})
    assert shown in line
    assert ("data" in line) == bool(shown)


def test_console_expects_no_end_in_ages():
    assert "eta" not in console_line(1, 10**18, FULL | {"progress/remaining_tokens": 10**18})


def test_console_leaves_out_what_is_not_there():
    assert console_line(10, 200, {"eval/loss": 4.0}) == "step  10/200  validation loss 4.0000"


def test_a_validation_has_a_line_with_its_cost() -> None:
    assert validation_line(FULL | {"eval/loss": 4.0}) == ""
    sequences = {"eval/loss": 4.0, "eval/tokens": 16384, "time/validation_s": 0.42}
    tasks = {f"tasks/{key}": 0.3125 for key in ("arc.easy/acc_norm", "arc.easy/acc", "b/acc", "b/ema_acc")}
    tasks |= {"tasks/core/centered": 0.25, "time/tasks_s": 1.23}
    assert validation_line(sequences) == "validation: 16,384 tokens in 0.4 s"
    accuracies = "tasks in 1.2 s: arc.easy 31.2%, b 31.2%, core 0.2500 centered"
    assert validation_line(tasks) == f"validation: {accuracies}"
    assert validation_line(sequences | tasks) == f"validation: 16,384 tokens in 0.4 s; {accuracies}"


def test_console_shows_a_loss_that_is_not_a_number():
    assert "loss nan" in console_line(1, 2, FULL | {"train/loss": math.nan})


# ---- samples.txt


def test_a_resume_cuts_the_samples_after_its_step(tmp_path: Path) -> None:
    path, superseded = tmp_path / "samples.txt", tmp_path / "samples.superseded.txt"
    Samples(path, 0).close()
    assert not path.exists()
    path.write_text("a note of mine\n")
    samples = Samples(path, 0)
    for step in (2, 4, 6):
        for prompt in ("one", "two"):
            samples.sample(step, f"{prompt}\n--- of {step}")
    samples.close()
    before = path.read_text()
    Samples(path, 6).close()
    assert path.read_text() == before
    assert not superseded.exists()
    Samples(path, 4).close()
    assert path.read_text() + superseded.read_text() == before
    assert superseded.read_text() == "--- step 6\none\n--- of 6\n--- step 6\ntwo\n--- of 6\n"


def test_the_rest_of_a_run_may_be_longer_than_a_timedelta():
    values = {"throughput/tokens_per_second": 0.5}
    assert "eta" not in console_line(1, 10**18, values | {"progress/remaining_tokens": 10**18})
    assert "eta 0:00:10" in console_line(90, 100, values | {"progress/remaining_tokens": 5})
