"""The average of the weights as a section of checkpoints: restored, started from the weights where a
checkpoint has none, ignored where a run keeps none."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from tests.support.checkpoints import Toy, names, open_run
from titanlite.checkpoint import checkpointer
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.reader import MisfitError, read_metadata
from titanlite.checkpoint.state import non_finite
from titanlite.errors import Diverged
from titanlite.interop.dcp import non_finite_in
from titanlite.log import logger
from titanlite.optim.ema import EMA, WeightAverage

APPLIED = torch.tensor(True)


class AveragedToy(Toy):
    """A toy with an average of its weights."""

    def __init__(self, seed: int = 0, enable: bool = True):
        super().__init__(seed=seed)
        self.average = self.state.average = WeightAverage(EMA(enable=enable, decay=0.5), self.net)

    def train(self, run: Checkpointer, to_step: int) -> None:
        """Take and save steps."""
        while self.state.step < to_step:
            self.step()
            self.average.update(self.state.step, APPLIED)
            run.save(self.state)

    def averages(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.average.tensors.values()]

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def resumed(folder: Path, enable: bool = True) -> AveragedToy:
    toy, run = AveragedToy(seed=1, enable=enable), open_run(folder)
    run.load(toy.state)
    run.close()
    return toy


def trained(folder: Path, steps: int = 3, enable: bool = True) -> AveragedToy:
    toy, run = AveragedToy(enable=enable), open_run(folder)
    toy.train(run, steps)
    run.close()
    return toy


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def sections(step: Path) -> set[str]:
    return {name.partition(".")[0] for name in read_metadata(step).state_dict_metadata}


def test_the_average_is_saved_and_restored(tmp_path: Path) -> None:
    toy = trained(tmp_path)
    assert sections(tmp_path / "checkpoint/step-3") == {"model", "optimizer", "ema"}
    assert not same(toy.averages(), toy.weights())
    assert same(resumed(tmp_path).averages(), toy.averages())


def test_switched_on_the_average_starts_from_the_loaded_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path, enable=False)
    assert sections(tmp_path / "checkpoint/step-3") == {"model", "optimizer"}
    monkeypatch.setattr(logger, "propagate", True)  # a command before may have set it to False
    with caplog.at_level(logging.INFO, logger.name):
        toy = resumed(tmp_path)
    assert same(toy.averages(), toy.weights())
    (line,) = {line for line in caplog.messages if "average of the weights" in line}
    assert re.search(r"step-3 has no average of the weights: a new one starts from the loaded weights$", line)


def test_switched_off_the_saved_average_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(tmp_path)
    monkeypatch.setattr(logger, "propagate", True)  # a command before may have set it to False
    with caplog.at_level(logging.INFO, logger.name):
        toy = resumed(tmp_path, enable=False)
    assert toy.state.step == 3
    (line,) = {line for line in caplog.messages if "average of the weights" in line}
    assert re.search(r"the average of the weights in .*step-3 is not used: ema.enable = false$", line)


def test_a_part_of_the_average_that_is_missing_is_an_error(tmp_path: Path) -> None:
    toy, run = AveragedToy(), open_run(tmp_path)
    del toy.average.tensors["bias"]
    toy.train(run, 1)
    run.close()
    with pytest.raises(MisfitError, match=r"ema\.bias is missing"):
        resumed(tmp_path)


def test_a_rewind_restores_the_average(tmp_path: Path) -> None:
    toy, run = AveragedToy(), open_run(tmp_path)
    toy.train(run, 2)
    wanted = toy.averages()
    toy.train(run, 4)
    assert not same(toy.averages(), wanted)
    assert run.rewind(2, toy.state)
    assert same(toy.averages(), wanted)
    run.close()


def test_an_average_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    toy, run = AveragedToy(), open_run(tmp_path)
    toy.average.tensors["bias"][1] = float("nan")
    assert non_finite(toy.state.tensors()) == ["ema.bias"]
    with pytest.raises(Diverged, match=r"after step 1 ema\.bias are not finite"):
        toy.train(run, 2)
    run.close_after_error()


def test_a_checkpoint_whose_average_is_not_finite_is_found_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy, run = AveragedToy(), open_run(tmp_path)
    toy.train(run, 1)
    toy.average.tensors["bias"][1] = float("nan")
    with monkeypatch.context() as patched:
        patched.setattr(checkpointer, "non_finite", lambda tensors: [])
        toy.train(run, 2)
    run.close()
    assert non_finite_in(tmp_path / "checkpoint/step-2") == ["ema.bias"]
    assert resumed(tmp_path).state.step == 1
    assert names(tmp_path) == ["quarantined-step-2-0", "step-1"]
