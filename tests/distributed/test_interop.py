"""Weights from outside come into every layout, and out of its checkpoints, to the bit: each rank reads its
own part of whatever format, and an export is the same bytes whichever ranks saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.test_resume import LAYOUTS, PIPELINE, TENSOR, UNTIED, train_on_rank
from tests.jobs import make_job
from tests.models import family, hugging_face, tensors_in
from tests.unit.checkpoint.test_foreign import random_tensors, write_meta, write_torchtitan
from titanlite import cli
from titanlite.config.component import ConfigError
from titanlite.train import train

pytest.importorskip("transformers")

STILL = ["--optimizer.lr=1e-30", "--training.steps=1"]  # a step that moves no weight
ODD = "--model.overrides.vocab_size=298"  # 40 rows that no source here has; not a multiple of 4


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def exported(run: Path, target: Path) -> dict[str, bytes]:
    argv = ["export", str(run), str(target), "--dtype", "float32", "--max-shard-size", "20KB"]
    assert cli.run(argv) == 0
    return content(target)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "recompute" not in name])
def test_in_and_out_of_a_layout_is_bit_equal(tmp_path: Path, corpus: Path, run_on, layout: str) -> None:
    world_size, overrides = LAYOUTS[layout]
    of = family(tie_word_embeddings=UNTIED not in overrides)
    hugging_face(of).save_pretrained(tmp_path / "theirs", max_shard_size="30KB")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", *STILL, *overrides]
    run_on(world_size, train_on_rank, tmp_path, corpus, start, "layout", world_size)
    alone = [o for o in start if "parallelism" not in o]
    train(make_job(tmp_path, corpus, *alone, name="alone"))
    ours = exported(tmp_path / "layout", tmp_path / "ours")
    assert ours == exported(tmp_path / "alone", tmp_path / "one process")
    theirs, again = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert again.keys() == theirs.keys()
    assert all(torch.equal(again[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("source", ["torchtitan", "meta", "titanlite"])
@pytest.mark.parametrize("layout", ["fsdp4", "tensor2 fsdp2", "pipeline2 tensor2"])
def test_foreign_formats_come_into_a_layout(
    tmp_path: Path, corpus: Path, run_on, layout: str, source: str
) -> None:
    """With rows added to the vocabulary, which every rank has to leave as a new model's."""
    world_size, overrides = LAYOUTS[layout]
    of = family(tie_word_embeddings=False)
    w = random_tensors(of.config)
    path = write_meta(tmp_path / "m", w, of.config, 2) if source == "meta" else write_torchtitan(tmp_path, w)
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
    rows = tensors_in(tmp_path / "alone out")["model.embed_tokens.weight"]
    assert torch.equal(rows[:258], w["tok_embeddings.weight"])
    assert rows[258:].abs().max() > 0


def refused_on_rank(folder: Path, corpus: Path, overrides: list[str], world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        train(make_job(folder, corpus, *overrides, name="refused", world_size=world_size))
    return str(error.value)


@pytest.mark.parametrize("layout", [[], [TENSOR], [PIPELINE]], ids=["fsdp2", "tensor2", "pipeline2"])
def test_all_ranks_refuse_what_does_not_fit(tmp_path: Path, corpus: Path, run_on, layout: list[str]) -> None:
    of = family(tie_word_embeddings=False, n_layers=3)
    hugging_face(of).save_pretrained(tmp_path / "theirs")
    start = [f"--checkpoint.initial_load_path={tmp_path / 'theirs'}", UNTIED, *layout]
    said = run_on(2, refused_on_rank, tmp_path, corpus, start, 2)
    assert "num_hidden_layers is 3, the job's 2" in said[0]
    assert said[0] == said[1]
    assert not (tmp_path / "refused").exists()


def test_a_run_on_ranks_exports_by_itself(tmp_path: Path, corpus: Path, run_on) -> None:
    overrides = ["--checkpoint.export_hf=true", "--training.steps=2", "--checkpoint.export_dtype=float32"]
    run_on(2, train_on_rank, tmp_path, corpus, overrides, "two", 2)
    assert cli.run(["export", str(tmp_path / "two"), str(tmp_path / "it"), "--dtype", "float32"]) == 0
    assert content(tmp_path / "two/hf/step-2") == content(tmp_path / "it")
