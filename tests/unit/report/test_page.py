"""The page: complete, escaped, deterministic; what cannot be read is named on it, the rest is shown."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.curves import falling, noise_like, write_run
from titanlite.cli import run
from titanlite.config.component import ConfigError
from titanlite.metrics.sinks.events import EventLog
from titanlite.metrics.sinks.jsonl import JsonLines
from titanlite.metrics.sinks.samples import Samples
from titanlite.report.charts import MAX_POINTS, downsample, short
from titanlite.report.compare import comparison
from titanlite.report.facts import all_verdicts, facts
from titanlite.report.figures import NUM_AVERAGED, main_charts, noise_scale, other_charts
from titanlite.report.page import report
from titanlite.report.recorded_run import names_of, read_run
from titanlite.report.timeline import timeline

JOB = """# llama3 debug: 1,836,160 parameters

[training]
steps = 400
max_norm = 1.0
seq_len = 128
global_batch_size = 16

[optimizer]
name = "adamw"
lr = 4e-3
"""
TRAINED_AGAIN = {"progress/total_tokens": 1, "time/step_s": 2.0, "time/data_wait_pct": 0.0}
CUT_SHORT = "metrics.jsonl: the last record was cut short, as by a kill, and is left out"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced, and collects text, attributes and elements."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, text: str) -> None:
        self.texts.append(text)


def metrics(num: int = 400, seed: int = 0) -> dict[str, Any]:
    loss = falling(num) + 0.02 * noise_like("normal", num, seed)
    return {
        "train/loss": loss,
        "train/learning_rate": np.full(num, 4e-3),
        "train/grad_norm": np.full(num, 0.5) + 0.1 * noise_like("normal", num, seed + 1),
        "train/skipped_steps": np.zeros(num),
        "throughput/tokens_per_second": np.full(num, 1000.0),
        "throughput/tokens_per_second_per_device": np.full(num, 1000.0),
        "throughput/tflops": np.full(num, 0.01),
        "time/step_s": np.full(num, 1.5),
        "time/data_wait_pct": np.full(num, 10.0),
        "time/to_first_step_s": [20.0],
        "guard/other": np.arange(num, dtype=float),
        "data/batch_sha": ["ab"] * num,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "first", metrics(), job=JOB)


def page_of(*folders: Path) -> str:
    return report([read_run(path, name) for path, name in zip(folders, names_of(list(folders)))])


def data_of(page: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page)
    return json.loads(text)


def test_the_page_is_one_file_with_equal_bytes(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", metrics(seed=9), job=JOB.replace("4e-3", "8e-3"))
    page = page_of(folder, other)
    assert page == page_of(folder, other)
    parsed = Page(page)
    assert not {"link", "img", "iframe", "object"} & set(parsed.tags)
    assert not [value for key, value in parsed.attributes if key in ("src", "href", "srcset")]
    assert "default-src 'none'" in page
    assert "url(" not in page.replace("`url(#${id})`", "")
    titles = [chart["title"] for chart in data_of(page)["charts"]]
    assert titles[:4] == [
        "Training loss",
        "Training loss minus that of first",
        "Training loss by time",
        "Training loss by compute",
    ]
    assert "guard/other" in titles  # a metric without a place of its own
    text = " ".join(parsed.texts)
    for part in ("optimizer.lr", "0.004", "0.008", "1,836,160 parameters", "tie", "steps trained again"):
        assert (part in text) == (part != "steps trained again")


def test_markup_in_samples_names_and_files_stays_text(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m&amp;"
    values = {**metrics(), f"train/{evil}": np.arange(400.0)}
    folder = write_run(tmp_path / "<b>run&", values, job=JOB.replace("adamw", "<i>adamw"))
    (folder / "samples.txt").write_text(f"--- step 5\n{evil}\n--- step 400\nsecond {evil}\n")
    page = page_of(folder, folder)
    parsed = Page(page)
    assert parsed.tags.count("script") == 2
    assert not {"img", "b", "i"} & set(parsed.tags)
    assert "\x1b" not in page
    assert any("second </script><script>alert(1)" in text for text in parsed.texts)
    assert "<script>alert" not in page


def test_the_script_is_the_one_that_the_policy_allows(folder: Path) -> None:
    import base64
    import hashlib

    page = page_of(folder)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    expected = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{expected}'" in page


DOM = """
class Node {
  constructor() { Object.assign(this, {children: [], attributes: {}, style: {}, clientWidth: 640}); }
  setAttribute(key, value) { this.attributes[key] = value; }
  appendChild(node) { this.children.push(node); }
  append(...nodes) { this.children.push(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  addEventListener() {}
  querySelector(name) { return this[name] ??= new Node(name); }
}
const data = new Node("script");
data.textContent = require("fs").readFileSync(0, "utf8");
const figures = JSON.parse(data.textContent).charts.map((_, i) => new Node("figure"));
figures.forEach((figure, i) => { figure.dataset = {chart: String(i)}; });
const document = {
  getElementById: () => data, querySelectorAll: () => figures,
  createElement: (name) => new Node(name), createElementNS: (_, name) => new Node(name),
};
class ResizeObserver { constructor(draw) { this.draw = draw; } observe() { this.draw(); } }
"""
PRINT = """
const all = (node) => [node, ...node.children.flatMap((child) => child.children ? all(child) : [])];
console.log(JSON.stringify(figures.map((figure) => all(figure.svg).map((node) => node.attributes))));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_draws_every_line_and_mark(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(), job=JOB)
    kinds = ("resumed", "saved", "skipped", "accepted", "spike", "rewound")
    events = [json.dumps({"step": 50 + i, "event": kind}) + "\n" for i, kind in enumerate(kinds)]
    (folder / "events.jsonl").write_text("".join(events))
    content = data_of(page_of(folder))
    script = (Path(__file__).parents[3] / "titanlite/report/page.js").read_text()
    ran = subprocess.run(
        ["node", "-e", DOM + script + PRINT], input=json.dumps(content), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    for chart, drawn in zip(content["charts"], json.loads(ran.stdout), strict=True):
        paths = [node for node in drawn if "d" in node]
        assert not [node["d"] for node in paths if "NaN" in node["d"]]
        styles = [line["style"] for line in chart["lines"]]
        assert [node["class"] for node in paths if node["class"].startswith("line")] == [
            f"line {style} run0" for style in styles
        ]
        marks = {node["class"].split()[1]: node["d"] for node in paths if node["class"].startswith("mark")}
        assert marks.keys() == {mark["kind"] for mark in chart["marks"]}
        if chart["title"] == "Throughput":
            assert marks.keys() == set(kinds)
            assert len({re.sub(r"^M[\d.]+ ", "", d) for d in marks.values()}) == len(kinds) - 1  # 2 are lines


def test_down_sampling_keeps_minima_and_maxima() -> None:
    y = falling(100_000)
    y[[31_234, 77_777]] = 9.5, -3.0
    x, kept = downsample(np.arange(100_000.0), y)
    assert len(x) <= MAX_POINTS
    assert np.all(np.diff(x) > 0)
    assert x[0] == 0
    assert x[-1] == 99_999
    assert kept[x == 31_234] == 9.5
    assert kept[x == 77_777] == -3.0
    x, kept = downsample(np.arange(5.0), np.array([1, np.nan, 3, np.inf, 5]))
    assert kept.tolist() == [1, 3, 5]


def test_a_planted_spike_is_a_point_of_the_path(tmp_path: Path) -> None:
    values = metrics(5000)
    values["train/loss"][3333] += 5
    page = page_of(write_run(tmp_path / "run", values, job=JOB))
    line = data_of(page)["charts"][0]["lines"][0]
    assert len(line["x"]) <= MAX_POINTS
    assert max(line["y"][200:]) == pytest.approx(values["train/loss"][3333], rel=1e-5)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1250, "1.25K"), (2e9, "2B"), (0.25, "0.25"), (-31, "-31"), (2e-5, "2e-5"), (1e18, "1e18")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short(value) == text


def test_the_time_of_a_killed_run_has_its_causes(tmp_path: Path) -> None:
    values = metrics(200)
    values["time/to_first_step_s"] = [20.0] + [None] * 99 + [30.0]
    values["time/validation_s"] = [None] * 50 + [12.0]
    values["checkpoint/stall_s"] = [None] * 101 + [4.0]
    folder = write_run(tmp_path / "run", values, job=JOB)
    lost = [{"step": step, **TRAINED_AGAIN} for step in range(101, 131)]
    (folder / "metrics.superseded.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lost))
    page = page_of(folder)
    cells = dict(re.findall(r"</span>([a-z ]+)</td><td>([^<]+)</td>", page))
    assert cells["steps trained again"] == "60.0 s"
    assert (cells["start"], cells["restarts"]) == ("18.5 s", "28.5 s")  # without their first steps
    assert cells["validation"] == "12.0 s"
    assert cells["saves"] == "4.0 s"
    assert cells["data wait"] == "30.0 s"
    minutes = data_of(page)["charts"][1]["lines"][0]
    assert minutes["x"][-1] == pytest.approx((20 + 30 + 198 * 1.5 + 12 + 4 + 60) / 60)


STAGES = """
[[stages]]
name = "short"
until = "320 sequences"

[[stages]]
until = "1000 sequences"

[[stages]]
name = "decay"
until = "9000 sequences"

[[stages]]
until = "end"
"""


def test_stages_are_marked_where_they_begin(tmp_path: Path) -> None:
    values = metrics(100) | {"progress/sequences": [16 * (i + 1) for i in range(100)]}
    folder = write_run(tmp_path / "run", values, job=JOB + STAGES)
    run = read_run(folder, "run")
    said = (
        "1 (short) from sequence 0, 2 from sequence 320, 3 (decay) from sequence 1,000, 4 from sequence 9,000"
    )
    assert facts(run)["stages"] == said
    for chart in main_charts([run]):
        marks = [mark for mark in chart.marks if mark.kind == "stage"]
        if chart.x_label == "tokens":
            tokens = run.series("train/loss").tokens
            assert [mark.x for mark in marks] == [tokens[19], tokens[61]]  # after steps 20 and 62
            assert marks[1].text == "run: stage 3 (decay) begins with sequence 1,000"
            assert "solid: a stage begins" in chart.note
        else:
            assert marks == []
    broken = JOB + STAGES.replace("320 sequences", "soon")
    other = read_run(write_run(tmp_path / "other", values, job=broken), "run")
    assert other.stages == []
    assert facts(other)["stages"] == ""
    without = read_run(write_run(tmp_path / "without", values, job=JOB), "run")
    assert without.stages == []
    assert "solid" not in "".join(chart.note for chart in main_charts([without]))  # control


def test_the_validation_loss_is_drawn_by_tokens_and_by_time(tmp_path: Path) -> None:
    validated = [i % 20 == 19 for i in range(100)]
    values = {
        "train/loss": falling(100),
        "time/step_s": np.full(100, 36.0),
        "eval/loss": [2.5 - i / 100 if due else None for i, due in enumerate(validated)],
        "time/validation_s": [72.0 if due else None for due in validated],
    }
    charts = {chart.title: chart for chart in main_charts([read_run(write_run(tmp_path, values), "run")])}
    (by_tokens,), (by_time,) = charts["Validation loss"].lines, charts["Validation loss by time"].lines
    assert by_tokens.y.tolist() == by_time.y.tolist() == pytest.approx([2.31, 2.11, 1.91, 1.71, 1.51])
    assert by_time.x * 60 == pytest.approx([(20 * 36 + 72) * i for i in range(1, 6)])
    assert charts["Validation loss by time"].x_label == "minutes"
    values["time/step_s"] = np.full(100, 360.0)
    charts = {chart.title: chart for chart in main_charts([read_run(write_run(tmp_path, values), "run")])}
    assert charts["Validation loss by time"].x_label == charts["Training loss by time"].x_label == "hours"


def test_the_validation_losses_of_sources_are_drawn_and_listed(tmp_path: Path) -> None:
    values = {"train/loss": falling(40), "eval/loss": falling(40), "eval/sequences": [10] * 40}
    for name, offset in (("web.txt", 1.0), ("code.txt", 2.0)):
        values[f"eval/{name}/loss"] = falling(40) + offset
        values[f"eval/{name}/perplexity"] = np.exp(falling(40) + offset)
        values[f"eval/{name}/bits_per_byte"] = falling(40) / 3 + offset
    run = read_run(write_run(tmp_path, values), "run")
    (group,) = (group for group in other_charts([run]) if group.name == "eval")
    drawn = [f"eval/{name}/{key}" for name in ("code.txt", "web.txt") for key in ("bits_per_byte", "loss")]
    assert [chart.title for chart in group.charts] == drawn
    last = falling(40)[-1]
    expected = f"code.txt {last + 2:.4f}, web.txt {last + 1:.4f}"
    assert facts(run)["validation loss by source"] == expected


def test_the_accuracies_in_tasks_are_drawn_and_listed(tmp_path: Path) -> None:
    values = {"train/loss": falling(40)}
    for name, last in (("b", 0.5), ("a", 0.25)):
        values[f"tasks/{name}/acc"] = np.linspace(0, last, 40)
    values["tasks/b/acc_stderr"] = [0.125] * 40
    values["tasks/core/centered"] = np.linspace(0, 0.125, 40)
    run = read_run(write_run(tmp_path, values), "run")
    (group,) = (group for group in other_charts([run]) if group.name == "tasks")
    assert [chart.title for chart in group.charts] == ["tasks/a/acc", "tasks/b/acc", "tasks/core/centered"]
    listed = sorted(facts(run)["accuracy in tasks"].split(", "))
    assert listed == ["a 25.0%", "b 50.0% \u00b1 12.5%", "core 0.1250 centered"]


def test_of_two_rewinds_only_their_own_steps_count_as_trained_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(100), every=10, job=JOB)
    again = [*range(210, 241, 10), *range(810, 831, 10), *range(820, 841, 10)]  # 40, 30 and 30 steps
    lost = [{"step": step, **TRAINED_AGAIN} for step in again]
    (folder / "metrics.superseded.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lost))
    spent = timeline(read_run(folder, "run"))
    assert spent.seconds["steps trained again"] == 2.0 * (40 + 30 + 30)
    hours = np.diff(spent.hours)
    assert hours[[19, 79, 80]] * 3600 == pytest.approx([15 + 80, 15 + 60, 15 + 60])


def test_files_that_the_sinks_write_are_read(tmp_path: Path) -> None:
    lines, samples = JsonLines(tmp_path / "metrics.jsonl", 0), Samples(tmp_path / "samples.txt", 0)
    for step in (1, 2, 3, 4):
        lines.write(step, {"train/loss": math.nan if step == 2 else 3.0, "progress/total_tokens": step})
    samples.sample(2, "one\n\nmore")
    samples.sample(2, "two")
    lines.close()
    samples.close()
    run = read_run(tmp_path, "run")
    loss = run.series("train/loss")
    assert loss.steps.tolist() == [1, 2, 3, 4]
    assert np.isnan(loss.values).tolist() == [False, True, False, False]
    assert run.samples == {2: ["one\n\nmore", "two"]}


def test_saves_are_marked_on_the_chart_of_the_throughput(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"throughput/tokens_per_second": [1.0] * 5}, every=10)
    saved = [{"step": step, "event": "saved"} for step in (20, 40)]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in saved))
    (chart,) = main_charts([read_run(folder, "run")])
    assert [(mark.kind, mark.text) for mark in chart.marks] == [
        ("saved", "run: saved step 20"),
        ("saved", "run: saved step 40"),
    ]


def test_events_are_marked_and_listed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(), job=JOB)
    log = EventLog(folder / "events.jsonl", 0)
    log.event(50, "skipped", {"loss": math.nan, "text": "step 50 is skipped: loss nan"})
    log.event(120, "skipped", {})
    log.event(100, "skipped", {"reason": "outlier", "loss": 12.0})
    log.event(125, "spike", {"loss": 9.25})
    log.event(100, "rewound", {"reason": "<b>spike"})
    log.event(200, "spike", {})
    log.close()
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"step": 1, "event": 7}\n{"step": "x"}\n{"eve')
    page = page_of(folder)
    marks = data_of(page)["charts"][0]["marks"]
    assert [(mark["kind"], mark["text"], mark["x"]) for mark in marks] == [
        ("skipped", "run: step 50 is skipped: loss nan", 5_000_000),
        ("skipped", "run: skipped, step 100: reason outlier; loss 12.0", 10_000_000),
        ("rewound", "run: rewound, step 100: reason <b>spike", 10_000_000),
        ("spike", "run: spike, step 200", 20_000_000),
    ]
    marked = [chart["title"] for chart in data_of(page)["charts"] if chart["marks"]]
    assert marked == ["Training loss", "Throughput"]
    table = page[page.index("<h2>Events</h2>") :]
    rows = re.findall(
        r"<tr><th>([\d,]+)</th><td>(\w+)</td><td>([^<]*)</td><td>[^<]+</td><td>(\w*)</td>", table
    )
    assert rows == [
        ("200", "spike", "", ""),
        ("100", "rewound", "reason &lt;b&gt;spike", ""),
        ("125", "spike", "loss 9.25", "yes"),
        ("100", "skipped", "reason outlier; loss 12.0", ""),
        ("120", "skipped", "", "yes"),
        ("50", "skipped", "step 50 is skipped: loss nan", ""),
    ]
    assert "the run rewound once" in page
    assert "events.jsonl: damaged records are left out, in 1 line: 9" in page
    assert "events.jsonl: the last record was cut short, as by a kill, and is left out" in page


def test_a_resume_that_was_trained_again_is_named_as_such(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"train/loss": falling(30)}, every=10, job=JOB)
    log = EventLog(folder / "events.jsonl", 0)
    for step in (50, 175, 50):
        log.event(step, "resumed", {})
    log.close()
    assert facts(read_run(folder, "run"))["resumed"] == "after step 50, after step 175 (trained again later)"
    EventLog(folder / "events.jsonl", 0).close()  # a restart
    assert facts(read_run(folder, "run"))["resumed"] == ""


@pytest.mark.parametrize(
    ("table", "changes"),
    [
        ("", False),
        ("[[stages]]\nlr_factor = 0.5", False),
        ("[[stages]]\nseq_len = 64", True),
        ("[[stages]]\n[[stages]]\nglobal_batch_size = 32", True),
        ("[[training.batch_ramp]]\nglobal_batch_size = 8", True),
        ("[stages]\nseq_len = 64", False),
    ],
)
def test_a_batch_that_changes_during_the_run(tmp_path: Path, table: str, changes: bool) -> None:
    batch = facts(read_run(write_run(tmp_path / "run", metrics(3), job=f"{JOB}\n{table}\n"), "run"))["batch"]
    assert batch == "16 sequences of 128 tokens" + ("; changes during the run" if changes else "")


def test_what_missing_files_hold_is_not_invented(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(30), job=JOB)
    (folder / "env.json").write_text('{"layout": "dp_shard 4 x tp 2"}')
    assert facts(read_run(folder, "run"))["layout"] == "dp_shard 4 x tp 2"
    for name in ("env.json", "job.toml"):
        (folder / name).unlink()
        assert facts(read_run(folder, "run"))["layout"] == ""
    assert read_run(folder, "run").problems == [
        "there is no job.toml: settings are not known",
        "there is no events.jsonl: spikes, rewinds and the like are not known",
        "there is no env.json: hardware and versions are not known",
        "there is no sources.json: epochs are not known",
    ]


def test_counts_of_steps_and_losses_say_what_they_count(tmp_path: Path) -> None:
    loss = [3.0] * 32 + [None]
    run = read_run(write_run(tmp_path / "run", {"train/loss": loss}, job="[training]\nsteps = 8\n"), "run")
    assert facts(run)["logged"] == "33 times, every step"
    said = "the run was logged 33 times, 32 times with a finite loss in 33 steps, which are too few."
    assert said in report([run])
    assert facts(run)["steps"] == "33; training.steps is 8 now"
    (tmp_path / "run/job.toml").write_text("[training]\nsteps = 33\n")
    assert facts(read_run(tmp_path / "run", "run"))["steps"] == "33 of 33"


def test_gpu_hours_count_the_ranks_of_each_start(tmp_path: Path) -> None:
    values = metrics(100) | {"time/step_s": np.full(100, 36.0), "time/to_first_step_s": [36.0]}
    values["throughput/tokens_per_second"] = np.repeat([8000.0, 2000.0], 50)
    folder = write_run(tmp_path / "run", values, job=JOB)
    assert "GPU hours" not in page_of(folder)  # nothing says that the run was on a GPU
    values["memory/peak_reserved_gib"] = np.full(100, 9.0)
    run = read_run(write_run(folder, values, job=JOB), "run")
    assert facts(run)["cost"] == "5 GPU hours"  # half an hour on 8, half an hour on 2
    assert facts(run, 2.5)["cost"] == "5 GPU hours, 12.50 at 2.50 per GPU hour"


def test_other_metrics_are_grouped_by_the_first_word(tmp_path: Path) -> None:
    changing = np.arange(400.0)
    values = metrics() | {f"norms/{i:02}": changing for i in range(45)}
    values |= {"loss/source/a/b": changing, "loss/position_0": changing}
    groups = {group.name: group for group in other_charts([read_run(write_run(tmp_path, values), "run")])}
    assert groups.keys() == {"guard", "loss", "norms"}
    assert [chart.title for chart in groups["loss"].charts] == ["loss/position_0", "loss/source/a/b"]
    assert (len(groups["norms"].charts), groups["norms"].too_many[0]) == (40, "norms/40")
    page = page_of(tmp_path)
    assert '<summary>norms <span class="faint">45 metrics</span></summary>' in page
    numbers = [int(number) for number in re.findall(r'data-chart="(\d+)"', page)]
    assert numbers == list(range(len(data_of(page)["charts"])))


def test_the_noise_scale_is_a_ratio_of_means(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    signal, noises = 1 + rng.normal(size=400), 4 + rng.normal(size=400)  # a mean of ratios is far from 4
    single = [256 * a / b if min(a, b) > 0 else None for a, b in zip(noises.tolist(), signal.tolist())]
    keys = ("signal", "noise", "sequences")
    metrics = {f"train/noise_scale_{key}": x for key, x in zip(keys, (signal, noises, single))}
    run = read_run(write_run(tmp_path / "run", metrics), "run")
    scale = noise_scale(run)
    assert len(scale) == 400 - NUM_AVERAGED + 1
    assert float(np.median(scale.values)) == pytest.approx(4 * 256, rel=0.1)
    assert [chart.title for chart in main_charts([run])] == ["Gradient noise scale"]
    assert "train/noise_scale_sequences" not in [c.title for g in other_charts([run]) for c in g.charts]
    without = read_run(write_run(tmp_path / "other", {"train/loss": [3.0, 2.0]}), "other")
    assert len(noise_scale(without)) == 0


def test_a_report_needs_no_torch() -> None:
    code = "import sys, titanlite.report.page, titanlite.report.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ---- bad input


def test_a_pipe_in_place_of_metrics_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert run(["report", str(tmp_path)]) == 2
    assert "it is a named pipe, not a file" in capsys.readouterr().err


@pytest.mark.full
def test_hostile_files_beside_the_metrics(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"train/loss": [3.0, 2.0]})
    (folder / "job.toml").write_text(".".join("a" * 3000) + " = 1\n[training]\nsteps = []\nseq_len = {}\n")
    (folder / "env.json").write_text('{"world_size": "<b>", "device": [[]], "torch": {}}')
    os.mkfifo(folder / "metrics.superseded.jsonl")
    os.mkfifo(folder / "events.jsonl")
    (folder / "sources.json").write_text('{"sources": [{"source": "<b>", "share": 1.0, "sequences": 0}]}')
    manifest = folder / "checkpoint/step-1/manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"format": 4, "step": 1, "saved_at": "<script>"}')
    page = page_of(folder, folder)
    Page(page)
    assert "metrics.superseded.jsonl cannot be read: it is a named pipe" in page
    assert "events.jsonl cannot be read: it is a named pipe" in page
    assert "sources.json cannot be read: &lt;b&gt; has no possible share" in page
    assert "<b>" not in page


def test_holes_torn_lines_and_other_keys_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", metrics(), job=JOB)
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[100:160] = []
    lines[50] = b'{"step": 51, "train/loss": 3.\n'
    lines[51] = b"\0" * 30 + b"\n"
    lines[52] = b"[" * 100_000 + b"\n"
    lines[53] = b'{"step": -4}\n'
    lines[54] = b'{"step": 55, "progress/total_tokens": 5500000, "train/loss": "NaN", "new": {"a": 1}}\n'
    lines[55] = b'{"step": 56, "train/loss": 1e999, "progress/total_tokens": -Infinity}\n'
    lines[56] = b'{"step": 57, "progress/total_tokens": "many"}\n'
    lines += [lines[-1], b'{"step": 401, "tra']
    (folder / "metrics.jsonl").write_bytes(b"".join(lines))
    (folder / "job.toml").write_text("[training\n")
    (folder / "env.json").unlink()
    (folder / "samples.txt").write_bytes(b"\xff\xfe no header")
    (folder / "checkpoint/step-100").mkdir(parents=True)
    page = page_of(folder)
    Page(page)
    for problem in (
        "damaged records are left out, in 6 lines: 51, 52, 53, 54, 56, ...<",
        CUT_SHORT,
        "job.toml cannot be read",
        "there is no env.json",
    ):
        assert problem in page, problem
    assert "the loss of 1 logged step is not finite" in page
    assert len(data_of(page)["charts"][0]["lines"][0]["x"]) > 300


@pytest.mark.parametrize("more", ["", ', "train/loss": "nan"'])
def test_a_run_with_next_to_nothing_has_a_page(tmp_path: Path, more: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "progress/total_tokens": 1{more}}}\n')
    Page(page_of(tmp_path, tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\n", "has no record"),
        (b"{}\n", "has no record: metrics.jsonl: damaged records are left out, in 1 line: 1"),
        (
            b'{"st',
            f"has no record: {CUT_SHORT}",
        ),
    ],
)
def test_a_run_without_a_record_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_run(tmp_path, "run")
    assert str(error.value) == f"{tmp_path / 'metrics.jsonl'} {reason}"


@pytest.mark.parametrize(("num", "every", "advice"), [(40, 10, 2), (120, 10, 6), (20, 9, None)])
def test_a_run_that_was_logged_too_rarely_is_told_how_often_would_do(
    tmp_path: Path, num: int, every: int, advice: int | None
) -> None:
    run = read_run(write_run(tmp_path / "run", {"train/loss": falling(num)}, every=every), "run")
    ((_, _, note),) = all_verdicts([run])
    said = f"; metrics.log_freq = {advice} would have been often enough."
    assert (said if advice else " in 180 steps, which are too few.") in note


def test_the_verb_writes_the_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What could not be read is named on the terminal, too."""
    output = tmp_path / "out.html"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 401, "tr')
    assert run(["report", str(folder), "-o", str(output)]) == 0
    assert output.read_text() == page_of(folder)
    printed = capsys.readouterr()
    assert printed.out == f"{output}\n"
    assert f"titanlite: first: {CUT_SHORT}\n" in printed.err


def test_changes_at_a_resume_are_events_and_facts(tmp_path: Path) -> None:
    """The change of a resume whose steps were trained again counts no more."""
    folder = write_run(tmp_path / "run", metrics(), job=JOB)
    log = EventLog(folder / "events.jsonl", 0)
    for step, change in (
        (384, 'optimizer.lr 0.003 -> 0.005; optimizer.name "adamw" -> "muon"'),
        (300, "training.steps 600 -> 440"),
        (384, "training.max_norm 1.0 -> 2.0; optimizer.lr 0.003 -> 0.004"),
    ):
        log.event(step, "resumed", {"changed": change})
    log.close()
    read = read_run(folder, "run")
    assert facts(read)["optimizer"] == "adamw, peak learning rate 0.003, 0.004 from step 385"
    said = "resumed, step 384: changed training.max_norm 1.0 -> 2.0; optimizer.lr 0.003 -> 0.004"
    text = comparison([read, read])
    assert f"run: resumed, step 300: changed training.steps 600 -> 440\nrun: {said}\n" in text
    assert "0.005" not in text
    table = page_of(folder).partition("<h2>Events</h2>")[2]
    assert "changed training.max_norm 1.0 -&gt; 2.0; optimizer.lr 0.003 -&gt; 0.004" in table


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing"], "missing: there is no such run folder"),
        (["."], "not a run folder with metrics: metrics.jsonl is missing; it has the runs first"),
        ([".."], "not a run folder with metrics: metrics.jsonl is missing"),
        (["first", "-o", "first"], "first is a folder"),
        (["first", "-o", "no/such/out.html"], "no/such: there is no such folder"),
        (["first", "--outptu=x"], "--outptu"),
        (["first", "--price-per-gpu-hour=nan"], "'nan' is not a price such as 2.50"),
    ],
)
def test_bad_arguments_are_one_line(
    folder: Path,
    arguments: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder.parent)
    assert run(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


LOADS = [
    '{"step": 200, "tokens": {"model.layers.0.mlp": [9, 1], "model.layers.1.mlp": [5, 5]}}',
    '{"step": 400, "tokens": {"model.layers.0.mlp": [0, 6, 2, 4], "model.layers.1.mlp": [3, 3, 1, 1]}}',
]


def test_a_run_with_experts_has_charts_of_their_loads(folder: Path, tmp_path: Path) -> None:
    keys = ("moe/max_violation", "moe/dead_experts", "moe/router_entropy")
    mixture = {key: np.linspace(2.0, 1.0, 400) for key in keys}
    experts = write_run(tmp_path / "experts", {**metrics(), **mixture}, job=JOB)
    (experts / "expert_loads.jsonl").write_text("\n".join(LOADS))
    runs = [read_run(folder, "dense"), read_run(experts, "moe")]
    charts = {chart.title: chart for chart in main_charts(runs)}
    (violation,) = charts["Most tokens of an expert, above the mean of its layer"].lines
    assert violation.run == 1
    loads = charts["Loads of experts"]
    assert [(line.run, line.style, line.y.tolist()) for line in loads.lines] == [
        (1, "raw", [2.0, 1.5, 2 / 3, 0.5]),
        (1, "raw", [1.5, 4 / 3, 0.5, 0.0]),
        (1, "smooth", pytest.approx([1.75, 17 / 12, 7 / 12, 0.25])),
    ]
    assert loads.note.endswith("moe: step 400")
    page = page_of(folder, experts)
    titles = [chart["title"] for chart in data_of(page)["charts"]]
    assert {"Loads of experts", "moe/dead_experts", "moe/router_entropy"} <= set(titles)
    assert "moe/max_violation" not in titles, "it has a chart of its own"
    assert "Loads of experts" not in page_of(folder)


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        "",
        ', "tokens": [1]',
        ', "tokens": {}',
        ', "tokens": {"a": [1, 2], "b": [1]}',
        ', "tokens": {"a": [0, 0]}',
        ', "tokens": {"a": [-1, 2]}',
        ', "tokens": {"a": ["x"]}',
        f', "tokens": {{"a": [1{"0" * 400}]}}',
    ],
    ids=range(8),
)
def test_loads_that_cannot_be_read_are_named(folder: Path, line: str) -> None:
    (folder / "expert_loads.jsonl").write_text(f'{{"step": 5{line}}}')
    (problem,) = [text for text in read_run(folder, "run").problems if "expert_loads" in text]
    assert problem.endswith("the loads of step 5 cannot be read")
    assert "Loads of experts" not in page_of(folder)
