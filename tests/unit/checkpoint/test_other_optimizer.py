"""Pins checkpoint.allow_changed = ["optimizer"]: which optimizer state a run takes over from a checkpoint of
another optimizer, and that the rest starts as in a new optimizer, on any number of ranks and after a rewind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.examples.lion import LionOptimizer
from tests.support.checkpoints import Toy, open_run, save_steps, sharded_toy
from titanlite.checkpoint.checkpointer import Checkpointer
from titanlite.checkpoint.reader import MisfitError
from titanlite.log import logger
from titanlite.mesh import local_shard

ALLOWED: dict[str, Any] = {"allow_changed": ["optimizer"]}


def lion(toy: Toy) -> Toy:
    """The toy with another optimizer, whose state is `exp_avg` alone."""
    rates = {"lr": 0.1, "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.99}
    toy.optimizer = LionOptimizer([{"params": list(toy.net.parameters()), **rates}])
    return toy


class MatrixMomentum(torch.optim.AdamW):
    """AdamW for vectors, and for matrices a sum of gradients, `momentum_buffer`, of any dtype."""

    def __init__(self, net: torch.nn.Module, dtype: torch.dtype):
        super().__init__(net.parameters(), lr=0.1)
        self.matrices, self.dtype = [p for p in net.parameters() if p.ndim == 2], dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for p in self.matrices:
            assert p.grad is not None
            state, gradient = self.state[p], p.grad
            if not state:
                state["momentum_buffer"] = torch.zeros_like(p, dtype=self.dtype)
            p.sub_(state["momentum_buffer"].add_(gradient), alpha=self.param_groups[0]["lr"])
            p.grad = None
        super().step()


def mixed(toy: Toy, dtype: torch.dtype = torch.float32) -> Toy:
    toy.optimizer = MatrixMomentum(toy.net, dtype)
    return toy


def state_of(toy: Toy) -> dict[str, torch.Tensor]:
    """The optimizer's state by `weight.exp_avg` and so on."""
    names = {p: name for name, p in toy.net.named_parameters()}
    return {
        f"{names[p]}.{key}": value.clone()
        for p, state in toy.optimizer.state.items()
        for key, value in state.items()
    }


def resume(folder: Path, toy: Toy, **config: Any) -> Checkpointer:
    run = open_run(folder, **ALLOWED, **config)
    run.load(toy.state)
    return run


class Lines(logging.Handler):
    """The log lines on the optimizer's state, while this is a context."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "of the optimizer's state" in record.getMessage():
            self.texts.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._level_before = logger.level  # other tests and ranks may have made it WARNING
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self.texts

    def __exit__(self, *_: object) -> None:
        logger.removeHandler(self)
        logger.setLevel(self._level_before)


def said(loaded: int, fresh: int, ignored: str) -> str:
    return (
        f'checkpoint.allow_changed has "optimizer": of the optimizer\'s state, {loaded} tensors are loaded '
        f"and {fresh} start at zero; ignored in the checkpoint: {ignored}"
    )


def test_there_and_back(tmp_path: Path) -> None:
    adamw, run = save_steps(tmp_path, 3)
    run.close()
    toy = lion(Toy(seed=1))
    with Lines() as lines:
        run = resume(tmp_path, toy)
    assert lines == [said(2, 0, "exp_avg_sq, step")]
    assert_equal_weights(toy, adamw)
    ours, theirs = state_of(toy), state_of(adamw)
    assert ours.keys() == {"weight.exp_avg", "bias.exp_avg"}
    assert all(torch.equal(value, theirs[name]) and value.any() for name, value in ours.items())
    toy.step()
    run.save(toy.state)
    run.close()

    back = Toy(seed=2)
    with Lines() as lines:
        resume(tmp_path, back).close()
    assert lines == [said(0, 6, "exp_avg")]
    assert_equal_weights(back, toy)
    assert not any(value.any() for value in state_of(back).values())
    new = Toy(seed=3)
    new.net.load_state_dict(back.net.state_dict())
    stale = Toy(seed=3)  # control: as if the step that only made the state had counted
    stale.net.load_state_dict(back.net.state_dict())
    for state in (back, new, stale):
        if state is stale:
            for p in stale.net.parameters():
                zeros = {key: torch.zeros_like(p) for key in ("exp_avg", "exp_avg_sq")}
                stale.optimizer.state[p].update(step=torch.tensor(1.0), **zeros)
        state.step()
    assert_equal_weights(back, new)
    assert not torch.equal(stale.net.weight, new.net.weight)


def assert_equal_weights(a: Toy, b: Toy) -> None:
    for p, q in zip(a.net.parameters(), b.net.parameters(), strict=True):
        assert torch.equal(local_shard(p), local_shard(q))


def test_nothing_is_said_if_the_optimizer_is_the_same(tmp_path: Path) -> None:
    before, run = save_steps(tmp_path, 3, **ALLOWED)  # a new run takes the name, too
    run.close()
    after = Toy(seed=1)
    with Lines() as lines:
        resume(tmp_path, after).close()
    assert lines == []
    assert all(torch.equal(a, b) for a, b in zip(before.values(), after.values(), strict=True))


def test_without_the_permission_it_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)[1].close()
    for allowed in ([], ["model.dim"]):
        run, toy = open_run(tmp_path, allow_changed=allowed), lion(Toy())
        with pytest.raises(MisfitError, match=r"optimizer.bias.exp_avg_sq is unexpected"):
            run.load(toy.state)
        run.close_after_error()


def test_each_parameter_is_loaded_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    adamw, run = save_steps(tmp_path / "a", 3)
    run.close()
    toy = mixed(Toy(seed=1))
    with Lines() as lines:
        run = resume(tmp_path / "a", toy)
    assert lines == [said(3, 1, "exp_avg, exp_avg_sq, step")]
    ours, theirs = state_of(toy), state_of(adamw)
    assert not ours["weight.momentum_buffer"].any()
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(ours[f"bias.{key}"], theirs[f"bias.{key}"])
    toy.step()
    run.save(toy.state)
    run.close()

    low = mixed(Toy(seed=2), torch.bfloat16)  # the same key in another dtype
    resume(tmp_path / "a", low).close()
    assert not state_of(low)["weight.momentum_buffer"].any()
    assert torch.equal(state_of(low)["bias.exp_avg"], state_of(toy)["bias.exp_avg"])
    assert state_of(toy)["weight.momentum_buffer"].any()


def test_a_moment_in_another_dtype_takes_the_step_count_with_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 3)[1].close()
    toy = Toy(seed=1)
    toy.step()
    for state in toy.optimizer.state.values():
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
    resume(tmp_path, toy).close()
    assert not any(value.any() for value in state_of(toy).values())


def test_the_state_of_clipping_is_not_covered(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)[1].close()
    run, toy = open_run(tmp_path, **ALLOWED), Toy()
    toy.optimizer.register_step_post_hook(
        lambda optimizer, *_: [
            state.update(clip_norm=torch.tensor(1.0)) for state in optimizer.state.values()
        ]
    )
    with pytest.raises(MisfitError, match=r"optimizer.weight.clip_norm is missing"):
        run.load(toy.state)
    run.close_after_error()


def test_going_back_and_rewinding_over_the_change(tmp_path: Path) -> None:
    adamw, run = save_steps(tmp_path, 2)
    expected = [p.detach().clone() for p in adamw.net.parameters()]
    run.close()
    toy = lion(Toy(seed=1))
    run = resume(tmp_path, toy)
    for _ in range(2):
        toy.step()
        run.save(toy.state)
    assert run.rewind(2, toy.state)
    assert toy.state.step == 2
    assert all(torch.equal(p, q) for p, q in zip(toy.net.parameters(), expected, strict=True))
    assert torch.equal(state_of(toy)["weight.exp_avg"], state_of(adamw)["weight.exp_avg"])
    toy.step()
    run.save(toy.state)
    run.close()

    again = mixed(Toy(seed=2))
    run = resume(tmp_path, again, load_step=2)
    assert again.state.step == 2
    assert torch.equal(state_of(again)["bias.exp_avg_sq"], state_of(adamw)["bias.exp_avg_sq"])
    again.step()
    run.save(again.state)
    assert run.rewind(2, again.state)
    assert not state_of(again)["weight.momentum_buffer"].any(), "not the momentum from before the rewind"
    run.close()


def there_and_back_on_rank(folder: Path) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """Resume on two ranks with Lion, take a step, save it, and resume with AdamW. Returns Lion's state before
    the step, and AdamW's state on this rank."""
    toy = Toy(width=6, seed=1)
    fully_shard(toy.net, mesh=init_device_mesh("cpu", (2,)))
    run = resume(folder, lion(toy))
    whole = {name: t.full_tensor() for name, t in state_of(toy).items() if isinstance(t, DTensor)}
    toy.step()
    run.save(toy.state)
    run.close()
    toy = sharded_toy(2, width=6, seed=2)
    resume(folder, toy).close()
    return whole, [local_shard(t) for t in state_of(toy).values()]


@pytest.mark.full
def test_on_several_ranks_as_on_one(tmp_path: Path, run_on: Callable[..., list[Any]]) -> None:
    run, toy = open_run(tmp_path), Toy(width=6)
    for _ in range(2):
        toy.step()
        run.save(toy.state)
    run.close()
    expected = state_of(toy)
    for loaded, zeros in run_on(2, there_and_back_on_rank, tmp_path):
        assert loaded.keys() == {"weight.exp_avg", "bias.exp_avg"}
        assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
        assert len(zeros) == 6
        assert not any(value.any() for value in zeros)


def half_on_rank(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Resume on a rank that has one of the two parameters, as with pipeline parallel; only the optimizer of
    rank 1 is another one than before. Returns the rank's state, and what the log says of it."""
    toy = Toy(seed=1)
    if torch.distributed.get_rank() == 0:
        del toy.net.weight
        toy.optimizer = torch.optim.AdamW(toy.net.parameters(), lr=0.1)
    else:
        del toy.net.bias
        mixed(toy)
    with Lines() as lines:
        resume(folder, toy).close()
    return state_of(toy), lines


def test_ranks_with_different_parameters(tmp_path: Path, run_on: Callable[..., list[Any]]) -> None:
    toy, run = save_steps(tmp_path, 2)
    run.close()
    (first, lines), (second, same_lines) = run_on(2, half_on_rank, tmp_path)
    assert all(torch.equal(value, state_of(toy)[name]) for name, value in first.items())
    assert len(first) == 3
    assert second.keys() == {"weight.momentum_buffer"}
    assert not second["weight.momentum_buffer"].any()
    assert lines == same_lines == [said(3, 1, "exp_avg, exp_avg_sq, step")]
