"""The reader: nothing in a checkpoint is executed, a file that is no checkpoint is a CheckpointError, and
only tensors that fit exactly are loaded."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.support.checkpoints import Toy, save_steps
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.reader import ALLOWED, _Unpickler, load_tensors, read_metadata
from titanlite.optim.base import make_state


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A committed checkpoint."""
    save_steps(tmp_path, 1)[1].close()
    return tmp_path / "checkpoint/step-1"


def load_into(step: Path, seed: int = 1) -> Toy:
    """Load the checkpoint into a new run."""
    toy = Toy(seed=seed)
    make_state(toy.optimizer)
    load_tensors(step, toy.state.tensors())
    return toy


# ---- code in a checkpoint


class Calls:
    """Is pickled as a function call."""

    def __init__(self, function: Callable[..., Any], *args: Any):
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def by_reduce(target: Path) -> bytes:
    return pickle.dumps(Calls(os.system, f"touch {target}"))


def inside_metadata(target: Path) -> bytes:
    """The pickle in a field of an object whose class is allowed."""
    return pickle.dumps(Metadata({}, planner_data=Calls(os.system, f"touch {target}")))


def by_eval(target: Path) -> bytes:
    return pickle.dumps(Calls(eval, f"open({str(target)!r}, 'w')"))


def by_an_old_protocol(target: Path) -> bytes:
    return pickle.dumps(Calls(os.system, f"touch {target}"), protocol=0)


def by_inst(target: Path) -> bytes:
    """The oldest pickle opcode that calls a function."""
    return b"(S'touch " + str(target).encode() + b"'\nios\nsystem\n."


def by_attribute_of_an_allowed_class(target: Path) -> bytes:
    """Dotted names reach into a class; PosixPath itself is allowed."""
    name = str(target).encode()
    path = b"\x8c\x07pathlib\x8c\x09PosixPath\x93\x8c" + bytes([len(name)]) + name + b"\x85R"
    return b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.touch\x93" + path + b"\x85R."


PAYLOADS = [
    by_reduce,
    inside_metadata,
    by_eval,
    by_an_old_protocol,
    by_inst,
    by_attribute_of_an_allowed_class,
]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_metadata_is_not_executed(step: Path, tmp_path: Path, payload: Callable[[Path], bytes]) -> None:
    written = tmp_path / "proof"
    (step / ".metadata").write_bytes(payload(written))
    with pytest.raises(CheckpointError, match="no checkpoint contains"):
        load_into(step)
    assert not written.exists()
    pickle.loads((step / ".metadata").read_bytes())  # control: what torch's own reader does
    assert written.exists()


def test_a_shard_is_not_executed(step: Path, tmp_path: Path) -> None:
    written = tmp_path / "proof"
    shard = next(step.glob("*.distcp"))
    buffer = io.BytesIO()
    torch.save({"w": Calls(os.system, f"touch {written}")}, buffer)
    shard.write_bytes(buffer.getvalue())
    metadata = read_metadata(step)
    for info in metadata.storage_data.values():  # each tensor is the whole file
        info.offset, info.length = 0, len(buffer.getvalue())
    metadata.storage_meta = None
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_into(step)
    assert not written.exists()
    torch.load(shard, weights_only=False)  # control
    assert written.exists()


@pytest.mark.parametrize("name", ["../step-1/__0_0.distcp", "/etc/passwd", "a/b.distcp", "..", ""])
def test_metadata_does_not_reach_other_files(step: Path, name: str) -> None:
    metadata = read_metadata(step)
    for info in metadata.storage_data.values():
        info.relative_path = name
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="which is outside the checkpoint"):
        load_into(step)


def test_only_plain_data_is_allowed() -> None:
    assert {module.partition(".")[0] for module, _ in ALLOWED} == {"torch", "pathlib"}
    assert not any("." in name for _, name in ALLOWED)
    assert len(ALLOWED) < 60 + sum(isinstance(value, torch.dtype) for value in vars(torch).values())


def test_everything_that_plain_dcp_writes_can_be_read(tmp_path: Path) -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8]
    dtypes += [torch.bool, torch.complex64]
    tensors = {"model": {str(dtype): torch.ones(3, 2).to(dtype) for dtype in dtypes}}
    save({**tensors, "other": {"a number": 5, "a list": [1, 2]}}, checkpoint_id=tmp_path, no_dist=True)
    into = {"model": {name: torch.zeros_like(t) for name, t in tensors["model"].items()}}
    load_tensors(tmp_path, into)
    for name, tensor in tensors["model"].items():
        assert torch.equal(into["model"][name].to(torch.complex64), tensor.to(torch.complex64)), name


# ---- what is no checkpoint


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Ran out of input"),
        (b"\x80\x04", "cannot be read"),
        (b"not a pickle", "cannot be read"),
        (pickle.dumps({"state_dict_metadata": {}}), "but a dict"),
        (pickle.dumps(None), "but a NoneType"),
        (None, "No such file"),
    ],
    ids=["empty", "torn", "text", "dict", "None", "missing"],
)
def test_what_is_no_metadata_is_a_checkpoint_error(step: Path, data: bytes | None, message: str) -> None:
    (step / ".metadata").unlink()
    if data is not None:
        (step / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        load_into(step)
    assert error.value.exit_code == 3


def test_a_missing_and_a_short_shard_are_checkpoint_errors(step: Path) -> None:
    shard = next(step.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_into(step)
    shard.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        load_into(step)


# ---- strictness (test_checkpointer.py has the cases of one tensor)


def test_a_whole_part_may_be_left_out_but_not_half_of_one(step: Path) -> None:
    toy = load_into(step)
    wanted = toy.state.tensors()
    load_tensors(step, {"model": wanted["model"]})  # as generate does
    half = dict(list(wanted["optimizer"].items())[1:])
    with pytest.raises(CheckpointError, match=r"optimizer\.\w+\.\w+ is unexpected"):
        load_tensors(step, {"model": wanted["model"], "optimizer": half})
    with pytest.raises(CheckpointError, match=r"ema\.weight is missing"):
        load_tensors(step, {**wanted, "ema": {"weight": torch.zeros(4, 4)}})


def test_a_refused_load_changes_nothing(step: Path) -> None:
    toy = Toy(seed=5)
    before = toy.values()
    wanted = {"model": {**dict(toy.net.named_parameters()), "more": torch.zeros(1)}}
    with pytest.raises(CheckpointError, match=r"model\.more is missing"):
        load_tensors(step, wanted)
    assert all(torch.equal(a, b) for a, b in zip(toy.values(), before))


def test_control_plain_dcp_casts_and_ignores(step: Path) -> None:
    """The reason for the strict checks: plain DCP raises no error here."""
    weight = torch.zeros(4, 4, dtype=torch.float64)
    load({"model": {"weight": weight}}, storage_reader=FileSystemReader(step), no_dist=True)
    assert torch.equal(weight.float(), load_into(step).net.weight)
    with pytest.raises(CheckpointError, match=r"float32, the model's is torch\.float64"):
        load_tensors(step, {"model": {"weight": weight, "bias": torch.zeros(4)}})


def test_all_problems_are_named_up_to_three(step: Path) -> None:
    wanted = {"model": {f"t{i}": torch.zeros(1) for i in range(4)}}
    with pytest.raises(CheckpointError, match=r"model\.bias is unexpected; .* \(and 3 more\)"):
        load_tensors(step, wanted)


def test_a_path_written_by_python_3_13_is_read() -> None:
    """Python 3.13 has its path classes in another module; other names of that module are refused."""
    assert str(_Unpickler(io.BytesIO(b"cpathlib._local\nPosixPath\n(S'/a'\nS'b'\ntR.")).load()) == "/a/b"
    with pytest.raises(pickle.UnpicklingError, match=r"pathlib\._local\.os"):
        _Unpickler(io.BytesIO(b"cpathlib._local\nos\n.")).load()
