"""Metrics that no run has written: report and compare leave out the values that they cannot draw."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.curves import falling
from titanlite.report.compare import comparison
from titanlite.report.figures import main_charts, noise_scale
from titanlite.report.page import report
from titanlite.report.recorded_run import TOKENS, RecordedRun, number, read_run
from titanlite.report.timeline import gpu_hours
from titanlite.report.verdicts import verdicts_of

NUM = 210  # records: enough for all verdicts
KEYS = [
    "train/loss", "train/grad_norm", "train/learning_rate", "train/skipped_steps", "train/targets",
    "train/noise_scale_noise", "train/noise_scale_signal", "train/noise_scale_sequences", "eval/loss",
    "eval/a/loss", "tasks/x/acc", "progress/total_tokens", "progress/sequences", "time/step_s",
    "time/to_first_step_s", "checkpoint/stall_s", "throughput/tflops", "throughput/tokens_per_second",
    "throughput/tokens_per_second_per_device", "memory/peak_reserved_gib", "data/batch_sha", "other/x",
]  # fmt: skip
SPECIAL = [
    1e19, 10**400, -(10**400), 1e299, -1e299, 5e-324, -1, 0, 2**63, "nan", "inf", "-inf", "x", True, None, [],
]  # fmt: skip
STAGES = '[[stages]]\nuntil = "8 sequences"\nweights = {a = 1}\n[[stages]]\nuntil = "end"\n'
Record = dict[str, Any]


def run_of(folder: Path, records: list[Record], name: str = "run") -> RecordedRun:
    """A run with these records; each has the step of its place, and as many tokens, if it has none."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"step": i, TOKENS: i, **record}) for i, record in enumerate(records, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.toml").write_text(STAGES)
    return read_run(folder, name)


@pytest.mark.full
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(SPECIAL), max_size=len(KEYS)),
    st.dictionaries(st.tuples(st.sampled_from(KEYS), st.integers(0, NUM - 1)), st.sampled_from(SPECIAL)),
    st.sets(st.sampled_from(KEYS), min_size=3),
    st.sampled_from([1, 2, 3, NUM]),
)
def test_no_value_ends_a_report(
    tmp_path_factory: pytest.TempPathFactory,
    everywhere: Record,
    changes: dict[tuple[str, int], Any],
    keys: set[str],
    num: int,
) -> None:
    records = [{key: float(loss) for key in keys} | everywhere for loss in falling(num)]
    for (key, i), value in changes.items():
        records[i % num][key] = value
    folder = tmp_path_factory.mktemp("edited")
    records.append({})  # all records before it may be damaged
    runs = [run_of(folder / "a", records), run_of(folder / "b", records[num // 2 :], "other")]
    page = report(runs, price=1.0)
    assert "NaN" not in page.partition('id="data">')[2].partition("</script>")[0]
    assert comparison(runs).startswith("run\n")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (1e19, 1e19),
        (10**19, 1e19),
        ("-Inf", -math.inf),
        (True, None),
    ],
)
def test_numbers_that_are_too_large_are_infinite(value: Any, expected: float | None) -> None:
    assert number(value) == expected


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    """The values beside them are still shown: 16 sequences of noise, two ranks."""
    base = {
        "train/loss": 3.0,
        "throughput/tokens_per_second": 8.0,
        "throughput/tokens_per_second_per_device": 4.0,
    }
    base |= {"memory/peak_reserved_gib": 1.0, "time/step_s": 3600.0}
    noise = {"train/noise_scale_noise": 2.0, "train/noise_scale_signal": 1.0}
    run = run_of(
        tmp_path,
        [
            base | noise | {"train/noise_scale_sequences": 16.0},
            base | noise | {"train/loss": "inf"},
            base | {"train/noise_scale_sequences": 9.0, "throughput/tokens_per_second_per_device": 5e-324},
        ],
    )
    assert [verdict.name for verdict in verdicts_of(run)] == ["not finite"]
    assert noise_scale(run).values.tolist() == [16.0, 16.0]
    assert gpu_hours(run) == 6.0


def test_a_single_point_is_drawn_in_every_chart(tmp_path: Path) -> None:
    """As of a branch with one validation, beside a run with two."""
    losses = ("eval/loss", "eval/bits_per_byte")
    record = {"train/loss": 3.0, "time/step_s": 1.0, "progress/total_tokens": 7.0}
    validated = record | dict.fromkeys(losses, 2.0)
    runs = [run_of(tmp_path / "a", [record, validated, validated]), run_of(tmp_path / "b", [validated])]
    charts = {chart.title: chart for chart in main_charts(runs)}
    for title in ("Validation loss", "Validation loss in bits per byte", "Validation loss by time"):
        assert [(line.run, len(line.x)) for line in charts[title].lines] == [(0, 2), (1, 1)]
    (point,) = [line for line in charts["Validation loss"].lines if line.run == 1]
    assert (point.x.tolist(), point.y.tolist()) == ([7.0], [2.0])
