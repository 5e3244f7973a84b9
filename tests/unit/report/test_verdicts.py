"""Each verdict is given for a series that has what it names, and not for noise."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.curves import KINDS, falling, flat, noise_like, series, write_run
from tests.support.tiers import full
from titanlite.report import verdicts
from titanlite.report.estimates import Series, mean_with_error, noise, slope_with_error
from titanlite.report.events import events_of
from titanlite.report.page import report
from titanlite.report.pairs import difference, pair_verdicts
from titanlite.report.recorded_run import read_run
from titanlite.report.verdicts import Verdict, verdicts_of

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks/results"
NUM = 400
CONSTANT_RATE = series(np.full(NUM, 1e-3))


def noisy(shape: Any, sigma: float = 0.03, seed: int = 0) -> np.ndarray:
    return shape(NUM) + sigma * noise_like("normal", NUM, seed)


def names(given: list[Verdict]) -> list[str]:
    return [verdict.name for verdict in given]


# ---- what each verdict must be given for; the last line of each test is the control


def spike_event(start_step: int, step: int) -> dict[str, Any]:
    about = {"start_step": start_step, "detected_step": step, "level": 2.5, "height": 0.75}
    return {"step": step, "event": "spike", **about, "first_sequence": 16, "last_sequence": 400}


def test_a_spike_that_the_guard_has_found_is_a_verdict(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"train/loss": falling(60)}, every=10)
    events = folder / "events.jsonl"
    events.write_text(json.dumps(spike_event(301, 324)) + "\n")
    run = read_run(folder, "run")
    (verdict,) = verdicts_of(run)
    assert (verdict.name, verdict.step, verdict.weight) == ("spike", 301, "bad")
    assert verdict.headline == "the loss spiked by 0.75 nats at step 301"
    assert verdict.evidence.startswith("spike, step 324: start_step 301; detected_step 324; level 2.5")
    assert "logged 60 times" in report([run])
    with events.open("a") as file:
        file.write('{"step": 200, "event": "rewound"}\n')
    assert names(verdicts_of(read_run(folder, "run"))) == ["rewound"]
    given = verdicts.spikes(events_of([spike_event(step, step + 23) for step in range(301, 317)]))
    assert len(given) == verdicts.MAX_SPIKES
    assert "11 more spikes" in given[-1].evidence


def test_diverged() -> None:
    loss = noisy(falling)
    loss[300:] += np.linspace(0, 2, 100)
    (verdict,) = verdicts.diverged(series(loss))
    assert verdict.weight == "bad"
    assert verdict.step is not None
    assert 300 < verdict.step < 360
    assert verdicts.diverged(series(noisy(falling))) == []


def run_with_stages(folder: Path, loss: np.ndarray, stages: str) -> list[Verdict]:
    metrics = {"train/loss": loss, "progress/sequences": np.arange(1, len(loss) + 1) * 16}
    return verdicts_of(read_run(write_run(folder, metrics, job=stages), "run"))


def test_losses_are_not_compared_with_those_of_a_stage_with_other_sources(tmp_path: Path) -> None:
    """The second stage begins within step 201, so step 202 is its first."""
    loss = np.concatenate([noisy(falling)[:201], 1.5 + noisy(falling, seed=1)[:300]])
    stages = """
        [[stages]]
        until = "3210 sequences"
        weights = { easy = 1 }
        [[stages]]
        until = "end"
        weights = { hard = 1 }
    """
    assert [v.name for v in run_with_stages(tmp_path / "run", loss, stages) if v.weight == "bad"] == []
    same = stages.replace("hard", "easy")
    for i, job in enumerate(("", same, stages.replace("3210", "32000"))):  # controls
        given = names(run_with_stages(tmp_path / f"{i}", loss, job))
        assert "diverged" in given
    loss[400:] += np.linspace(0, 2, 101)
    given = run_with_stages(tmp_path / "worse", loss, stages)
    (diverged,) = (v for v in given if v.name == "diverged")
    assert diverged.step is not None
    assert 400 < diverged.step < 460


def test_plateau_from_the_step_at_which_the_loss_stagnates() -> None:
    loss = noisy(falling, sigma=0.02)
    loss[160:] += loss[150:160].mean() - falling(NUM)[160:]
    (verdict,) = verdicts.trend(series(loss), CONSTANT_RATE)
    assert (verdict.name, verdict.weight) == ("plateau", "bad")
    assert verdict.step is not None
    assert 60 <= verdict.step <= 241
    decaying = series(np.linspace(1e-3, 0, NUM))
    assert "plateau" not in names(verdicts.trend(series(loss), decaying))  # a rate of 0 trains nothing
    assert "plateau" not in names(verdicts.trend(series(noisy(falling, sigma=0.02)), CONSTANT_RATE))


def test_a_stagnating_run_is_flagged_by_the_report(tmp_path: Path) -> None:
    loss = noisy(falling, sigma=0.02)
    rates = {"train/learning_rate": np.full(NUM, 1e-3)}
    stagnating = np.concatenate([loss[:160], loss[150:160].mean() + 0.02 * noise_like("normal", 240, 1)])
    run = read_run(write_run(tmp_path / "run", {"train/loss": stagnating, **rates}), "run")
    assert "the loss has not fallen since step" in report([run])
    assert names(verdicts_of(run))[0] == "plateau"
    run = read_run(write_run(tmp_path / "run", {"train/loss": loss, **rates}), "run")
    assert "plateau" not in names(verdicts_of(run))


def test_a_run_that_never_learned_is_on_a_plateau() -> None:
    (verdict,) = verdicts.trend(series(noisy(flat)), CONSTANT_RATE)
    assert (verdict.name, verdict.step) == ("plateau", 81)


def test_still_falling_gives_nats_per_doubling() -> None:
    tokens = np.arange(1.0, NUM + 1)
    loss = 6 - 0.3 * np.log2(tokens) + 0.01 * noise_like("normal", NUM, 0)
    (verdict,) = verdicts.trend(series(loss), CONSTANT_RATE)
    assert (verdict.name, verdict.weight) == ("still falling", "good")
    assert float(verdict.headline.split("by ")[1].split()[0]) == pytest.approx(0.3, abs=0.03)
    decaying = series(np.linspace(1e-3, 0, NUM))
    assert "learning rate fell" in verdicts.trend(series(loss), decaying)[0].evidence
    assert "still falling" not in names(verdicts.trend(series(noisy(flat)), CONSTANT_RATE))


def test_overfitting() -> None:
    loss = series(noisy(falling) - np.linspace(0, 0.5, NUM))
    held_out = falling(NUM) + np.maximum(0, np.linspace(-0.4, 0.4, NUM))
    validation = series(held_out + 0.005 * noise_like("normal", NUM, 1))[19::20]
    (verdict,) = verdicts.overfitting(loss, validation)
    assert (verdict.name, verdict.weight) == ("overfitting", "bad")
    healthy = series(falling(NUM) + 0.005 * noise_like("normal", NUM, 1))[19::20]
    assert verdicts.overfitting(loss, healthy) == []
    both_rise = series(noisy(flat) + np.linspace(0, 0.5, NUM))
    assert verdicts.overfitting(both_rise, validation) == []


def test_overfitting_says_the_epochs_of_each_source(tmp_path: Path) -> None:
    held_out = falling(NUM) + np.maximum(0, np.linspace(-0.4, 0.4, NUM))
    held_out += 0.005 * noise_like("normal", NUM, 1)
    metrics = {
        "train/loss": noisy(falling) - np.linspace(0, 0.5, NUM),
        "eval/loss": [x if i % 20 == 19 else None for i, x in enumerate(held_out)],
        "progress/sequences": np.arange(1, NUM + 1) * 16,
    }
    folder = write_run(tmp_path / "run", metrics)
    assert "epochs" not in overfitting_of(folder).evidence
    shares = [("text a", 0.75, 2400), ("text b", 0.25, 32_000)]
    sources = [{"source": label, "share": share, "sequences": num} for label, share, num in shares]
    (folder / "sources.json").write_text(json.dumps({"sources": sources}))
    verdict = overfitting_of(folder)
    assert verdict.step is not None
    then = f"{verdict.step * 16 * 0.75 / 2400:.2f} of text a"
    assert f"; epochs by step {verdict.step}: {then}, " in verdict.evidence
    assert verdict.evidence.endswith("; by the end: 2.00 of text a, 0.05 of text b")
    half = NUM * 8
    stages = {"text a": [[0, 0.75], [half, 0.0]], "text b": [[0, 0.25], [half, 1.0]]}
    sources = [source | {"stages": stages[str(source["source"])]} for source in sources]
    (folder / "sources.json").write_text(json.dumps({"sources": sources}))
    ends = [0.75 * half / 2400, 1.25 * half / 32_000]
    end = f"; by the end: {ends[0]:.2f} of text a, {ends[1]:.2f} of text b"
    assert overfitting_of(folder).evidence.endswith(end)


def overfitting_of(folder: Path) -> Verdict:
    (verdict,) = [v for v in verdicts_of(read_run(folder, "run")) if v.name == "overfitting"]
    return verdict


def test_low_precision_of_the_loss() -> None:
    normal = 0.002 * noise_like("normal", 40, 0)
    off = normal.copy()
    off[25:] += 0.02
    (verdict,) = verdicts.low_precision(series(off, every=100))
    assert (verdict.name, verdict.weight, verdict.step) == ("low precision", "bad", 3100)
    rounding = np.array([0.02, -0.02, 0.02, -0.02, 0.02])  # without a drift: the loss itself is rounded
    assert names(verdicts.low_precision(series(rounding))) == ["low precision"]
    assert verdicts.low_precision(series(off[:25])) == []
    assert verdicts.low_precision(series(rounding[:4])) == []


def test_noisier_only_with_the_same_batch() -> None:
    loss = noisy(falling)
    loss[300:] += 0.1 * noise_like("normal", 100, 5)
    assert names(verdicts.noisier(series(loss))) == ["noisier"]
    halved = series(loss)
    tokens = halved.tokens.copy()
    tokens[300:] = tokens[299] + np.arange(1, 101) * 50_000  # half the batch has more noise
    assert verdicts.noisier(Series(halved.steps, tokens, halved.values)) == []


def test_clipping_always() -> None:
    norms = series(1.5 + 0.3 * noise_like("normal", NUM, 0))
    assert names(verdicts.clipping(norms, 1.0)) == ["clipping always"]
    assert verdicts.clipping(norms, 2.0) == []
    assert verdicts.clipping(norms, 0.0) == []  # 0 clips nothing


def test_slower_says_where_and_what_waiting_for_data_was() -> None:
    speed = 1000 * (1 + 0.03 * noise_like("normal", NUM, 0))
    waits = np.ones(NUM)
    speed[150:340] *= 0.8
    waits[150:340] = 21.0
    (verdict,) = verdicts.slower(series(speed), series(waits))
    assert int(verdict.headline.split("%")[0].split()[-1]) == pytest.approx(20, abs=2)
    assert "21.0% of the time there, 1.0% elsewhere" in verdict.evidence
    assert verdict.step is not None
    assert 120 <= verdict.step <= 180
    assert verdicts.slower(series(1000 * (1 + 0.03 * noise_like("normal", NUM, 0))), series(waits)) == []


def test_not_finite_and_skipped_steps() -> None:
    loss = noisy(falling)
    loss[[17, 18]] = np.nan, np.inf
    targets = np.full(NUM, 16.0)
    (verdict,) = verdicts.not_finite(series(loss), series(targets))
    assert verdict.step == 18
    assert "steps 18 to 19" in verdict.evidence
    event = {"step": 17, "event": "skipped", "loss": "nan", "first_sequence": 256, "last_sequence": 271}
    (verdict,) = verdicts.skipped(events_of([event]))
    assert (verdict.headline, verdict.step) == ("1 step skipped", 17)
    assert verdict.evidence == "skipped, step 17: loss nan; first_sequence 256; last_sequence 271"
    (verdict,) = verdicts.skipped(events_of([event] * 7))
    assert (verdict.headline, verdict.evidence.count("\n")) == ("7 steps skipped", 5)
    assert verdict.evidence.endswith("\n2 more")
    targets[[17, 18]] = 0
    assert verdicts.not_finite(series(loss), series(targets)) == []
    assert verdicts.not_finite(series(noisy(falling)), series([])) == []


def test_rewinds_are_named_also_if_they_were_rewound_themselves() -> None:
    records = [
        {"step": 20, "event": "rewound", "reason": "the loss spiked at step 31"},
        {"step": 10, "event": "rewound", "first_sequence": 160, "last_sequence": 511},
    ]
    (verdict,) = verdicts.rewound(events_of(records))
    assert (verdict.name, verdict.headline, verdict.step) == ("rewound", "the run rewound 2 times", 20)
    assert verdict.evidence == (
        "rewound, step 20: reason the loss spiked at step 31\n"
        "rewound, step 10: first_sequence 160; last_sequence 511"
    )
    assert verdicts.rewound([]) == []


def test_rewinds_from_before_a_restart_are_of_another_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"train/loss": [3.0]})
    kinds = ["started", "rewound", "spike", "started", "spike", "rewound", "resumed"]
    lines = [json.dumps({"step": 5, "event": kind}) + "\n" for kind in kinds]
    for num, rewinds in ((7, 1), (5, 0), (2, 1)):
        (folder / "events.jsonl").write_text("".join(lines[:num]))
        assert len(read_run(folder, "run").since_start("rewound")) == rewinds


def test_runs_that_are_equal_tie_and_a_better_one_is_named() -> None:
    first = series(noisy(falling, seed=1))
    equal = difference(first, series(noisy(falling, seed=2)))
    assert names(pair_verdicts(("a", "b"), equal, are_paired=False)) == ["tie"]
    lower = difference(first, series(noisy(falling, seed=2) - 0.1))
    (verdict,) = pair_verdicts(("a", "b"), lower, are_paired=True)
    assert verdict.headline.startswith("b ends with a loss that is lower by 0.")
    assert "the same sequences" in verdict.evidence
    (verdict,) = pair_verdicts(("a", "a again"), difference(first, first), are_paired=True)
    assert verdict.name == "tie"


def test_runs_are_compared_at_equal_tokens() -> None:
    first = series(falling(NUM))
    rare = series(falling(2 * NUM))[9::10]  # other steps, other lengths
    delta = difference(first, rare)
    assert len(delta) == 40
    assert np.allclose(delta.values, 0)
    later = Series(first.steps, first.tokens + 1e12, first.values)
    assert len(difference(first, later)) == 0


def test_a_short_run_gets_no_verdict_on_its_loss() -> None:
    loss = noisy(flat)[: verdicts.MIN_POINTS - 1]
    loss[150:] += 3
    short = series(loss)
    assert verdicts.diverged(short) + verdicts.trend(short, CONSTANT_RATE) == []
    assert pair_verdicts(("a", "b"), difference(short, short), are_paired=False) == []


# ---- noise


@pytest.mark.full
@pytest.mark.parametrize(("num_seeds", "num"), [(40, 200), full(1000, 200), full(1000, 600)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", [0.02, 0.3])
def test_noise_gives_no_verdict(num_seeds: int, num: int, kind: str, sigma: float) -> None:
    """At most 1% of runs get a false verdict of each name. A run that falls is not on a plateau, one that
    does not fall is not still falling."""
    rate, counts = series(np.full(num, 1e-3)), dict[str, int]()
    for seed in range(num_seeds):
        for shape in (flat, falling):
            given = set(noise_verdicts(shape, num, kind, sigma, seed, rate))
            given -= {"plateau"} if shape is flat else {"still falling"}
            for name in given:
                counts[name] = counts.get(name, 0) + 1
    # Both shapes have the same noise, so that one of the few seeds of the default tier may count twice.
    assert max(counts.values(), default=0) <= max(2 * num_seeds // 100, 2), counts


def noise_verdicts(shape: Any, num: int, kind: str, sigma: float, seed: int, rate: Series) -> list[str]:
    loss = series(shape(num) + sigma * noise_like(kind, num, seed))
    held_out = shape(num) + sigma / 3 * noise_like("normal", num, seed + 10**6)
    norms = series(0.99 + 0.3 * noise_like(kind, num, seed + 2 * 10**6))
    speed = series(1000 * (1 + 0.05 * noise_like(kind, num, seed + 3 * 10**6)))
    other = series(shape(num) + sigma * noise_like(kind, num, seed + 4 * 10**6))
    given = [
        *verdicts.diverged(loss),
        *verdicts.trend(loss, rate),
        *verdicts.overfitting(loss, series(held_out)[num // 20 - 1 :: num // 20]),
        *verdicts.noisier(loss),
        *verdicts.low_precision(series(0.002 * noise_like(kind, num // 20, seed + 5 * 10**6))),
        *verdicts.clipping(norms, 1.0),
        *verdicts.slower(speed, series(np.ones(num))),
    ]
    given += [
        v for v in pair_verdicts(("a", "b"), difference(loss, other), are_paired=False) if v.name != "tie"
    ]
    clearly_lower = Series(other.steps, other.tokens, other.values - 2 * sigma)
    given += [v for v in pair_verdicts(("a", "b"), difference(loss, clearly_lower), False) if v.name == "tie"]
    return names(given)


def test_estimates_know_their_error() -> None:
    """The values lie within two of their errors about 19 times out of 20, also for correlated noise."""
    x = np.log2(np.linspace(4, 5, 200))
    for kind in KINDS:
        draws = [noise_like(kind, 200, seed) for seed in range(200)]
        slopes = [slope_with_error(x, 3 - 0.5 * x + draw) for draw in draws]
        means = [mean_with_error(7 + draw) for draw in draws]
        for inside in (
            np.mean([abs(s.value + 0.5) < 2 * s.error for s in slopes]),
            np.mean([abs(m.value - 7) < 2 * m.error for m in means]),
        ):
            assert 0.85 < inside < 0.99
    trended = 3 - 0.5 * x + 0.02 * noise_like("normal", 200, 0)
    assert noise(trended) == pytest.approx(0.02, rel=0.3)


# ---- recorded runs


def recorded(node: Any) -> Iterator[list[dict[str, Any]]]:
    """All lists of logged steps in a result of a benchmark."""
    if isinstance(node, list) and node and isinstance(node[0], dict) and "train/loss" in node[0]:
        yield node
    elif isinstance(node, (list, dict)):
        for child in node.values() if isinstance(node, dict) else node:
            yield from recorded(child)


@pytest.mark.full
def test_the_recorded_runs_give_no_false_alarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are healthy. They are too short for verdicts, so the limit is lowered here. The speeds were
    measured on machines with other work, and are not judged."""
    monkeypatch.setattr(verdicts, "MIN_POINTS", 80)
    num_long = 0
    for file in sorted(RESULTS.glob("*.json")):
        for records in recorded(json.loads(file.read_text())):
            keys = ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss")
            metrics = {key: [record.get(key) for record in records] for key in keys}
            folder = write_run(tmp_path / "run", metrics, job="[training]\nmax_norm = 1.0\n")
            bad = [v for v in verdicts_of(read_run(folder, "run")) if v.name != "still falling"]
            assert bad == [], file.name
            num_long += len(records) >= 80
    assert num_long >= 7
