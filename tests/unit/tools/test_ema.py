"""The average of the weights in a checkpoint as the command line shows, verifies, exports and uses it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.support.jobs import make_job
from tests.support.models import tensors_in
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.job import Job
from titanlite.tools.generate import open_source
from titanlite.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """A run with an average from step 2 on, and the steps 2 and 4."""
    keys = ["--training.steps=4", "--checkpoint.interval=2", "--ema.enable", "--ema.decay=0.5"]
    job = make_job(tmp_path_factory.mktemp("run"), corpus, *keys, "--ema.start_step=2")
    train(job)
    return job


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The folder of a run without an average."""
    job = make_job(tmp_path_factory.mktemp("without"), corpus, "--training.steps=1")
    train(job)
    return job.folder


def average_of(job: Job) -> dict[str, torch.Tensor]:
    """The newest average, by DCP's reader."""
    tensors = {name: torch.zeros(t.shape) for name, t in model_tensors(job.model.build_on_meta()).items()}
    load_tensors(job.folder / "checkpoint/step-4", {"ema": tensors})
    return tensors


def test_the_average_is_exported_in_place_of_the_weights(
    run: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, options in (("weights", []), ("average", ["--ema"])):
        command = ["export", str(run.folder), str(tmp_path / name), "--dtype=float32", *options]
        assert cli.run(command) == 0
    assert f"from the average of the weights in {run.folder}/checkpoint/step-4" in capsys.readouterr().out
    wanted, weights, average = (
        average_of(run),
        tensors_in(tmp_path / "weights"),
        tensors_in(tmp_path / "average"),
    )
    assert average.keys() == wanted.keys() == weights.keys()
    for name in wanted:
        rows = len(average[name])  # without the rows of the vocabulary that have no token
        assert torch.equal(average[name], wanted[name][:rows])
        assert not torch.equal(average[name], weights[name])


@pytest.mark.full
def test_an_exported_average_opens_in_transformers(run: Job, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    assert cli.run(["export", str(run.folder), str(tmp_path / "it"), "--dtype=float32", "--ema"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    net = run.model.build()
    net.load_state_dict(average_of(run))
    tokens = torch.tensor([[256, 97, 98, 99]])
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, net(tokens)[..., : model.config.vocab_size], atol=1e-4)


def test_text_is_generated_with_the_average(run: Job, capsys: pytest.CaptureFixture[str]) -> None:
    source = open_source(run.folder, torch.device("cpu"), allow_imports=False, average=True)
    wanted = average_of(run)
    assert all(torch.equal(p, wanted[name]) for name, p in source.net.named_parameters())
    assert cli.run(["generate", str(run.folder), "--ema", "--prompt=ab", "--max-new-tokens=3"]) == 0
    assert f"using the average of the weights in {run.folder}/checkpoint/step-4" in capsys.readouterr().err


def test_a_checkpoint_without_an_average_says_so(
    without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (
        ["export", str(without), str(tmp_path / "it"), "--ema"],
        ["generate", str(without), "--ema", "--prompt=a"],
    ):
        assert cli.run(command) == 2
        message = "step-1 has no average of the weights: it was saved with ema.enable = false"
        assert message in capsys.readouterr().err
    assert not (tmp_path / "it").exists()


def test_a_hugging_face_directory_has_no_average(
    without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", str(without), str(tmp_path / "it")]) == 0
    assert cli.run(["generate", str(tmp_path / "it"), "--ema", "--prompt=a"]) == 2
    assert "it is a Hugging Face directory, which has no average: leave out --ema" in capsys.readouterr().err


def test_show_and_verify_include_the_average(
    run: Job, without: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = sum(t.numel() for t in average_of(run).values())
    assert cli.run(["checkpoint", "show", str(run.folder), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert f"ema: {len(average_of(run))} tensors, {size:,} elements" in shown
    assert "  ema.model.norm.weight " in shown
    assert cli.run(["checkpoint", "show", str(without)]) == 0
    assert "ema:" not in capsys.readouterr().out
    assert cli.run(["checkpoint", "verify", str(run.folder)]) == 0


def test_until_its_start_the_average_equals_the_weights(run: Job, tmp_path: Path) -> None:
    shutil.copytree(run.folder / "checkpoint/step-2", tmp_path / "step-2")
    early, average = (
        open_source(tmp_path / "step-2", torch.device("cpu"), allow_imports=False, average=average)
        for average in (False, True)
    )
    assert all(torch.equal(a, b) for a, b in zip(early.net.parameters(), average.net.parameters()))
