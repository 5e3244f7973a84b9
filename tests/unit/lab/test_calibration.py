"""What `titanlite tune --measure` writes, and how the plan uses it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measure import text
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.job import load_job
from titanlite.lab.calibration import (
    Measurement,
    PartTimes,
    part_times,
    planned_gpus,
    read_measurement,
    split_as_planned,
)
from titanlite.lab.cards import CARDS, Card, Cluster, Speeds, known_card
from titanlite.lab.layouts import assess
from titanlite.lab.measure import _steps
from titanlite.lab.plan import decisive_keys
from titanlite.lab.planned import planned_run
from titanlite.lab.step_timer import seconds_of

ROOT = Path(__file__).resolve().parents[3]
H200 = next(card for card in CARDS if card.name == "H200")
LAYOUT_KEYS = (("training", "local_batch_size"), ("activation_checkpoint", "mode"))
H100 = next(card for card in CARDS if card.name == "H100")


def measurement(config: str = "llama3_8b", card: Card = H200, **changes: Any) -> Measurement:
    job = load_job(config, [], None)
    given = Measurement(
        config=config,
        device=f"NVIDIA {card.name}",
        num_ranks=2,
        sequences=1,
        card=card,
        planned=PartTimes(0.1, 0.2, 0.3, 0.4),
        measured=PartTimes(0.2, 0.1, 0.9, 0.6),
        matmul_flops=7e14,
        memory_rate=4e12,
        keys=decisive_keys(job),
        versions={"torch": "2.11.0"},
    )
    return replace(given, **changes)


def test_two_models_give_the_times_of_a_third() -> None:
    block_s, head_s = 0.25, 0.5
    times = [(head_s + n * block_s, 2 * head_s + 3 * n * block_s) for n in (2, 4)]
    assert part_times(times[0], times[1], 2, num_blocks=10) == PartTimes(0.25, 0.5, 8.5)


def test_noise_that_leaves_nothing_to_a_part_is_shared_as_planned() -> None:
    planned = PartTimes(block=1.0, head=4.0, optimizer=1.0)
    noisy = part_times((1.0, 1.0), (3.0, 1.0), 2, num_blocks=4)
    assert noisy.head == 0
    shared = split_as_planned(noisy, planned, micro_batch_s=3.0, num_blocks=4)
    assert (shared.block, shared.head) == (3 / 8, 12 / 8)
    clear = part_times((3.0, 1.0), (4.0, 1.0), 2, num_blocks=4)
    assert split_as_planned(clear, planned, 4.0, 4) == clear  # control


def test_factors_multiply_the_parts_of_a_step() -> None:
    job = load_job("llama3_8b", [], None)

    def parts(speeds: Speeds) -> dict[str, float]:
        cluster = Cluster(H200, 8, speeds=speeds)
        return assess(planned_run(job, cluster), cluster).time.parts

    default, same = parts(Speeds()), parts(Speeds(2.0, 2.0, 3.0, 1.0))
    for part in ("matrix products", "attention", "memory traffic"):
        assert same[part] == pytest.approx(2 * default[part])
    assert same["optimizer"] == pytest.approx(3 * default["optimizer"])
    assert same["FSDP's communication"] == pytest.approx(default["FSDP's communication"])
    blocks, head = parts(Speeds(blocks=2.0)), parts(Speeds(head=2.0))
    assert blocks["attention"] == pytest.approx(2 * default["attention"])
    assert head["attention"] == default["attention"]
    for part in ("matrix products", "memory traffic"):
        assert blocks[part] + head[part] == pytest.approx(3 * default[part])
        assert default[part] < head[part] < blocks[part]
    link = parts(Speeds(link=3.0))["FSDP's communication"]
    assert link == pytest.approx(3 * default["FSDP's communication"])


def test_a_plan_takes_the_measured_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "measured.json"
    file.write_bytes(measurement().to_json())
    assert read_measurement(file) == measurement()

    def plan(*words: str) -> dict[str, Any]:
        assert cli.run(["plan", "llama3_8b", *words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    default = plan("--gpus=8xH200")
    calibrated = plan("--gpus=8xH200", f"--measured={file}")
    assert calibrated["time"]["parts_s"]["attention"] == 2 * default["time"]["parts_s"]["attention"]
    assert calibrated["time"]["step_s"] > 1.5 * default["time"]["step_s"]
    assert calibrated["notes"] == [
        "step time is calibrated by the times of llama3_8b on NVIDIA H200, torch 2.11.0"
    ]
    assert plan("--gpus=8", f"--measured={file}")["time"] == calibrated["time"]
    other = plan("--gpus=8", f"--measured={file}", "--training.local_batch_size=2")
    assert other["time"]["guess"] == ["it was calibrated with another training.local_batch_size"]
    assert calibrated["time"]["guess"] == []  # control
    words = ("--gpus=1", f"--measured={file}", "--model.overrides.n_layers=1", "--no-compile.enable")
    (guess,) = plan(*words)["time"]["guess"]
    assert guess == "it was calibrated with another model.overrides.n_layers, compile.enable"
    (guess,) = plan("--gpus=1xH200", *words[2:])["time"]["guess"]  # control: not calibrated
    assert guess.startswith("without compile.enable")


def test_a_layout_is_a_guess_unless_its_own_settings_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the measured times are those that the plan computes."""
    file, small = tmp_path / "measured.json", "--model.overrides.n_layers=1"
    keys = decisive_keys(load_job("llama3_8b", [small, "--no-compile.enable"], None))
    file.write_bytes(measurement(measured=PartTimes(0.1, 0.2, 0.3, 0.4), keys=keys).to_json())
    words = ["plan", "llama3_8b", small, "--no-compile.enable", "--gpus=2", f"--measured={file}"]
    assert cli.run([*words, "--top=20", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["time"]["guess"] == []
    differ = set()
    for row in plan["layouts"]:
        size, mode = (keys[s][k] for s, k in LAYOUT_KEYS)
        has_same = (row["local_batch_size"], row["activation_checkpoint"]) == (size, mode)
        assert any("calibrated with another" in reason for reason in row["guess"]) != has_same
        differ.add(not has_same)
    assert True in differ


def test_no_step_time_is_printed_of_a_job_that_does_not_fit() -> None:
    job, measured = load_job("llama3_8b", [], None), measurement(card=H100)
    assert _steps(job, 1, measured) == "no step time on 1 x H100, because the job does not fit"
    assert _steps(job, 8, measured).startswith("step on 8 x H100 ")  # control


def test_docs_quote_the_recorded_step_times() -> None:
    rows = json.loads((ROOT / "benchmarks/results/measure_h200.json").read_text())["rows"]
    quoted = (ROOT / "docs/planning.md").read_text().partition('measured step times"\n')[2]
    assert quoted.partition("\n```")[0] == text(rows)
    assert all(abs(row["calibrated_error"]) < 0.05 for row in rows)
    assert all(abs(row["calibrated_error"]) < abs(row["planned_error"]) for row in rows)


def test_speeds_of_another_gpu_are_refused() -> None:
    assert planned_gpus("8xH200", 1, H100, measurement()) == (8, H200)
    assert planned_gpus(None, 2, H100, measurement()) == (2, H200)
    with pytest.raises(ConfigError, match="measured on NVIDIA H200, which says nothing of H100"):
        planned_gpus("8xH100", 1, H100, measurement())
    for gpus in ("8", ""):
        with pytest.raises(ConfigError, match=f"'{gpus}' is not a number and a GPU"):
            planned_gpus(gpus, 1, H100, None)
    for gpus in ("0", "1000000", "1000000xH200"):
        with pytest.raises(ConfigError, match="is not a number of GPUs from 1 to 999,999"):
            planned_gpus(gpus, 1, H100, measurement())


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("", "format", 2, 'its "format" is not 1'),
        ("planned", "optimizer", 1e-12, "measured.optimizer is 9.0e+11 times planned.optimizer"),
        ("measured", "link", math.nan, "measured.link is nan times planned.link"),
        ("card", "price", 1, "Card.__new__() got an unexpected keyword argument 'price'"),
    ],
)
def test_a_damaged_file_is_refused_with_the_name_of_the_field(
    section: str, field: str, value: Any, message: str, tmp_path: Path
) -> None:
    file, tree = tmp_path / "measured.json", json.loads(measurement().to_json())
    (tree[section] if section else tree)[field] = value
    file.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as error:
        read_measurement(file)
    wrote = "it is no file that this version's `titanlite tune --measure` wrote"
    assert str(error.value) == f"command line, --measured: {file}: {message}; {wrote}"


def test_a_missing_file_or_field_is_refused(tmp_path: Path) -> None:
    file, tree = tmp_path / "measured.json", json.loads(measurement().to_json())
    with pytest.raises(ConfigError, match=r"--measured: .*measured.json cannot be read: No such file or dir"):
        read_measurement(file)
    for section in ("card", "planned", "measured", "versions"):
        file.write_text(json.dumps({key: value for key, value in tree.items() if key != section}))
        with pytest.raises(ConfigError, match=f"{section}.*it is no file that this version's"):
            read_measurement(file)


@pytest.mark.parametrize(
    ("device", "card"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H200 NVL", None),  # slower than an H200
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Tesla V100-SXM2-16GB", None),
    ],
)
def test_devices_are_known_by_the_names_of_their_drivers(device: str, card: str | None) -> None:
    known = known_card(device)
    assert (known.name if known else None) == card


def test_the_time_of_a_function_leaves_out_the_first_calls() -> None:
    calls = list[int]()
    seconds_of(lambda: calls.append(1), torch.ones(1).sum, num=4)
    assert len(calls) == 7
