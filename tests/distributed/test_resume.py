"""A run that was stopped and resumed equals the run that was not: losses, gradient norms, sequences and final
weights.

On one layout to the bit, over two hops and an epoch's end, with and without loader workers, synchronous and
asynchronous checkpoints; with negative controls that must differ. Across layouts the sequences are equal and
the losses within 1e-5."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.support.jobs import make_job, metrics_of, write_corpus
from tests.support.runs import (
    CP,
    FOUR_MICRO_BATCHES,
    PP,
    TP,
    UNTIED,
    assert_same_run,
    history,
    run_in_hops,
    train_on_rank,
    weights_sha,
)
from tests.support.tiers import full
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.state import TrainState
from titanlite.config.component import ConfigError
from titanlite.job import Job
from titanlite.log import logger
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.base import Optimizer
from titanlite.tools import generate
from titanlite.train import train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The uninterrupted run of 12 steps."""
    return run_in_hops(tmp_path_factory.mktemp("whole"), corpus, [12], name="whole")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """The same with a head of its own, which a pipeline needs."""
    return run_in_hops(tmp_path_factory.mktemp("untied"), corpus, [12], UNTIED, name="untied")


def test_the_run_passes_an_epoch(whole: Job) -> None:
    sequences = whole.data.build(whole.tokenizer.build(), seq_len=whole.training.seq_len, seed=0)
    assert min(sequences.sizes) < 12 * 8 / 4, (
        "the corpus is too large for these tests: no source is passed through"
    )


@pytest.mark.parametrize(
    "overrides",
    [
        full(()),
        ("--data.num_workers=2",),
        full(("--checkpoint.async_mode=disabled",)),
        full((FOUR_MICRO_BATCHES, "--data.num_workers=1")),
    ],
    ids=["plain", "workers", "sync", "micro-batches"],
)
def test_two_hops_equal_one_run(whole: Job, tmp_path: Path, corpus: Path, overrides: tuple[str, ...]) -> None:
    if FOUR_MICRO_BATCHES in overrides:  # another accumulation rounds differently: its own reference
        whole = run_in_hops(tmp_path, corpus, [12], *overrides, name="reference")
    hops = run_in_hops(tmp_path, corpus, [5, 9, 12], *overrides)
    assert history(hops) == history(whole)
    assert weights_sha(hops, 12) == weights_sha(whole, 12)


def test_control_a_lost_loader_position_is_noticed(
    whole: Job, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore = TrainState.restore
    monkeypatch.setattr(
        TrainState, "restore", lambda state, values: restore(state, {**values, "sequences": 0})
    )
    hops = run_in_hops(tmp_path, corpus, [5, 12])
    assert history(hops)[:5] == history(whole)[:5]
    assert all(a != b for a, b in zip(history(hops)[5:], history(whole)[5:]))


@pytest.mark.parametrize("part", ["exp_avg", "step"])
def test_control_lost_optimizer_state_is_noticed(
    whole: Job, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    load = Checkpointer.load

    def forgetful(self: Checkpointer, state: TrainState) -> None:
        load(self, state)
        for moments in state.optimizer.state.values():
            moments[part].zero_()

    monkeypatch.setattr(Checkpointer, "load", forgetful)
    hops = run_in_hops(tmp_path, corpus, [5, 12])
    assert history(hops)[-1] != history(whole)[-1]


def test_resume_does_not_change_the_run_it_came_from(whole: Job) -> None:
    before = history(whole)
    train(whole)  # finished: nothing to train
    assert history(whole) == before


# ---- layouts


@pytest.mark.parametrize("path", [full((2, 4, 1)), full((4, 1, 2)), full((1, 2, 4))], ids=str)
def test_resume_on_another_number_of_ranks(whole: Job, tmp_path: Path, corpus: Path, run_on, path) -> None:
    for steps, world_size in zip((4, 8, 12), path):
        overrides = [f"--training.steps={steps}", "--validation.enable=true", "--validation.freq=4"]
        overrides.append(FOUR_MICRO_BATCHES)
        if world_size == 1:
            train_on_rank(tmp_path, corpus, overrides, "elastic", 1)
        else:
            run_on(world_size, train_on_rank, tmp_path, corpus, overrides, "elastic", world_size)
    assert_same_run(make_job(tmp_path, corpus, *overrides, name="elastic"), whole)


CHAINS = [
    [(2, [PP]), (2, [CP]), (1, [])],
    full([(4, [FOUR_MICRO_BATCHES]), (4, [PP, TP]), (2, [CP]), (1, [])]),
]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_a_chain_of_layouts_equals_one_run(untied: Job, tmp_path: Path, corpus: Path, run_on, chain) -> None:
    """Weights, optimizer state and the data order cross layouts; validation and samples run on each
    layout."""
    extra = [UNTIED, "--validation.enable=true", "--validation.freq=3", "--generation.freq=3"]
    extra += ['--generation.prompts=["ab", "cde"]', "--generation.max_new_tokens=4"]
    for steps, (world_size, layout) in zip((3, 6, 9, 12)[-len(chain) :], chain):
        overrides = [*extra, *layout, f"--training.steps={steps}"]
        if world_size == 1:
            train_on_rank(tmp_path, corpus, overrides, "chain", 1)
        else:
            run_on(world_size, train_on_rank, tmp_path, corpus, overrides, "chain", world_size)
    assert_same_run(make_job(tmp_path, corpus, UNTIED, name="chain"), untied)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, [PP]), full(4, [FOUR_MICRO_BATCHES]), full(2, [TP]), full(2, [CP])],
    ids=str,
)
def test_validation_is_the_same_number_on_any_ranks(
    tmp_path: Path, corpus: Path, run_on, world_size: int, layout: list[str]
) -> None:
    """Of 10 held-out sequences of two sources, which four ranks cannot share evenly."""
    overrides = [UNTIED, "--training.steps=2", "--validation.enable=true"]
    train_on_rank(tmp_path, corpus, overrides, "one", 1)
    run_on(world_size, train_on_rank, tmp_path, corpus, [*overrides, *layout], "several", world_size)
    one, several = (metrics_of(make_job(tmp_path, corpus, name=name))[-1] for name in ("one", "several"))
    assert one["eval/tokens"] == several["eval/tokens"] == 10 * 32
    assert several["eval/loss"] == pytest.approx(one["eval/loss"], abs=1e-6)
    by_source = {f"eval/{name}/{key}" for name in ("a.jsonl", "b.txt") for key in ("loss", "bits_per_byte")}
    compared = by_source | {"eval/bits_per_byte", "eval/sequences"}
    assert {key: several[key] for key in compared} == pytest.approx(
        {key: one[key] for key in compared}, abs=1e-6
    )
    assert one["eval/a.jsonl/loss"] != pytest.approx(one["eval/b.txt/loss"], abs=1e-3)  # control


@pytest.mark.full
def test_generate_reads_any_layout_and_a_copy(tmp_path: Path, corpus: Path, run_on, capsys) -> None:
    overrides = ["--training.steps=2", "--parallelism.data_parallel_replicate_degree=2"]
    run_on(2, train_on_rank, tmp_path, corpus, overrides, "hsdp", 2)
    shutil.copytree(tmp_path / "hsdp/checkpoint/step-2", tmp_path / "a copy")
    texts = []
    for path in (tmp_path / "hsdp", tmp_path / "a copy"):
        assert generate.main([str(path), "--prompt", "ab", "--max-new-tokens", "5"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("ab")


def test_fewer_steps_than_done_changes_nothing(whole: Job, corpus: Path) -> None:
    before = history(whole)
    train(make_job(whole.folder.parent, corpus, "--training.steps=4", name="whole"))
    assert history(whole) == before
    assert {p.name for p in (whole.folder / "checkpoint").iterdir()} == {"step-4", "step-8", "step-12"}


def refused_on_rank(folder: Path, corpus: Path, world_size: int) -> str:
    """The message with which a rank refuses to go on."""
    with pytest.raises(ConfigError) as error:
        train(
            make_job(folder, corpus, "--training.global_batch_size=-1", name="batch", world_size=world_size)
        )
    return str(error.value)


@pytest.mark.full
def test_a_global_batch_that_follows_the_ranks_is_refused(tmp_path: Path, corpus: Path, run_on) -> None:
    train(make_job(tmp_path, corpus, "--training.global_batch_size=-1", "--training.steps=2", name="batch"))
    messages = run_on(2, refused_on_rank, tmp_path, corpus, 2)
    assert "this run takes 4 sequences per step; global_batch_size = -1 would make it 8" in messages[0]
    assert messages[0] == messages[1]


# ---- other data


PACKED = ["--data.packing=best_fit", "--data.mask_documents=true"]


@pytest.mark.full
@pytest.mark.parametrize("layout", [[CP], [TP], []], ids=["cp", "tp", "dp_shard"])
def test_packed_and_masked_sequences_resume_and_cross_layouts(
    whole: Job, tmp_path: Path, corpus: Path, run_on, layout: list[str]
) -> None:
    packed = run_in_hops(tmp_path, corpus, [12], *PACKED, name="packed")
    hops = run_in_hops(tmp_path, corpus, [5, 12], *PACKED, "--data.num_workers=2")
    assert history(hops) == history(packed)
    assert weights_sha(hops, 12) == weights_sha(packed, 12)
    run_on(2, train_on_rank, tmp_path, corpus, [*PACKED, *layout, "--training.steps=12"], "two", 2)
    assert_same_run(make_job(tmp_path, corpus, name="two", world_size=2), packed)
    assert metrics_of(packed)[-1]["train/loss"] < metrics_of(packed)[0]["train/loss"] - 0.5
    assert history(packed)[0] != history(whole)[0]


BPE = Path(__file__).resolve().parents[2] / "assets" / "tokenizer" / "stdlib.tiktoken"
CHANGES = {
    "training.seq_len was 32, is 16": ["--training.seq_len=16"],
    'data.packing was "chunk", is "best_fit"': ["--data.packing=best_fit"],
    "data.mask_documents was false, is true": ["--data.mask_documents=true"],
    "data.holdout_sequences was 10, is 11": ["--data.holdout_sequences=11"],
    "training.seed was 0, is 8": ["--training.seed=8"],
    "text CORPUS/a.jsonl was 75% of the sequences, is 60%": ["--data.sources.1.weight=2"],
    "text CORPUS/b.txt was 25% of the sequences, is 0%": [
        "--data.sources.1.path=['CORPUS/a.jsonl', 'CORPUS/b.txt']"
    ],
    f"the tokenizer was bytes, is tiktoken {BPE}": [
        f"--tokenizer={{name = 'tiktoken', path = '{BPE}'}}",
        "--model.overrides.vocab_size=8192",
    ],
}
ALLOWED = "data.mask_documents was false, is true"  # changes no sequence's number
NUMBERING = ["training.seed", "training.seq_len", "data"]


@pytest.mark.parametrize("said", CHANGES)
def test_other_data_is_refused_in_words(whole: Job, corpus: Path, said: str) -> None:
    """Also if allow_changed lists it: sequences of the epoch would be trained on again, and others not."""
    before = {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")}
    overrides = [override.replace("CORPUS", str(corpus)) for override in CHANGES[said]]
    said_here = said.replace("CORPUS", str(corpus))
    with pytest.raises(ConfigError) as error:
        train(make_job(whole.folder.parent, corpus, *overrides, name="whole"))
    assert f"{whole.folder}/checkpoint holds a run that differs: " in str(error.value)
    assert said_here in str(error.value)
    assert not re.search(r"[0-9a-f]{16}", str(error.value).replace(str(corpus), "")), "a hash says nothing"
    if said != ALLOWED:
        allow = f"--checkpoint.allow_changed={NUMBERING}"
        with pytest.raises(ConfigError) as error:
            train(make_job(whole.folder.parent, corpus, *overrides, allow, name="whole"))
        assert said_here in str(error.value)
        assert ": after 96 sequences this run would train on some of them again" in str(error.value)
        weights = f", with --checkpoint.initial_load_path={whole.folder}/checkpoint"
        assert (weights in str(error.value)) == ("tokenizer" not in said), "its weights would not fit"
        later = "; to change the sources from here on, use [[stages]], the first with the sources' weights"
        assert (later in str(error.value)) == said.startswith("text"), "only the sources may change later"
        assert error.value.key == "checkpoint.allow_changed"
    assert {p: p.stat().st_mtime_ns for p in whole.folder.rglob("*")} == before


def test_control_a_change_that_renumbers_nothing_may_be_allowed(
    whole: Job, tmp_path: Path, corpus: Path
) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    allow = "--checkpoint.allow_changed=['data.mask_documents']"
    job = make_job(tmp_path, corpus, *CHANGES[ALLOWED], allow, "--training.steps=13")
    train(job)
    assert history(job)[:12] == history(whole)
    longer = run_in_hops(tmp_path, corpus, [13], name="longer")
    assert metrics_of(job)[12]["data/batch_sha"] == metrics_of(longer)[12]["data/batch_sha"]


def test_an_edited_source_is_refused_by_name(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    train(make_job(tmp_path, corpus, "--training.steps=1"))
    (corpus / "b.txt").write_text((corpus / "b.txt").read_text() + "!")
    with pytest.raises(
        ConfigError, match=rf"differs: the sequences of text {corpus}/b\.txt have changed\. Undo the change"
    ):
        train(make_job(tmp_path, corpus, "--training.steps=2"))


BEFORE_TOKENISING = {
    "the tokenizer was bytes, is tiktoken": CHANGES[f"the tokenizer was bytes, is tiktoken {BPE}"],
    'data.packing was "chunk", is "best_fit"': ["--data.packing=best_fit"],
    r'data.sources was \["text .*/a.jsonl", "text .*/b.txt"\], is \["text .*/new.txt"\]': [
        "--data.sources=[{name = 'text', path = ['CORPUS/new.txt']}]"
    ],
}


@pytest.mark.parametrize("said", BEFORE_TOKENISING)
def test_other_data_is_refused_before_anything_is_tokenised_or_packed(tmp_path: Path, said: str) -> None:
    corpus = write_corpus(tmp_path)
    (corpus / "new.txt").write_text("other words " * 100)
    train(make_job(tmp_path, corpus, "--training.steps=1"))
    overrides = [override.replace("CORPUS", str(corpus)) for override in BEFORE_TOKENISING[said]]
    cached = set((corpus / "cache").iterdir())
    with pytest.raises(ConfigError, match=rf"checkpoint holds a run that differs: .*{said}"):
        train(make_job(tmp_path, corpus, *overrides))
    for file in ("checkpoint", "last_commit.json", "metrics.jsonl"):  # now like a run that saved nothing
        shutil.move(tmp_path / "run" / file, tmp_path / file)
    with pytest.raises(ConfigError, match=rf"run holds a run that differs: .*{said}"):
        train(make_job(tmp_path, corpus, *overrides))
    assert set((corpus / "cache").iterdir()) == cached


def test_control_text_that_was_moved_is_the_same(tmp_path: Path) -> None:
    """The tokens, which have to be made again, tell."""
    corpus, moved = write_corpus(tmp_path), tmp_path / "moved"
    train(make_job(tmp_path, corpus, "--training.steps=1"))
    moved.mkdir()
    for file in ("a.jsonl", "b.txt"):
        shutil.move(corpus / file, moved / file)
    shutil.rmtree(corpus / "cache")
    job = make_job(tmp_path, moved, "--training.steps=2")
    train(job)
    assert [line["step"] for line in metrics_of(job)] == [1, 2]


# ---- other changes are logged


def changes_on_rank(folder: Path, corpus: Path, overrides: list[str], size: int = 1) -> list[str]:
    """Train, and what this rank logs of changes since the checkpoint."""
    lines: list[str] = []

    def listen(message: str, *args: object) -> None:
        lines.append(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "info", listen)
        train(make_job(folder, corpus, *overrides, world_size=size))
    return [line for line in lines if "changed since" in line or "change the learning rate" in line]


@pytest.mark.full
def test_what_changed_since_the_checkpoint_is_logged(tmp_path: Path, corpus: Path, run_on) -> None:
    first = ["--training.steps=4", "--lr_scheduler.total_steps=0"]
    assert changes_on_rank(tmp_path, corpus, first) == []
    same = [
        *first,
        "--metrics.log_freq=2",
        "--checkpoint.interval=2",
        "--data.num_workers=1",
        "--job.description=x",
    ]
    assert changes_on_rank(tmp_path, corpus, same) == []
    now = [
        "--training.steps=8", "--lr_scheduler.total_steps=0", "--optimizer.lr=5e-3", "--optimizer.beta2=0.99",
        "--training.global_batch_size=16", "--activation_checkpoint.mode=full",
    ]  # fmt: skip
    one, other = run_on(2, changes_on_rank, tmp_path, corpus, now, 2)
    assert one == [
        "changed since step 4: ranks 1 -> 2",
        "changed since step 4: training.global_batch_size 8 -> 16",
        "changed since step 4: training.steps 4 -> 8",
        "changed since step 4: optimizer.lr 0.003 -> 0.005",
        "changed since step 4: optimizer.beta2 0.95 -> 0.99",
        'changed since step 4: activation_checkpoint.mode "none" -> "full"',
        "these change the learning rate of step 5: 0 -> 0.00333",
    ]
    assert other == []


def test_the_recorded_job_is_compared_without_its_imports(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_of_the_past.py").write_text("")
    imports = '--job.imports=["module_of_the_past"]'
    assert changes_on_rank(tmp_path, corpus, ["--training.steps=4", imports]) == []
    (recorded,) = tmp_path.glob("**/step-4/job.toml")
    assert "module_of_the_past" in recorded.read_text()
    (tmp_path / "module_of_the_past.py").write_text("raise SystemExit(7)\n")
    monkeypatch.delitem(sys.modules, "module_of_the_past", raising=False)
    lines = changes_on_rank(tmp_path, corpus, ["--training.steps=5"])
    assert lines == ["changed since step 4: training.steps 4 -> 5"]


def test_another_optimizer_is_told_in_words(
    whole: Job, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Optimizer, "choices", dict(Optimizer.choices))

    @dataclass(frozen=True, kw_only=True)
    class Momentum(Optimizer, name="momentum"):
        """SGD, with momentum or without."""

        momentum: float = 0.9
        """Decay of the mean."""

        def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.groups(model), lr=self.lr, momentum=self.momentum)

    def complaint(folder: Path, *overrides: str, key: str = "optimizer.name") -> str:
        with pytest.raises(ConfigError) as error:
            train(make_job(folder, corpus, "--training.steps=13", *overrides, name="whole"))
        assert error.value.key == key
        return str(error.value)

    folder, other = whole.folder.parent, whole.folder.parent / "other"
    step = whole.folder / "checkpoint/step-12"
    ways = (
        'Undo the change, name "optimizer" in --checkpoint.allow_changed to start state that differs at '
        "zero, or start a new run from the weights, in another --job.dump_folder, with "
        "--checkpoint.initial_load_path="
    )
    mine = ["--optimizer={name = 'momentum'}"]
    assert complaint(folder, *mine) == (
        f"{step} was saved with optimizer adamw, this job has momentum. {ways}{step}"
    )
    train(make_job(other, corpus, *mine, "--training.steps=1", name="whole"))
    step = other / "whole/checkpoint/step-1"
    still = "--optimizer={name = 'momentum', momentum = 0.0}"
    assert complaint(other, still, key="optimizer.momentum") == (
        f"{step} was saved with other optimizer state: optimizer.momentum was 0.9, is 0.0. {ways}{step}"
    )
