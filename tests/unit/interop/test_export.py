"""`titanlite export` and `titanlite import` as a user starts them: what transformers opens afterwards, what a
run exports by itself and when, and what is left after a mistake: nothing."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.foreign import random_tensors, reference_logits, write_meta, write_torchtitan
from tests.support.jobs import make_job, write_toml
from tests.support.models import SCALED, family, row, tensors_in
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.interop.dcp import open_titanlite
from titanlite.interop.export import ExportFormat, write_directory
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import ModelAndTokenizer, mismatches
from titanlite.job import Job, load_job
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.tokenizers.bytes import Bytes
from titanlite.tools.verbs import parse_size
from titanlite.train import train

transformers = pytest.importorskip("transformers")
UNTIED = "--model.overrides.tie_word_embeddings=false"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Job:
    """A run with the steps 4 and 8."""
    job = make_job(tmp_path_factory.mktemp("run"), corpus, UNTIED)
    train(job)
    return job


def trained(job: Job, step: int) -> dict[str, torch.Tensor]:
    net = job.model.build()
    load_tensors(job.folder / f"checkpoint/step-{step}", {"model": model_tensors(net)})
    return {name: p.detach() for name, p in net.named_parameters()}


def test_any_step_is_exported_offline(run: Job, tmp_path: Path, capsys) -> None:
    steps = {"run": (run.folder, 8), "step": (run.folder / "checkpoint/step-4", 4)}
    for name, (source, step) in steps.items():
        target = tmp_path / name
        assert (
            cli.run(["export", str(source), str(target), "--dtype", "float32", "--max-shard-size", "20KB"])
            == 0
        )
        said = capsys.readouterr()
        assert f"{target}: llama3 debug from " in said.out
        assert said.err.startswith(f"titanlite: using {run.folder}/checkpoint/step-{step}\n")
        ours, theirs = trained(run, step), tensors_in(target)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in theirs.values())
        files = sorted(target.glob("*.safetensors"))
        assert sorted({*index["weight_map"].values()}) == [file.name for file in files]
        assert len(files) > 3
        for file in files:  # a tensor that is larger has a file of its own
            assert file.stat().st_size < 21_000 + 1000 or len(tensors_in_file(file)) == 1


def tensors_in_file(file: Path) -> list[str]:
    from safetensors import safe_open

    return list(safe_open(file, framework="pt").keys())


def test_what_is_exported_opens_with_nothing_added(run: Job, tmp_path: Path) -> None:
    assert cli.run(["export", str(run.folder), str(tmp_path / "it")]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "it")
    assert model.dtype == torch.bfloat16
    ids = tokenizer("abc", return_tensors="pt")
    assert ids.input_ids.tolist() == [[256, 97, 98, 99]]
    out = model.generate(**ids, max_new_tokens=3, do_sample=False)  # reads generation_config.json
    assert model.generation_config.eos_token_id == 257
    assert out.shape[1] <= 7
    net = run.model.build()
    net.load_state_dict(trained(run, 8))
    net.to(torch.bfloat16)
    with torch.no_grad():
        assert net(ids.input_ids)[0, -1].argmax() == model(**ids).logits[0, -1].argmax()


@pytest.mark.parametrize("source", ["torchtitan", "meta"])
def test_import_makes_a_directory_of_what_is_foreign(
    tmp_path: Path, corpus: Path, source: str, capsys
) -> None:
    model_family = family(**SCALED, tie_word_embeddings=False)
    w = random_tensors(model_family.config)
    if source == "meta":
        path = write_meta(tmp_path / "source", w, model_family.config, 2)
    else:
        path = write_torchtitan(tmp_path / "source", w)
    config = write_toml(tmp_path, corpus)
    model = [f"--model.overrides.{key}={str(value).lower()}" for key, value in model_family.overrides.items()]
    assert cli.run(["import", str(path), str(tmp_path / "it"), str(config), *model]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "it")
    assert theirs.dtype == torch.float32  # as it is
    with torch.no_grad():
        assert (theirs(row()).logits - reference_logits(w, model_family.config, row())).abs().max() < 1e-4


def test_a_buffer_that_is_state_is_exported(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, values = Llama3.build, {"bias": torch.tensor([0.5, 2.0]), "num_updates": torch.tensor([7, 8])}

    def with_buffers(model_family: Llama3) -> Decoder:
        net = build(model_family)
        for name, value in values.items():
            net.register_buffer(name, torch.empty_like(value, device=next(net.parameters()).device))
        monkeypatch.setattr(type(net), "initial_buffer", lambda net, name: values[name])
        return net

    monkeypatch.setattr(Llama3, "build", with_buffers)
    job = make_job(tmp_path, corpus, "--training.steps=1")
    train(job)
    assert cli.run(["export", str(job.folder), str(tmp_path / "it"), "--dtype", "float32"]) == 0
    exported = open_hugging_face(tmp_path / "it")
    with torch.device("meta"):
        assert mismatches(exported, job.model.build()) == []
    assert all(torch.equal(tensors_in(tmp_path / "it")[name], value) for name, value in values.items())


# ---- runs and their exports


def test_an_export_is_not_taken_for_a_checkpoint(run: Job, tmp_path: Path, capsys) -> None:
    exported = tmp_path / "hf/step-1"
    assert cli.run(["export", str(run.folder), str(exported)]) == 0
    for place in (exported.parent, exported):
        complaint("export", place, tmp_path / "no")
        assert f"{exported} is not a checkpoint but an export" in capsys.readouterr().err


def test_a_split_that_cannot_be_exported_is_told(tmp_path: Path, corpus: Path, capsys) -> None:
    tokenizer = ["--tokenizer.name=tiktoken", r"--tokenizer.pattern=\p{Script=Latin}+|.|\n"]
    job = make_job(tmp_path, corpus, *tokenizer, "--model.overrides.vocab_size=8192", "--training.steps=1")
    train(job)
    complaint("export", job.folder, tmp_path / "out")
    assert "tokenizers cannot run this tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_transformers_does_with_a_qwen2_tokenizer_is_told(tmp_path: Path, corpus: Path, capsys) -> None:
    for name in ("qwen2", "qwen3"):
        job = make_job(tmp_path, corpus, f"--model.name={name}", "--training.steps=1", name=name)
        train(job)
        capsys.readouterr()
        assert cli.run(["export", str(job.folder), str(tmp_path / f"{name}-export")]) == 0
        assert ("PreTrainedTokenizerFast, not AutoTokenizer" in capsys.readouterr().err) == (name == "qwen2")


# ---- bad input


def complaint(*argv: object, code: int = 2) -> None:
    """Run a verb, which must end with this exit code."""
    assert cli.run([str(a) for a in argv]) == code


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("7", 7),
        ("20KB", 20_000),
        ("1.5MB", 1_500_000),
        ("5GB", 5 * 10**9),
        ("2 GiB", 2 << 30),
        ("1mib", 1 << 20),
    ],
)
def test_a_size_is_read_with_its_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_mistakes_are_told_and_leave_nothing(run: Job, tmp_path: Path, capsys, corpus: Path) -> None:
    target = tmp_path / "it"
    copy = tmp_path / "copy"
    shutil.copytree(run.folder / "checkpoint/step-8", copy)
    shard = next(copy.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    complaint("export", copy, target, code=3)
    assert f"{copy} is damaged: {shard.name} is not what was written" in capsys.readouterr().err
    complaint("export", tmp_path / "nowhere", target)
    assert "no such directory" in capsys.readouterr().err
    complaint("export", run.folder, target, "--max-shard-size", "many")
    assert "argument --max-shard-size: 'many' is not a size" in capsys.readouterr().err
    target.mkdir()
    complaint("export", run.folder, target)
    assert f"{target} exists" in capsys.readouterr().err
    target.rmdir()
    config = write_toml(tmp_path, corpus)
    complaint("import", run.folder, target, config)  # the file's model is tied
    assert "tie_word_embeddings is False, the job's True" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy", "job.toml"]


@pytest.mark.full
def test_another_tokenizer_than_the_runs_is_refused(run: Job, tmp_path: Path, capsys, corpus: Path) -> None:
    ranks = Path(__file__).resolve().parents[3] / "assets/tokenizer/stdlib.tiktoken"
    shutil.copy(ranks, tmp_path / "mine.tiktoken")
    job = make_job(
        tmp_path, corpus, "--training.steps=1", "--model.overrides.vocab_size=8192",
        f"--tokenizer={{name = 'tiktoken', path = '{tmp_path / 'mine.tiktoken'}'}}",
    )  # fmt: skip
    train(job)
    lines = ranks.read_text().splitlines()
    (tmp_path / "mine.tiktoken").write_text("\n".join(lines[:-1]) + "\n")
    assert cli.run(["export", str(job.folder), str(tmp_path / "by the copy")]) == 0
    shutil.move(job.folder, tmp_path / "moved")
    assert cli.run(["generate", str(tmp_path / "moved"), "--prompt=a", "--max-new-tokens=1"]) == 0
    shutil.move(tmp_path / "moved", job.folder)
    (job.folder / "tokenizer/tokenizer.tiktoken").unlink()
    complaint("export", job.folder, tmp_path / "it")
    said = capsys.readouterr().err
    assert f"mine.tiktoken is another one, and there is no {job.folder}/tokenizer/tokenizer.tiktoken" in said
    step, now = job.folder / "checkpoint/step-1", f"--tokenizer.path={tmp_path / 'mine.tiktoken'}"
    assert "If the tokenizer is somewhere else, run " in said
    assert f" `titanlite import {step} DIR CONFIG.toml --tokenizer" in said
    assert "job.toml" not in said, "a recorded job.toml may come from elsewhere, and its imports with it"
    complaint("import", step, tmp_path / "it", step / "job.toml")
    assert "was trained with another tokenizer" in capsys.readouterr().err
    start = [f"--checkpoint.initial_load_path={step}", now, "--training.steps=1"]
    start += ["--model.overrides.vocab_size=8192", "--tokenizer.name=tiktoken"]
    with pytest.raises(
        ConfigError, match=r"another tokenizer .* start from a directory made by `titanlite export`"
    ):
        train(make_job(tmp_path, corpus, *start, name="again"))
    shutil.copy(ranks, tmp_path / "mine.tiktoken")
    assert cli.run(["export", str(job.folder), str(tmp_path / "it")]) == 0
    (tmp_path / "mine.tiktoken").rename(tmp_path / "moved.tiktoken")
    moved = f"--tokenizer.path={tmp_path / 'moved.tiktoken'}"
    assert cli.run(["import", str(step), str(tmp_path / "from"), str(step / "job.toml"), moved]) == 0
    copy = job.folder / "tokenizer/tokenizer.tiktoken"
    shutil.copy(ranks, copy)
    with pytest.raises(ConfigError, match=rf"mine\.tiktoken.*: --tokenizer\.path={copy}$"):
        train(job)
    train(load_job(job.folder / "job.toml", [f"--tokenizer.path={copy}"]))
    with pytest.raises(ConfigError, match=rf"; a run has a copy: --tokenizer\.path={copy}$"):
        train(make_job(tmp_path, corpus, *start, name="branch"))


# ---- a family without a Hugging Face form


def test_a_family_without_a_hugging_face_form(tmp_path: Path, corpus: Path, capsys) -> None:
    """It may start from its own runs; an export is refused."""
    own = [
        "--job.imports=['tests.support.parallel_residual']",
        "--model={name='parallel_residual', flavor='tiny'}",
    ]
    own.append("--training.steps=1")
    train(make_job(tmp_path, corpus, *own, name="first"))
    start = f"--checkpoint.initial_load_path={tmp_path / 'first'}"
    assert train(make_job(tmp_path, corpus, *own, start, name="second")) == 0
    complaint("export", tmp_path / "first", tmp_path / "it")
    said = capsys.readouterr().err
    assert (
        "would run the code of tests.support.parallel_residual; if you trust it, add --allow-imports" in said
    )
    complaint("export", tmp_path / "first", tmp_path / "new/it", "--allow-imports")
    assert not (tmp_path / "new").exists()


# ---- memory


def kib(name: str) -> int:
    """Of this process. VmRSS: its memory now, VmHWM: the most there was."""
    return int(re.search(name + r":\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def peak_of_an_export(
    step: Path, warm: Path, target: Path, limit: int, model_family: dict, tiny: dict
) -> int:
    """In a process of its own: bytes that an export in files of `limit` bytes needs at its peak, beyond what
    the export of a tiny model has left."""
    small, large = (ModelAndTokenizer(family(**shape), Bytes().build()) for shape in (tiny, model_family))
    write_directory(
        open_titanlite(warm, small.family), target.with_name("warm"), small, ExportFormat(torch.bfloat16)
    )
    Path("/proc/self/clear_refs").write_text("5")  # the most there was is what there is now
    before = kib("VmRSS")
    write_directory(open_titanlite(step, large.family), target, large, ExportFormat(torch.bfloat16, limit))
    return (kib("VmHWM") - before) * 1024


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_export_holds_less_than_its_largest_file(tmp_path: Path, run_on: Callable[..., list[Any]]) -> None:
    """A model in the proportions of 8B, with 1/256 of its parameters in as many layers, in files of 1/256 of
    5 GB; from a checkpoint in fp32 that one rank wrote, so that its chunks are whole tensors."""
    from tests.support.checkpoints import open_run, state_of

    shape = {
        "dim": 256, "n_layers": 32, "n_heads": 8, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 896,
        "vocab_size": 8016, "tie_word_embeddings": False,
    }  # fmt: skip
    tiny = {**shape, "dim": 64, "n_layers": 1, "vocab_size": 320, "hidden_dim": 64}
    for name, model_family in (("large", shape), ("tiny", tiny)):
        net = family(**model_family).build()
        for p in net.parameters():
            p.data.zero_()
        identity = {"model": {"name": "llama3", **vars(family(**model_family).config)}}
        run = open_run(tmp_path / name, identity, async_mode="disabled")
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        run.save(state_of(net, optimizer, step=1))
        run.close()
        del net, optimizer
    limit = 5 * 10**9 // 256
    where = [tmp_path / name for name in ("large", "tiny", "out")]
    (peak,) = run_on(1, peak_of_an_export, *where, limit, shape, tiny)
    largest = max(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    model = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert model > 2.5 * largest
    assert 0 < peak < 1.3 * largest, f"{peak:,} bytes, {largest:,} the largest file"
