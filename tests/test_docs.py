"""Pins that the pages of docs/ quote the files that they name as they are, and show every example."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from benchmarks import fault_picture, olmoe_run, optimizer_tables, readme_log, trained_run
from tests.support import metric_tables, planning_page, stages_page
from tests.support.quoted_code import PAGES, QUOTE, ROOT, refreshed
from titanlite.config.schema import FIELD_TYPES
from titanlite.job import load_job

RESULTS, TPS = ROOT / "benchmarks/results", "throughput/tokens_per_second_per_device"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_quoted_code_is_that_of_its_file(page) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == refreshed(text), "run: python -m tests.support.quoted_code"
    assert refreshed(text.replace("def ", "def other_", 1)) == text  # control: another text is noticed


def test_every_example_is_on_the_page_on_extending() -> None:
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    quoted = {match[2] for match in QUOTE.finditer(page)}
    examples = {path for path in (ROOT / "tests/examples").glob("*.py") if not path.name.startswith("test_")}
    assert quoted == {path.relative_to(ROOT).as_posix() for path in examples}
    for name in re.findall(r"\| `(titanlite\.[\w.]+)` \|", page):
        module, _, attribute = name.rpartition(".")
        kind = getattr(__import__(module, fromlist=[attribute]), attribute)
        for method in kind.__abstractmethods__:
            assert re.search(rf"^\| `(\w+\.)?{method}\([\w, ]*\)` \| required: ", page, re.MULTILINE), method


def test_the_readme_is_short_and_quotes_the_recorded_log() -> None:
    readme = readme_log.README.read_text(encoding="utf-8")
    assert len(readme.split()) <= 1000
    quoted = readme_log.BLOCK.search(readme)
    assert quoted is not None
    assert quoted[0] == readme_log.excerpt(readme_log.LOG.read_text(encoding="utf-8"))


def test_the_page_on_extending_lists_the_types_of_fields() -> None:
    words = (ROOT / "docs/extending.md").read_text(encoding="utf-8").replace("`", "").split()
    assert f"Supported field types: {FIELD_TYPES}." in " ".join(words)


def test_the_tables_of_metrics_are_those_of_the_docstrings() -> None:
    page = metric_tables.PAGE.read_text(encoding="utf-8")
    assert page == metric_tables.refreshed(page), "run: python -m tests.support.metric_tables"
    assert metric_tables.refreshed(page.replace("| mean loss", "| a loss")) == page  # control
    shown = [name for match in metric_tables.TABLE.finditer(page) for name in match[2].split(", ")]
    assert sorted(shown) == sorted(metric_tables.all_entries()), "each class has one place on the page"
    assert metric_tables.is_described("loss/source/code")
    assert not metric_tables.is_described("loss/sources")


def keys_of(schema: dict[str, Any]) -> set[str]:
    """Names of the keys of a section, whichever component is chosen."""
    choices = schema.get("choices", {"": schema}).values()
    names = {name for choice in choices for name in choice.get("keys", {})}
    return names | ({"name", "backend"} if "choices" in schema else set())


def unknown_keys(page: str) -> list[str]:
    """Keys in code spans of a page that titanlite does not have."""
    job = json.loads((ROOT / "titanlite/config/schema.json").read_text(encoding="utf-8"))["job"]["keys"]
    named = re.findall(r"`\[*([a-z_]+)\.(?!toml`)([a-z_]+)(?: = [^`]*|\]\])?`", page)
    return [f"{section}.{key}" for section, key in named if key not in keys_of(job.get(section, {}))]


def test_the_keys_for_those_who_come_from_other_trainers_exist() -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").partition("## From torchtitan")[0]
    assert unknown_keys(page) == []
    assert page.count("`checkpoint.interval`") == 2
    wrong = page.replace("`checkpoint.interval`", "`checkpoint.frequency`")
    assert unknown_keys(wrong) == ["checkpoint.frequency"] * 2  # control


def test_the_lines_that_convert_nanochats_tokenizer_keep_its_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = {bytes([i]): i for i in range(256)} | {b"th": 256, b"the": 257}
    pattern = r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s+"""
    specials = {"<|bos|>": 258, "<|user_start|>": 259, "<|user_end|>": 260}
    theirs = tiktoken.Encoding("theirs", pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    folder = tmp_path / ".cache/nanochat/tokenizer"
    folder.mkdir(parents=True)
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(theirs))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    section = capsys.readouterr().out
    model = '[model]\nname = "llama3"\nflavor = "debug"\n[[data.sources]]\nname = "python_stdlib"\n'
    (tmp_path / "job.toml").write_text(section + model)
    ours = load_job("job.toml").tokenizer.build()
    text = "the 1234 cat's THE\n\n  theme"
    assert ours.encode(text) == theirs.encode_ordinary(text)
    assert (ours.vocab_size, ours.bos, ours.eos) == (theirs.n_vocab, 258, 259)


OPTIMIZERS = ROOT / "docs/optimizers.md"


@pytest.mark.parametrize("title", ["rates of embedding and head", "rules", "schedules"])
def test_the_examples_of_parameter_groups_make_the_groups_on_the_page(tmp_path: Path, title: str) -> None:
    page = OPTIMIZERS.read_text(encoding="utf-8")
    example, listed = re.findall(rf'```\w+ title="{title}"\n(.*?)```', page, re.DOTALL)
    model = '[model]\nname = "llama3"\nflavor = "debug"\noverrides.tie_word_embeddings = false\n'
    source = '[[data.sources]]\nname = "python_stdlib"\n'
    (tmp_path / "job.toml").write_text(f"{example}\n{model}\n{source}")
    job = load_job(tmp_path / "job.toml")
    net = job.model.build_on_meta()
    job.optimizer.check(net)
    assert "\n".join(job.optimizer.describe(net)) + "\n" == listed


def test_the_tables_on_optimizers_are_those_of_the_results() -> None:
    page = OPTIMIZERS.read_text(encoding="utf-8")
    assert page == optimizer_tables.refreshed(page), "run: python benchmarks/optimizer_tables.py"
    (number,) = re.findall(r"^\| 8B \| (\S+)", page, re.MULTILINE)
    assert optimizer_tables.refreshed(page.replace(number, "1.0e+00")) == page  # control


def test_the_page_on_stages_quotes_the_program() -> None:
    """The example runs, and its output is that on the page."""
    page = stages_page.PAGE.read_text(encoding="utf-8")
    assert stages_page.refreshed(page) == page, "run: python -m tests.support.stages_page"
    assert len(stages_page.BLOCK.findall(page)) == 3
    other = page.replace('"code.txt" = 2 }', '"code.txt" = 1 }')
    assert stages_page.refreshed(other) != other  # control


@pytest.mark.full
def test_the_planning_page_quotes_what_titanlite_prints() -> None:
    page = planning_page.PAGE.read_text(encoding="utf-8")
    assert planning_page.refreshed(page) == page, "run: python -m tests.support.planning_page"
    assert len(planning_page.BLOCK.findall(page)) == len(planning_page.COMMANDS)
    other = page.replace("does not fit: ", "fits: ")
    assert planning_page.refreshed(other) != other  # control


def test_the_run_of_olmoe_is_described_with_its_numbers() -> None:
    result = json.loads(olmoe_run.RESULT.read_text())
    page = olmoe_run.PAGE.read_text(encoding="utf-8")
    assert page == olmoe_run.refreshed(page, result), "run: python benchmarks/olmoe_run.py"
    result["reports"][-1]["eval/loss"] += 1
    assert page != olmoe_run.refreshed(page, result)  # control


def test_the_trained_run_is_described_with_its_numbers() -> None:
    result = json.loads(trained_run.RESULT.read_text()) if trained_run.RESULT.exists() else None
    page = trained_run.PAGE.read_text(encoding="utf-8")
    assert page == trained_run.refreshed(page, result), "run: python benchmarks/trained_run.py"
    config = trained_run.CONFIG.read_text(encoding="utf-8")
    assert result is None or config == trained_run.with_header(config, result)


def test_the_campaign_of_faults_is_described_with_its_numbers() -> None:
    result = json.loads((RESULTS / "fault_campaign_2_cores.json").read_text())
    (campaign,) = result["campaigns"]
    page = (ROOT / "docs/fault-tolerance.md").read_text(encoding="utf-8")
    assert fault_picture.table(campaign) in page
    assert f"**{campaign['goodput']:.1%}**" in page
    assert f" {campaign['goodput_of_report']:.1%} " in page
    assert campaign["equal"] == dict.fromkeys(("weights", "state", "losses"), True)
    assert (ROOT / "assets/fault_campaign.svg").read_text() == fault_picture.picture(campaign)
    campaign["faults"][0]["repeated"] += 1
    assert fault_picture.table(campaign) not in page  # control


def test_the_pages_on_same_bits_have_the_recorded_digests_and_costs() -> None:
    result = json.loads((RESULTS / "same_bits_digests_1b_h200x4.json").read_text())
    lines = [[ngpu, *(d[:32] for d in by_step.values())] for ngpu, by_step in result["digests"].items()]
    assert result["equal"]
    assert len(lines) == 3
    for page in ("README.md", "docs/index.md"):
        quoted = (ROOT / page).read_text(encoding="utf-8").split("GPUs  weights")[1]
        assert [line.split() for line in quoted.split("```")[0].splitlines()[1:]] == lines
    page = (ROOT / "docs/same-bits.md").read_text(encoding="utf-8")
    for model, name in (("1b", "1_micro_batch"), ("1b", "8_micro_batches"), ("8b", "1_micro_batch")):
        medians = json.loads((RESULTS / f"same_bits_{model}_h200x2_{name}.json").read_text())["medians"]
        variants = ("default", "deterministic", "same_bits")
        speeds = [f"{round(medians[v][TPS], -1):,.0f}" if v in medians else "unmeasured" for v in variants]
        memory = [f"{medians[v]['memory/peak_reserved_gib']:.2f} GiB" for v in variants[1:]]
        ratio = medians["same_bits"][TPS] / medians["deterministic"][TPS]
        row = [f"{model.upper()}, {name[0]}", *speeds, f"{ratio:.3f}", *memory]
        assert f"| {' | '.join(row)} |" in page


def test_the_readme_has_the_measured_time_of_the_tests() -> None:
    results = json.loads((RESULTS / "test_suite_2_cores.json").read_text())["pytest -n 2"]
    minutes, seconds = divmod(round(results["wall_s"]), 60)
    tests = (
        f"the {round(results['passed'], -2):,} tests of the default tier in {minutes} min {seconds} s on two"
    )
    assert tests in (ROOT / "README.md").read_text()
