"""The parts of the benchmarks of optimizers that choose runs and write tables, with results made up here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import optimizer_tables
from benchmarks.optimizer_curves import Case, crossing, next_rates, summary


def curve(*losses: float) -> list[dict[str, Any]]:
    points = [
        {"step": i, "tokens": 100 * i, "seconds": float(i), "eval/loss": loss}
        for i, loss in enumerate(losses, 1)
    ]
    return [{"step": 0, "tokens": 0, "seconds": 0.0, "train/loss": 9.0}, *points]


def runs_of(optimizer: str, losses: dict[float, float], seed: int = 0) -> dict[str, dict[str, Any]]:
    """Runs whose validation loss falls from 4 in two equal steps."""
    return {
        Case(optimizer, lr, seed).name: {
            "optimizer": optimizer,
            "lr": lr,
            "seed": seed,
            "final": {"eval/loss": loss, "train/loss": loss, "tokens": 300, "seconds": 3.0},
            "tokens_per_second": 1234.0,
            "env": {"device": "GPU", "torch": "2.11.0"},
            "curve": curve(4.0, (4.0 + loss) / 2, loss),
        }
        for lr, loss in losses.items()
    }


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1e-3: 3.0, 2e-3: 2.0, 4e-3: 2.5}, []),
        ({1e-3: 3.0, 2e-3: 2.5, 4e-3: 2.0}, [8e-3]),
        ({1e-3: 2.0, 2e-3: 2.5, 4e-3: 3.0}, [5e-4]),
        ({1e-3: 2.0}, []),
        ({}, []),
    ],
)
def test_the_next_rate_is_beyond_the_best_one_if_that_is_at_the_edge(
    losses: dict[float, float], expected: list[float]
) -> None:
    runs = {
        **runs_of("adamw", losses),
        **runs_of("adamw", {9e-3: 1.0}, seed=1),
        **runs_of("muon", {1.0: 1.0}),
    }
    assert next_rates(runs, "adamw") == expected


def test_a_curve_crosses_a_loss_between_its_points() -> None:
    assert crossing(curve(4.0, 3.0, 2.0), 2.25) == pytest.approx({"tokens": 275, "seconds": 2.75})
    assert crossing(curve(4.0, 3.0, 2.0), 1.9) is None


def test_tables_and_sentences_have_the_numbers_of_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {
        **runs_of("adamw", {1e-3: 3.2, 2e-3: 3.0, 4e-3: 3.1}),
        **runs_of("adamw", {2e-3: 3.01}, seed=1),
        **runs_of("adamw int8", {2e-3: 3.02}),
        **runs_of("muon", {1e-3: 3.1, 2e-3: 2.8, 4e-3: 2.9}),
        "muon_failed": {"optimizer": "muon", "lr": 1.0, "seed": 0, "error": "why", "wall_s": 1.0},
    }
    text = {"files": 12, "bytes": 5_000_000, "train_tokens": 600}
    result = {"steps": 3, "text": text, "gpu_minutes": 4.2, "summary": summary(runs), "runs": runs}
    monkeypatch.setattr(optimizer_tables, "RESULTS", tmp_path)
    assert optimizer_tables.curves() == optimizer_tables.steps() == "Unmeasured.\n"
    (tmp_path / optimizer_tables.CURVES).write_text(json.dumps(result))
    page = " ".join(optimizer_tables.curves().split())
    assert "| adamw int8 | 0.002 | 0 | 3.0200 | 3.020 | 1,234 | 3 |" in page
    assert "0.50 epochs of 12 files" in page
    assert "At its best rate, 0.002, Muon's validation loss is 0.2000 below AdamW's at 0.002." in page
    assert "Two seeds of AdamW differ by 0.0100." in page
    assert "after 89% of the tokens and 89% of the time" in page  # between 3.4 and 2.8, at 2 / 3
    assert "edge" not in page

    case = {
        "throughput/tokens_per_second_per_device": 50.0,
        "time/step_s": 2.0,
        "time/optimizer_s": 0.01,
        "memory/peak_reserved_gib": 7.0,
        "state_bytes_per_parameter": 8.0,
    }
    steps = {
        "config": "a.toml",
        "ngpu": 2,
        "tokens_per_step": 131072,
        "summaries": {"adamw": case, "torch": {"error": "why"}},
        "ratios_to_adamw": {"adamw": {"throughput/tokens_per_second_per_device": 1.0}, "torch": {}},
        "runs": {"torch": [{"error": "why"}], "adamw": [{"env": {"device": "GPU", "torch": "2.11.0"}}]},
    }
    (tmp_path / "optimizer_steps_x.json").write_text(json.dumps(steps))
    page = optimizer_tables.steps()
    assert "131,072 tokens per step on 2 x GPU, torch 2.11.0 (`optimizer_steps_x.json`)" in page
    assert "| adamw | 50 (1.000) | 2.000 s | 10.0 ms | 7.0 GiB | 8.00 bytes |" in page
    assert "| torch | failed | failed | failed | failed | failed |" in page
