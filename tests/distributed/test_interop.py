"""Weights from outside come into every layout, and out of its checkpoints, to the bit: each rank reads its
own part of whatever format, and an export is the same bytes whichever ranks saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.foreign import random_tensors, write_meta, write_torchtitan
from tests.support.jobs import make_job
from tests.support.models import family, hugging_face, tensors_in
from tests.support.runs import CP, PP, TP, train_on_rank
from tests.support.tiers import full, sampled
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.interop import initial
from titanlite.interop.weights import Weights
from titanlite.models.base import ModelFamily
from titanlite.ranks import Ranks
from titanlite.train import train

pytest.importorskip("transformers")

UNTIED = "--model.overrides.tie_word_embeddings=false"
SHARD = "--parallelism.data_parallel_shard_degree=2"
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
LAYOUTS: dict[str, tuple[int, list[str]]] = {  # those whose ranks hold the most different parts
    "dp_shard 4": (4, ["--training.local_batch_size=1"]),
    "tp 2 x dp_shard 2": (4, [TP, SHARD]),
    "tp 2, qwen3": (2, [TP, "--model.name=qwen3"]),
    "tp 2, qwen2": (2, [TP, "--model.name=qwen2"]),
    "tp 2, gemma3": (2, [TP, "--model.name=gemma3", "--model.overrides.sliding_window=9"]),
    "cp 2, mistral": (2, [CP, "--model.name=mistral", "--model.overrides.sliding_window=9"]),
    "pp 2 x tp 2, qwen2": (4, [PP, TP, UNTIED, "--model.name=qwen2"]),
    "cp 2": (2, [CP]),
    "pp 2 x tp 2": (4, [PP, TP, UNTIED]),
    "interleaved": (2, [PP, INTERLEAVED, UNTIED, "--model.overrides.n_layers=4"]),
}
STILL = ["--optimizer.lr=1e-30", "--training.steps=1"]  # a step that moves no weight
ODD = "--model.overrides.vocab_size=298"  # 40 rows that no source here has; not a multiple of 4


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def exported(run: Path, target: Path) -> dict[str, bytes]:
    argv = ["export", str(run), str(target), "--dtype", "float32", "--max-shard-size", "20KB"]
    assert cli.run(argv) == 0
    return content(target)


@pytest.mark.parametrize("layout", sampled(LAYOUTS, {}))
def test_in_and_out_of_a_layout_is_bit_equal(tmp_path: Path, corpus: Path, run_on, layout: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    layers = 4 if "interleaved" in layout else 2
    name = next((name for name in ("qwen3", "qwen2", "mistral", "gemma3") if name in layout), "llama3")
    window = {"sliding_window": 9} if name in ("mistral", "gemma3") else {}
    model_family = family(name, tie_word_embeddings=UNTIED not in overrides, n_layers=layers, **window)
    hugging_face(model_family).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", *STILL, *overrides]
    run_on(world_size, train_on_rank, tmp_path, corpus, start, "layout", world_size)
    alone = [o for o in start if "parallelism" not in o]
    train(make_job(tmp_path, corpus, *alone, name="alone"))
    ours = exported(tmp_path / "layout", tmp_path / "ours")
    assert ours == exported(tmp_path / "alone", tmp_path / "one process")
    theirs, again = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    ("source", "layout"),
    [
        ("torchtitan", "dp_shard 4"),
        full("meta", "tp 2 x dp_shard 2"),
        full("titanlite", "pp 2 x tp 2"),
    ],
)
def test_foreign_formats_come_into_a_layout(
    tmp_path: Path, corpus: Path, run_on, source: str, layout: str
) -> None:
    """With rows added to the vocabulary, which every rank has to leave as a new model's."""
    world_size, overrides = LAYOUTS[layout]
    model_family = family(tie_word_embeddings=False)
    w = random_tensors(model_family.config)
    path = (
        write_meta(tmp_path / "m", w, model_family.config, 2)
        if source == "meta"
        else write_torchtitan(tmp_path, w)
    )
    if source == "titanlite":
        first = [f"--checkpoint.initial_load_path={path}", *STILL, UNTIED]
        train(make_job(tmp_path, corpus, *first, name="first"))
        path = tmp_path / "first"
    start = [f"--checkpoint.initial_load_path={path}", *STILL, UNTIED, ODD]
    run_on(world_size, train_on_rank, tmp_path, corpus, [*start, *overrides], "layout", world_size)
    train(make_job(tmp_path, corpus, *start, name="alone"))
    argv = ["--dtype", "float32", "--keep-padding"]
    for name in ("layout", "alone"):
        assert cli.run(["export", str(tmp_path / name), str(tmp_path / f"{name} out"), *argv]) == 0
    assert content(tmp_path / "layout out") == content(tmp_path / "alone out")
    embedding = tensors_in(tmp_path / "alone out")["model.embed_tokens.weight"]
    assert torch.equal(embedding[:258], w["tok_embeddings.weight"])
    assert embedding[258:].abs().max() > 0


def refused_on_rank(folder: Path, corpus: Path, overrides: list[str], world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        train(make_job(folder, corpus, *overrides, name="refused", world_size=world_size))
    return str(error.value)


@pytest.mark.full
@pytest.mark.parametrize("layout", [[], [TP], [PP]], ids=["dp_shard 2", "tp 2", "pp 2"])
def test_all_ranks_refuse_what_does_not_fit(tmp_path: Path, corpus: Path, run_on, layout: list[str]) -> None:
    model_family = family(tie_word_embeddings=False, n_layers=3)
    hugging_face(model_family).save_pretrained(tmp_path / "theirs")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", UNTIED, *layout]
    said = run_on(2, refused_on_rank, tmp_path, corpus, start, 2)
    assert "n_layers is 3, the job's 2" in said[0]
    assert said[0] == said[1]
    assert not (tmp_path / "refused").exists()


def load_on_rank(run: Path, fails: bool) -> tuple[str, torch.Tensor]:
    """Initial weights from `run`, of which rank 1 alone would find a step that has just been saved, or would
    fail in a way that nobody has thought of."""
    rank, open_weights, net = dist.get_rank(), initial.open_weights, family().build()

    def later(path: Path, model_family: ModelFamily) -> Weights:
        return open_weights(run.with_name("later") / "step-2" if rank and path == run else path, model_family)

    def broken(*_: object) -> None:
        raise KeyError("unforeseen")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "open_weights", later)
        if fails and rank:
            patch.setattr(initial, "load_weights", broken)
        try:
            initial.load_initial(run, family(), net, Ranks(run))
        except RuntimeError as e:
            return str(e), torch.empty(0)
    return "", net.get_parameter("model.norm.weight").detach()


@pytest.mark.full
def test_all_ranks_read_one_step_and_hear_of_any_error(tmp_path: Path, corpus: Path, run_on) -> None:
    train(make_job(tmp_path, corpus, "--training.steps=2", "--checkpoint.interval=1"))
    run = tmp_path / "run"
    (tmp_path / "later").mkdir()
    (run / "checkpoint/step-2").rename(tmp_path / "later/step-2")
    (said, ours), (_, theirs) = run_on(2, load_on_rank, run, False)
    assert said == ""
    assert torch.equal(ours, theirs)
    for said, _ in run_on(2, load_on_rank, run, True):
        assert "KeyError: 'unforeseen' (rank 1)" in said
