"""The parts of the benchmarks that choose runs, make text and write tables, with results made up here."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from benchmarks import optimizer_tables, transfer_lr
from benchmarks.optimizer_curves import Case, crossing, next_rates, summary
from benchmarks.text_by_kind import taken_apart
from benchmarks.text_tasks import CHOICES, CONTEXT_LINES, last_word, next_line
from benchmarks.throughput import repeat
from benchmarks.trained_run import TABLES, recorded, refreshed, with_header


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


def parabola(best: float) -> dict[float, float]:
    """Losses at five rates, a factor of two apart, on a parabola with its minimum at `best`."""
    return {rate: 2 + math.log(rate / best) ** 2 for rate in (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)}


def test_the_ratio_of_two_best_rates_and_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, beside = parabola(2e-3), (1e-3, 2e-3, 4e-3)
    searches = {
        "narrow": {0: narrow, 1: {rate: parabola(2.2e-3)[rate] + 0.01 for rate in beside}},
        "rules": {
            0: parabola(2.6e-3) | {8e-3: math.inf},
            1: {rate: parabola(2.2e-3)[rate] for rate in beside},
        },
        "standard": {0: parabola(9e-4)},
    }
    fits = transfer_lr.summary(searches)
    assert fits["ratios"]["rules"] == {0: pytest.approx(1.3), 1: pytest.approx(1.0)}
    assert fits["ratios"]["standard"] == {0: pytest.approx(0.45)}
    optimum = fits["optima"]["narrow"][0]
    spread = math.log(2.2 / 2.0) ** 2 + 0.01
    assert math.log(optimum["high"] / optimum["value"]) == pytest.approx(math.sqrt(2 * spread))
    assert fits["optima"]["standard"][0]["low"] is None  # without a second seed
    at_an_end = transfer_lr.summary(searches | {"standard": {0: parabola(1e-4)}})
    assert at_an_end["ratios"]["standard"] == at_an_end["optima"]["standard"] == {}

    monkeypatch.setattr(optimizer_tables, "RESULTS", tmp_path)
    assert optimizer_tables.transfer() == "Unmeasured.\n"
    recorded_runs = {"summary": at_an_end, "env": {"device": "GPU", "torch": "2.11.0"}}
    (tmp_path / optimizer_tables.TRANSFER[0]).write_text(json.dumps(recorded_runs))
    page = " ".join(optimizer_tables.transfer().split())
    assert "| 0.008 | 3.9218 | | 3.2628 |" not in page  # it diverged
    assert "| 0.008 | 3.9218 | | diverged | |" in page
    assert "| at an end |" in page
    assert "The best rate of `rules` is 1.30 and 1.00 times that of `narrow`" in page
    assert "`standard` is" not in page
    further = {"losses": {"narrow": {"2": {"0.001": 3.5}}, "rules": {}, "standard": {}}}
    (tmp_path / optimizer_tables.TRANSFER[1]).write_text(json.dumps({"summary": further}))
    assert "| 0.001 | 3.5000 |" in optimizer_tables.transfer()


MODULE = '''"""What the module does."""

import os


def f(x):
    """Return x.

    Twice."""
    return 2 * x


class C:
    "On one line."; y = 1
'''


def test_a_module_is_taken_apart_into_code_and_docstrings() -> None:
    code, docstrings = taken_apart(MODULE)
    assert docstrings == ["What the module does.", "Return x.\n\nTwice."]
    assert (
        code
        == '\n\nimport os\n\n\ndef f(x):\n    return 2 * x\n\n\nclass C:\n    "On one line."; y = 1\n'[1:]
    )


def test_questions_are_on_lines_and_words_that_the_context_does_not_give_away() -> None:
    lines = [f"value_{i} = compute_a_value({i})" for i in range(20)]
    questions = next_line("\n".join(lines))
    assert len(questions) == 20 - CONTEXT_LINES
    for i, question in enumerate(questions, CONTEXT_LINES):
        assert question["choices"][question["answer"]] == lines[i]
        assert len(set(question["choices"])) == CHOICES
        assert not set(question["choices"]) & set(question["context"].split("\n"))
    assert next_line("\n".join(lines[: CONTEXT_LINES + 3])) == []  # too few other lines

    words = "The loader reads the shards of a corpus in the order that its seed gives, and then every"
    (question,) = last_word(f"Short.\n\n{words} worker counts the\nshards.")
    assert question == {"context": f"{words} worker counts the", "continuation": " shards"}
    assert last_word(f"{words} worker counts the files.") == []  # the control: a new word


def trained_run(folder: Path) -> None:
    """A run folder with three stages of two reports each."""
    folder.mkdir()
    stages = [
        {"name": "short", "until": "80 sequences", "seq_len": 512},
        {"name": "main", "until": "200 sequences"},
        {"name": "decay", "until": "end", "weights": {"code": 1, "c": 0, "prose": 1}},
    ]
    sources = [
        {"path": f"a/{name}", "weight": weight} for name, weight in (("code", 2), ("c", 1), ("prose", 1))
    ]
    job = {"stages": stages, "data": {"sources": sources}, "training": {"seq_len": 2048}}
    (folder / "job.toml").write_text(tomli_w.dumps(job))
    sizes = [{"source": f"tokens a/{name}", "sequences": 40} for name in ("code", "c", "prose")]
    (folder / "sources.json").write_text(json.dumps({"sources": sizes}))
    reports = [
        {
            "step": step,
            "progress/sequences": sequences,
            "progress/total_tokens": 2048 * sequences,
            "time/step_s": 0.5,
            "train/learning_rate": 1e-3,
            "throughput/tokens_per_second_per_device": 2e6,
            "eval/loss": 3.0 - sequences / 1000,
            **{f"eval/{name}/bits_per_byte": 1.0 - sequences / 1000 for name in ("code", "c", "prose")},
            **{f"tasks/{name}/acc": 0.5 for name in ("next_line", "last_word")},
            **{f"tasks/{name}/acc_stderr": 0.02 for name in ("next_line", "last_word")},
        }
        for step, sequences in ((1, 16), (5, 80), (7, 144), (8, 200), (9, 264), (10, 300))
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports))
    times = [
        ("started", 0, "10:00:00"),
        ("saved", 5, "10:02:00"),
        ("resumed", 5, "11:00:00"),
        ("saved", 10, "11:01:30"),
    ]
    events = [{"step": step, "event": name, "time": f"2026-01-01T{time}+00:00"} for name, step, time in times]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    env = {"command": "", "platform": "", "device": "NVIDIA Test", "torch": "2.11.0"}
    (folder / "env.json").write_text(json.dumps(env))
    kind = {"train": {"documents": 1000, "tokens": 2_000_000}, "held_out": {"tokens": 50_000}}
    tasks = {name: {"questions": 300, "chance": 0.25} for name in ("next_line", "last_word")}
    text = {"kinds": dict.fromkeys(("code", "c", "prose"), kind), "tasks": tasks}
    (folder / "text.json").write_text(json.dumps(text))
    for name in ("run_identity.json", "samples.txt", "leg0.log"):
        (folder / name).write_text("{}")


def test_the_tables_of_a_trained_run_have_its_numbers(tmp_path: Path) -> None:
    trained_run(tmp_path / "run")
    result = recorded(tmp_path / "run")
    pages = "\n".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in TABLES)
    page = " ".join(refreshed(pages, result).split())
    assert "| `code` | 1,000 | 2.0 million | 0.05 million | 1.00 | 1.50 | 1.25 | 3.75 |" in page
    assert "| `c` | 1,000 | 2.0 million | 0.05 million | 0.50 | 0.75 | 0.00 | 1.25 |" in page
    assert "| `short` | 0 million | 5 | 512 | 32,768 | 1.0e-03 to 1.0e-03 | 2.00 million |" in page
    assert "| `decay` | 10 | 2.7000 | 0.7000 | 0.7000 | 0.7000 | 50.0% ± 2.0% | 50.0% ± 2.0% |" in page
    assert "the bits per byte fall: `code` by 0.1000" in page
    assert "steps 1 to 5 in 120 s; steps 6 to 10 in 90 s" in page
    assert refreshed(pages, None).count("Unmeasured.") == len(TABLES)

    config = with_header("# A model.\n# Unmeasured.\n\n[job]\n", result)
    assert config.startswith("# A model.\n# Measured: 1e6 tokens on one NVIDIA Test with torch 2.11.0 took")
    assert config == with_header(config, result)
    assert config.endswith("docs/stages.md has the\n# curve.\n\n[job]\n") or config.endswith(
        "curve.\n\n[job]\n"
    )


def test_a_result_says_how_its_measurement_is_repeated() -> None:
    path = Path(__file__).resolve().parents[1] / "benchmarks/results/llama3_8b_h200x4_b2_torchtitan.json"
    options = argparse.Namespace(config=str(path), ngpu=2, steps=None, skip=None, rounds=None, peer=None)
    overrides = repeat(options, json.loads(path.read_text()))
    assert options.config == "train_configs/llama3_8b.toml"
    assert options.ngpu == 2  # the command line's
    assert (options.steps, options.skip, options.rounds) == (15, 5, 1)
    assert "--training.local_batch_size=2" in overrides
    assert options.peer.startswith("--model.flavor 8B ")
