"""Pins averages of checkpoints: the coefficients, the arithmetic, what is copied, the memory, and that an
error or a kill leaves nothing."""

from __future__ import annotations

import errno
import math
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import IDENTITY, Toy, open_run, save_steps
from titanlite.checkpoint import commit, digest
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.reader import load_tensors, read_metadata
from titanlite.checkpoint.state import read_train
from titanlite.config.component import ConfigError
from titanlite.interop import average, dcp
from titanlite.interop.average import check_one_model, coefficients, write_average
from titanlite.interop.dcp import open_titanlite
from titanlite.interop.weights import Chunk, LazyTensor, Weights

TOY: dict[str, Any] = {**IDENTITY, "model": {"name": "toy", "dim": 4}}


def wide_toy(width: int) -> Toy:
    """A toy with a floating-point buffer and an integer buffer, which steps change."""
    toy = Toy(width)
    toy.net.register_buffer("bias_of_experts", torch.zeros(3))
    toy.net.register_buffer("count", torch.zeros((), dtype=torch.int64))
    return toy


def checkpoints_in(folder: Path) -> list[Weights]:
    return [open_titanlite(path) for _, path in commit.list_committed(folder / "checkpoint")]


@pytest.fixture
def three(tmp_path: Path) -> list[Weights]:
    """Checkpoints of the steps 1 to 3."""
    run, toy = open_run(tmp_path / "run", identity=TOY), wide_toy(16)
    for step in range(1, 4):
        toy.step()
        toy.net.bias_of_experts.fill_(step)
        toy.net.count.fill_(10 * step)
        run.save(toy.state)
    run.close()
    return checkpoints_in(tmp_path / "run")


def loaded(path: Path, width: int = 16) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, read by the code that loads runs."""
    tensors = {name: torch.empty_like(t) for name, t in wide_toy(width).net.state_dict().items()}
    load_tensors(path, {"model": tensors})
    return tensors


# ---- coefficients


@pytest.mark.parametrize("kind", ["uniform", "linear", "sqrt"])
@pytest.mark.parametrize("num", [2, 3, 10])
def test_coefficients(kind: str, num: int) -> None:
    c = coefficients(kind, num)
    assert len(c) == num
    assert sum(c) == pytest.approx(1, abs=1e-15)
    assert min(c) > 0
    factors = [sum(c[j:]) for j in range(num)]  # of the updates between the checkpoints j - 1 and j
    if kind == "uniform":
        assert factors == pytest.approx([1 - j / num for j in range(num)])
    elif kind == "sqrt":
        assert factors == pytest.approx([1 - math.sqrt(j / num) for j in range(num)])
        assert c == sorted(c, reverse=True)
    else:
        assert [x / c[0] for x in c] == pytest.approx(range(1, num + 1))


# ---- values


def is_rounded(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether `result` is `exact`, in fp64 and itself not quite exact, rounded to fp32. An addition in fp32
    makes a larger error."""
    bound = exact.abs() * 2**-24 * (1 + 1e-6)
    return bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["uniform", "linear", "sqrt"])
def test_equals_the_average_by_hand(three: list[Weights], tmp_path: Path, kind: str) -> None:
    c = coefficients(kind, 3)
    size = write_average(three, c, {"weight", "bias"}, tmp_path / "average")
    values = [loaded(checkpoint.path) for checkpoint in three]
    result = loaded(tmp_path / "average")
    for name in ("weight", "bias"):
        stacked = torch.stack([v[name].double() for v in values], dim=-1)
        assert is_rounded(result[name], stacked @ torch.tensor(c, dtype=torch.float64))
        assert not is_rounded(result[name], stacked[..., -1])
        reverse = stacked @ torch.tensor(c[::-1], dtype=torch.float64)
        assert is_rounded(result[name], reverse) == (kind == "uniform"), "the control"
    assert result["bias_of_experts"].tolist() == [3.0, 3.0, 3.0]
    assert result["count"] == 30
    names = read_metadata(tmp_path / "average").state_dict_metadata
    assert names.keys() == {"model.weight", "model.bias", "model.bias_of_experts", "model.count"}
    assert size == (16 * 16 + 16 + 3) * 4 + 8


def test_is_a_checkpoint_of_its_own(three: list[Weights], tmp_path: Path) -> None:
    target = tmp_path / "made/here/average"
    write_average(three, [0.25, 0.25, 0.5], {"weight", "bias"}, target)
    assert commit.fault(target, 3) is None
    assert digest.first_fault(target, commit.digests(commit.read_manifest(target))) is None
    train, newest = read_train(target), read_train(three[-1].path)
    note = {"folder": "run/checkpoint", "steps": [1, 2, 3], "weights": [0.25, 0.25, 0.5]}
    assert train == newest | {"healthy": False, "averaged_from": note}
    assert (target / "job.toml").read_text() == (three[-1].path / "job.toml").read_text()
    assert [p.name for p in target.parent.iterdir()] == ["average"]
    again = tmp_path / "again"  # the same bytes, and an average of averages
    write_average([open_titanlite(target)] * 2, [0.5, 0.5], {"weight", "bias"}, again)
    for name, tensor in loaded(again).items():
        assert torch.equal(tensor, loaded(target)[name])


def in_memory(tensor: torch.Tensor, grid: list[tuple[slice, ...]], reads: list[int]) -> LazyTensor:
    """A stored tensor whose chunks are the slices of `grid`. `reads` gets the index of each chunk read."""

    def chunk(i: int, place: tuple[slice, ...]) -> Chunk:
        def load(region: tuple[slice, ...]) -> torch.Tensor:
            reads.append(i)
            return tensor[place][region]

        return Chunk(tuple(s.start for s in place), tuple(tensor[place].shape), load)

    chunks = [chunk(i, place) for i, place in enumerate(grid)]
    return LazyTensor(tuple(tensor.shape), tensor.dtype, Path("x"), chunks)


def test_chunks_of_different_layouts() -> None:
    """FSDP x TP, uneven FSDP, and one process: each chunk of the finer layouts is read once."""
    whole, rows = [(slice(0, 7), slice(0, 6))], [(slice(0, 3), slice(0, 6)), (slice(3, 7), slice(0, 6))]
    quarters = [(r, c) for r, _ in rows for c in (slice(0, 2), slice(2, 6))]
    tensors = [torch.randn(7, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for grids, num_chunks in (([quarters, rows, whole], 1), ([quarters, rows, rows], 2)):
        reads: list[list[int]] = [[], [], []]
        stored = [in_memory(t, grid, r) for t, grid, r in zip(tensors, grids, reads)]
        total = average._WeightedSum(list(zip(stored, (0.2, 0.3, 0.5))), lambda size: None)
        result = torch.full((7, 6), torch.nan)
        for chunk in total.chunks():
            region = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.shape))
            result[region] = total.read(region)
        assert is_rounded(result, sum(w * t.double() for w, t in zip((0.2, 0.3, 0.5), tensors)))
        assert len(total.chunks()) == num_chunks
        assert [sorted(r) for r in reads] == [list(range(len(grid))) for grid in grids]


def test_sums_in_fp64() -> None:
    """Of 2^24, 1 and -2^24 a sum in fp32 loses the 1."""
    numbers = [2.0**24, 1.0, -(2.0**24)]
    stored = [in_memory(torch.tensor([x]), [(slice(0, 1),)], []) for x in numbers]
    total = average._WeightedSum([(tensor, 1.0) for tensor in stored], lambda size: None)
    assert total.read((slice(0, 1),)).item() == 1.0
    assert sum(torch.tensor(x) for x in numbers) == 0.0


def test_holds_one_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is read, and of what is written, at most one chunk is in memory."""
    run, toy = open_run(tmp_path, identity=TOY), Toy()
    toy.net = torch.nn.Sequential(*(torch.nn.Linear(32, 32, bias=False) for _ in range(8)))  # type: ignore[assignment]
    toy.optimizer = torch.optim.AdamW(toy.net.parameters(), lr=0.1)
    for step in range(1, 4):
        toy.state.step = step
        run.save(toy.state)
    run.close()
    chunk = 32 * 32 * 4
    alive, peak, total = dict.fromkeys(("read", "made"), 0), dict.fromkeys(("read", "made"), 0), 0

    def tracked(kind: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any) -> torch.Tensor:
            nonlocal total
            tensor = function(*args)
            alive[kind] += tensor.nbytes
            total += tensor.nbytes
            peak[kind] = max(peak[kind], alive[kind])
            weakref.finalize(tensor, lambda size=tensor.nbytes: alive.update({kind: alive[kind] - size}))
            return tensor

        return call

    monkeypatch.setattr(dcp, "_load", tracked("read", dcp._load))
    monkeypatch.setattr(average._WeightedSum, "read", tracked("made", average._WeightedSum.read))
    checkpoints = checkpoints_in(tmp_path)
    sizes: list[int] = []
    write_average(
        checkpoints, [0.2, 0.3, 0.5], {f"{i}.weight" for i in range(8)}, tmp_path / "x", sizes.append
    )
    assert total == (3 + 1) * 8 * chunk
    assert peak == {"read": chunk, "made": chunk}
    assert sum(sizes) == sum(checkpoint.num_bytes for checkpoint in checkpoints) == 3 * 8 * chunk


# ---- refusals


def test_other_models_are_refused(three: list[Weights], tmp_path: Path) -> None:
    check_one_model(three)
    other = {**TOY, "model": {"name": "toy", "dim": 5}, "data": {**TOY["data"], "tokenizer": "x"}}
    save_steps(tmp_path / "other", 1, identity=other)[1].close()
    with pytest.raises(ConfigError) as error:
        check_one_model([*checkpoints_in(tmp_path / "other"), *three])
    assert str(error.value) == (
        f"{tmp_path}/other/checkpoint/step-1 is not of the same model as {tmp_path}/run/checkpoint/step-3: "
        "its model.dim is 5, not 4; its tokenizer is another one; its tensors have other names or shapes"
    )


# ---- faults


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", ["in the middle", "manifest", "rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_an_error_or_a_kill_leaves_nothing(
    three: list[Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: BaseException
) -> None:
    owner, name, matters = {
        "in the middle": (digest.HashingFile, "write", lambda self, data: len(calls) > 20),
        "manifest": (commit, "write_file", lambda path, data: path.name == "manifest.json"),
        "rename": (os, "rename", lambda old, new: Path(new).name == "average"),
    }[place]
    original, calls = getattr(owner, name), list[None]()

    def failing(*args: Any) -> Any:
        calls.append(None)
        if matters(*args):
            raise error
        return original(*args)

    monkeypatch.setattr(owner, name, failing)
    is_full = isinstance(error, OSError)
    message = "average could not be written: .*No space left on device" if is_full else None
    with pytest.raises(CheckpointError if is_full else KeyboardInterrupt, match=message):
        write_average(three, [0.2, 0.3, 0.5], {"weight", "bias"}, tmp_path / "new/average")
    assert left(tmp_path / "new") == []
    monkeypatch.undo()
    write_average(three, [0.2, 0.3, 0.5], {"weight", "bias"}, tmp_path / "new/average")
    assert left(tmp_path / "new") == ["average"]


def test_the_room_on_the_disk_is_checked_first(
    three: list[Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "SLACK", 1e15)
    with pytest.raises(CheckpointError, match=r"the average needs .* GiB, .* free; nothing is written"):
        write_average(three, [0.2, 0.3, 0.5], {"weight", "bias"}, tmp_path / "new/average")
    assert left(tmp_path / "new") == []


def test_values_that_are_not_finite_are_refused(three: list[Weights], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="an average is not finite; nothing is written"):
        write_average(three, [0.2, math.inf, 0.5], {"weight", "bias"}, tmp_path / "new/average")
    assert left(tmp_path / "new") == []


def test_a_shard_that_cannot_be_read(three: list[Weights], tmp_path: Path) -> None:
    shard = next(three[1].path.glob("*.distcp"))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    with pytest.raises(CheckpointError, match=r"step-2/__0_0.distcp: model.* cannot be read"):
        write_average(three, [0.2, 0.3, 0.5], {"weight", "bias"}, tmp_path / "new/average")
    assert left(tmp_path / "new") == []
