"""Damaged checkpoints: any damage to any file is found before the run trains on the checkpoint. The
checkpoint is quarantined, and the run that resumes from the checkpoint before it equals the run that was
never damaged.

The controls load the same damage with plain torch DCP, which raises no error."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.tensor import DTensor

import titanlite.files
from tests.support import ranks
from tests.support.checkpoints import Toy, names, open_run, sharded_toy
from tests.support.jobs import make_job, metrics_of
from tests.support.runs import history
from tests.support.tiers import sampled
from titanlite import cli
from titanlite.checkpoint import commit, writer
from titanlite.checkpoint.commit import CheckpointError
from titanlite.checkpoint.digest import first_fault
from titanlite.checkpoint.state import model_tensors
from titanlite.job import Job
from titanlite.train import train

WIDTH = 64
FILE_BYTES = 1 << 14  # of a shard, so that a rank has several
NAMES = [".metadata", "__0_0.distcp", "__0_3.distcp", "job.toml", "manifest.json", "train.json"]


def save_two(folder: Path, ranks: int = 1, file_bytes: int = FILE_BYTES) -> None:
    """Save steps 1 and 2 of a one-layer run. Called on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "FILE_BYTES", file_bytes)
        run, toy = open_run(folder), sharded_toy(ranks, WIDTH)
        for _ in range(2):
            toy.step()
            run.save(toy.state)
        run.close()


def start(folder: Path, ranks: int = 1, **config: Any) -> Toy:
    """A start of the program. Returns the step that it resumes from."""
    run, toy = open_run(folder, **config), sharded_toy(ranks, WIDTH, seed=7)
    try:
        run.load(toy.state)
    finally:
        run.close_after_error()
    return toy


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash with small buffers: clearing 8 MiB for each of the thousands of small files here would take
    long."""
    monkeypatch.setattr(titanlite.files, "READ_BYTES", 1 << 14)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one rank. Tests must not change it."""
    folder = tmp_path_factory.mktemp("saved")
    save_two(folder)
    assert {*NAMES} <= {p.name for p in (folder / "checkpoint/step-2").iterdir()}
    return folder


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of the run folder."""
    return shutil.copytree(saved, tmp_path / "run")


@pytest.fixture(scope="module")
def values(saved: Path) -> dict[int, list[torch.Tensor]]:
    """The values in the checkpoints of steps 1 and 2."""
    toy, outcomes = Toy(width=WIDTH), {}
    for step in (1, 2):
        toy.step()
        outcomes[step] = toy.values()
    assert all(torch.equal(a, b) for a, b in zip(start(saved).values(), outcomes[2]))
    return outcomes


def equal(toy: Toy, expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(toy.values(), expected))


def reason_of(step: Path) -> str | None:
    """The reason why a checkpoint is damaged, as `titanlite checkpoint verify` finds it."""
    try:
        whole = commit.fault(step, int(step.name[5:]))
        return whole or first_fault(step, commit.digests(commit.read_manifest(step)))
    except CheckpointError as e:  # of another format: the bit was in its number
        return str(e)


@contextmanager
def holding(file: Path, data: bytes) -> Iterator[None]:
    """Give `file` other contents during the body."""
    good = file.read_bytes()
    file.write_bytes(data)
    yield
    file.write_bytes(good)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """The data with one bit flipped."""
    place, bit = rng.randrange(len(data)), rng.randrange(8)
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


# ---- one bit


def test_every_flipped_bit_is_found(run: Path) -> None:
    rng, step = random.Random(0), run / "checkpoint/step-2"
    files = sorted(step.iterdir())
    for number in range(200):
        file = files[number % len(files)]
        with holding(file, flipped(file.read_bytes(), rng)):
            assert reason_of(step), f"flip {number}, in {file.name}"
    assert reason_of(step) is None


@pytest.mark.parametrize("name", sampled(NAMES, {"__0_0.distcp", "manifest.json"}))
def test_a_start_passes_over_flipped_bits(
    run: Path, values: dict[int, list[torch.Tensor]], name: str
) -> None:
    rng, step = random.Random(name), run / "checkpoint/step-2"
    for number in range(8):
        with holding(step / name, flipped((step / name).read_bytes(), rng)):
            toy = start(run)
            found = toy.state.step, toy.state.num_sequences, int(toy.state.tokens)
            assert found == (1, 8, 80), f"flip {number}"
            assert equal(toy, values[1])
            assert names(run) == ["quarantined-step-2-0", "step-1"]
            step.with_name("quarantined-step-2-0").rename(step)
    assert equal(start(run), values[2])


def load_plainly(step: Path) -> dict[str, torch.Tensor]:
    """The weights as torch DCP reads them."""
    tensors = {name: torch.zeros_like(t) for name, t in model_tensors(Toy(width=WIDTH).net).items()}
    load({"model": tensors}, storage_reader=FileSystemReader(step), no_dist=True)
    return tensors


def test_control_plain_dcp_loads_flipped_bits_in_silence(
    run: Path, values: dict[int, list[torch.Tensor]]
) -> None:
    rng, step = random.Random(0), run / "checkpoint/step-2"
    good = load_plainly(step)
    assert torch.equal(good["weight"], values[2][0])
    (file,) = [p for p in step.glob("*.distcp") if good["weight"].numpy().tobytes() in p.read_bytes()]
    wrong = 0
    for _ in range(40):
        data = flipped(file.read_bytes(), rng)
        with holding(file, data):
            assert reason_of(step)
            try:
                loaded = load_plainly(step)
            except BaseException:  # DCP's own is one
                continue
            # Not torch.equal, for which a bit may make a NaN.
            wrong += any(loaded[name].numpy().tobytes() != good[name].numpy().tobytes() for name in good)
    assert wrong > 20, f"{wrong} of 40 flips gave wrong weights; the rest fell into what the zip file ignores"


# ---- larger damage


def zero_a_page(data: bytes) -> bytes:
    return data[:4096] + bytes(4096) + data[8192:]


LARGER: dict[str, Callable[[bytes], bytes]] = {
    "shorter by one": lambda data: data[:-1],
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer by one": lambda data: data + b"\0",
    "longer by a page": lambda data: data + bytes(4096),
    "twice": lambda data: data + data,
    "a zeroed page": lambda data: zero_a_page(data) if len(data) > 8192 else bytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("kind", LARGER)
def test_larger_damage_of_any_file_is_found(
    run: Path, values: dict[int, list[torch.Tensor]], kind: str
) -> None:
    step = run / "checkpoint/step-2"
    for file in step.iterdir():
        with holding(file, LARGER[kind](file.read_bytes())):
            unchanged = kind == "shorter by one" and file.name == "manifest.json"  # the last line's end
            assert unchanged or reason_of(step), file.name
    file = step / "__0_0.distcp"
    file.write_bytes(LARGER[kind](file.read_bytes()))
    assert equal(start(run), values[1])


def test_a_missing_file_is_found(run: Path, values: dict[int, list[torch.Tensor]]) -> None:
    step = run / "checkpoint/step-2"
    for file in list(step.iterdir()):
        file.rename(run / "elsewhere")
        assert reason_of(step) == f"{file.name} is missing"
        toy = start(run)
        assert equal(toy, values[1]), file.name
        step.with_name("quarantined-step-2-0").rename(step)
        (run / "elsewhere").rename(file)
    assert equal(start(run), values[2])


def test_metadata_of_another_layout_is_found(run: Path, tmp_path: Path) -> None:
    """As if the file were left from an earlier save. The file of the step before is the same, by design."""
    step = run / "checkpoint/step-2"
    assert (step / ".metadata").read_bytes() == (step.with_name("step-1") / ".metadata").read_bytes()
    save_two(tmp_path / "other", file_bytes=1 << 30)
    shutil.copy(tmp_path / "other/checkpoint/step-2/.metadata", step)
    assert reason_of(step)
    assert start(run).state.step == 1


# ---- how much is verified


def flip_a_weight(step: Path, weight: torch.Tensor) -> None:
    """Flip the sign of a weight."""
    number = weight.flatten()[100:110].numpy().tobytes()
    (file,) = [p for p in step.glob("*.distcp") if number in p.read_bytes()]
    data = bytearray(file.read_bytes())
    data[data.index(number) + 3] ^= 128
    file.write_bytes(data)


def test_half_files_and_a_flipped_weight_are_found(run: Path, values: dict[int, list[torch.Tensor]]) -> None:
    step = run / "checkpoint/step-2"
    for name in ("job.toml", "train.json", "__0_0.distcp"):
        with holding(step / name, LARGER["half"]((step / name).read_bytes())):
            assert start(run).state.step == 1
            step.with_name("quarantined-step-2-0").rename(step)
    flip_a_weight(step, values[2][0].detach())
    assert equal(start(run), values[1])
    (run / "checkpoint/step-1/manifest.json").write_text("{}")
    shutil.rmtree(step, ignore_errors=True)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        start(run)


# ---- two ranks


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two ranks. Tests must not change it."""
    folder = tmp_path_factory.mktemp("two")
    ranks.run(2, save_two, folder, 2)
    return folder


def outcome_on_rank(folder: Path, config: dict[str, Any]) -> tuple[int, str] | tuple[str, str]:
    """The step that a rank resumes from and its weights, or its error."""
    try:
        toy = start(folder, 2, **config)
    except CheckpointError as e:
        return type(e).__name__, str(e)
    sums = [p.full_tensor().sum().item() for p in model_tensors(toy.net).values() if isinstance(p, DTensor)]
    return toy.state.step, str(sums)


@pytest.fixture(scope="module")
def good(two: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """The step and the weights that two ranks resume from."""
    run = shutil.copytree(two, tmp_path_factory.mktemp("good") / "run")
    return ranks.run(2, outcome_on_rank, run, {})[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        "train.json",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("__0_0.distcp", "__1_1.distcp", ".metadata", "manifest.json")
        ),
    ],
)
def test_all_ranks_pass_over_what_one_of_them_found(
    two: Path, good: tuple[int, str], tmp_path: Path, run_on: Callable[..., list[Any]], name: str
) -> None:
    run = shutil.copytree(two, tmp_path / "run")
    file = run / "checkpoint/step-2" / name
    file.write_bytes(flipped(file.read_bytes(), random.Random(1)))
    one, other = run_on(2, outcome_on_rank, run, {})
    assert (one, good[0]) == (other, 2)
    assert one[0] == 1
    assert one[1] != good[1]
    assert names(run) == ["quarantined-step-2-0", "step-1"]
    (run / "checkpoint/step-1/__1_0.distcp").write_bytes(b"")
    errors = run_on(2, outcome_on_rank, run, {})
    assert errors[0] == errors[1]
    assert errors[0][0] == "CheckpointError"


def test_two_ranks_share_what_one_wrote(
    saved: Path, tmp_path: Path, run_on: Callable[..., list[Any]]
) -> None:
    """The files are distributed anew, and each is hashed by one rank."""
    files = sorted(p.name for p in (saved / "checkpoint/step-2").glob("*.distcp"))
    assert len(files) > 3
    for number, name in enumerate(files):
        run = shutil.copytree(saved, tmp_path / str(number))
        file = run / "checkpoint/step-2" / name
        file.write_bytes(flipped(file.read_bytes(), random.Random(1)))
        assert [step for step, _ in run_on(2, outcome_on_rank, run, {})] == [1, 1], name


def swap_rank_files(checkpoint: Path) -> None:
    one, other = checkpoint / "step-2/__0_0.distcp", checkpoint / "step-2/__1_0.distcp"
    one.rename(checkpoint / "between")
    other.rename(one)
    (checkpoint / "between").rename(other)


def take_from_another_step(checkpoint: Path) -> None:
    """Replace all files of rank 1: the mix of two states that overwriting in place can leave."""
    for file in (checkpoint / "step-1").glob("__1_*.distcp"):
        shutil.copy(file, checkpoint / "step-2")


@pytest.mark.full
@pytest.mark.parametrize("damage", [swap_rank_files, take_from_another_step])
def test_shards_of_the_same_size_in_the_wrong_place(
    two: Path, tmp_path: Path, run_on: Callable[..., list[Any]], damage: Callable[[Path], None]
) -> None:
    run = shutil.copytree(two, tmp_path / "run")
    step = run / "checkpoint/step-2"
    good = load_plainly(step)
    sizes = {p.name: p.stat().st_size for p in step.iterdir()}
    damage(run / "checkpoint")
    assert {p.name: p.stat().st_size for p in step.iterdir()} == sizes
    assert not torch.equal(load_plainly(step)["weight"], good["weight"])  # control: in silence
    assert "SHA-256 differs" in str(reason_of(step))
    assert [outcomes for outcomes, _ in run_on(2, outcome_on_rank, run, {})] == [1, 1]


# ---- the whole run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> dict[int, Job]:
    """Uninterrupted runs of 8 and of 12 steps, saved every 4 steps."""
    jobs = {}
    for steps in (8, 12):
        jobs[steps] = make_job(tmp_path_factory.mktemp("whole"), corpus, f"--training.steps={steps}")
        train(jobs[steps])
    return jobs


def state(job: Job, step: int) -> dict[str, Any]:
    """The digests of the state in a checkpoint."""
    files = commit.digests(commit.read_manifest(job.folder / f"checkpoint/step-{step}"))
    return {name: digest for name, digest in files.items() if name != "job.toml"}


def damage_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        (step / name).write_bytes(change((step / name).read_bytes()))

    return damage


def from_the_step_before(step: Path) -> None:
    shutil.copy(step.with_name("step-4") / "__0_0.distcp", step)


DAMAGES = {
    "flipped shard": damage_file("__0_0.distcp", lambda data: flipped(data, random.Random(2))),
    "short .metadata": damage_file(".metadata", LARGER["half"]),
    "zeroed train.json": damage_file("train.json", LARGER["zeros"]),
    "flipped manifest": damage_file("manifest.json", lambda data: flipped(data, random.Random(3))),
    "no shard": lambda step: (step / "__0_0.distcp").unlink(),
    "old shard": from_the_step_before,
}
CHOSEN = ("flipped manifest", "old shard")  # that each kind is found is shown above, by shorter starts


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind in CHOSEN else pytest.param(kind, marks=pytest.mark.full) for kind in DAMAGES]
)
def test_the_run_goes_on_from_the_one_before(
    whole: dict[int, Job], tmp_path: Path, corpus: Path, kind: str
) -> None:
    shutil.copytree(whole[8].folder, tmp_path / "run")
    DAMAGES[kind](tmp_path / "run/checkpoint/step-8")
    job = make_job(tmp_path, corpus, "--training.steps=12")
    train(job)
    assert history(job) == history(whole[12])
    assert names(job.folder) == ["quarantined-step-8-0", "step-12", "step-4", "step-8"]
    for step in (8, 12):
        assert state(job, step) == state(whole[12], step)


def test_a_run_of_damaged_checkpoints_ends(whole: dict[int, Job], tmp_path: Path, corpus: Path) -> None:
    shutil.copytree(whole[8].folder, tmp_path / "run")
    job = make_job(tmp_path, corpus, "--training.steps=12")
    folder = job.folder / "checkpoint"
    DAMAGES["flipped shard"](folder / "step-8")
    DAMAGES["zeroed train.json"](folder / "step-4")

    def contents() -> list[tuple[Path, bytes]]:
        return sorted((p, p.read_bytes()) for p in folder.rglob("*") if p.is_file())

    before, metrics = contents(), history(job)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"no usable checkpoint in .*to start at step 1") as e:
            train(job)
        assert e.value.exit_code == 3
    where = [str(tmp_path / "job.toml"), f"--job.dump_folder={job.folder}"]
    assert cli.run(["train", *where, f"--data.cache_dir={corpus / 'cache'}"]) == 3
    assert contents() == before
    assert history(job) == metrics


@pytest.mark.full
def test_damaged_files_for_people_do_not_stop_a_run(tmp_path: Path, corpus: Path) -> None:
    options = ["--generation.prompts=['a']", "--generation.freq=2"]
    train(make_job(tmp_path, corpus, "--training.steps=4", *options))
    folder = tmp_path / "run"
    for name in ("metrics.jsonl", "samples.txt"):
        (folder / name).write_bytes(b"\xff\n" + (folder / name).read_bytes())
    job = make_job(tmp_path, corpus, *options)
    assert train(job) == 0
    assert [values["step"] for values in metrics_of(job)] == list(range(1, 9))
    assert (folder / "samples.txt").read_text().count("--- step ") == 4
    assert (folder / "metrics.superseded.jsonl").read_bytes().startswith(b"\xff\n")
