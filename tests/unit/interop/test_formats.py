"""Checkpoints of adapters: merged into their base model, or exported for PEFT, which computes the same logits
and gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.support.jobs import make_job
from tests.support.models import VARIANTS, family, hugging_face, keys_of, random_net, row, tensors_in
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import saved_tensors
from titanlite.config.component import ConfigError
from titanlite.config.json_file import read_object
from titanlite.interop import initial
from titanlite.interop.dcp import open_titanlite
from titanlite.interop.formats import digests, fingerprint, open_checkpoint, open_weights
from titanlite.job import Job
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.lora import LoRA
from titanlite.train import train

FAMILY = family(tie_word_embeddings=False, residual_scale=0.3)  # an export folds the scale into weights
KEYS = [*keys_of(FAMILY), "--optimizer.lr=0.05", "--checkpoint.interval=2"]
KEYS += ["--lora.enable", "--lora.rank=3", "--lora.alpha=8"]
TARGETS = '--lora.targets=["q_proj", "o_proj", "0.mlp.*"]'


class Trained:
    """A run of adapters on a base run. `net`: the model that it ended with."""

    def __init__(self, folder: Path, corpus: Path):
        self.folder = folder
        self.base = make_job(folder, corpus, *keys_of(FAMILY), "--training.steps=1", name="base")
        train(self.base)
        path = f"--checkpoint.initial_load_path={self.base.folder / 'checkpoint/step-1'}"
        job = make_job(folder, corpus, *KEYS, TARGETS, path, "--training.steps=3", name="run")
        train(job)
        self.job, self.net = job, self.load(job)

    def load(self, job: Job) -> Decoder:
        net = job.build_on_meta().to_empty(device="cpu")
        base = self.base_tensors()
        load_tensors(job.folder / "checkpoint/step-3", {"model": saved_tensors(net)})
        for name, p in net.named_parameters():
            if not p.requires_grad:
                p.data.copy_(base[name])
        return net

    def base_tensors(self) -> dict[str, torch.Tensor]:
        tensors = open_titanlite(self.base.folder).tensors
        return {name: t.read(tuple(slice(0, n) for n in t.shape)) for name, t in tensors.items()}

    def export(self, name: str, *options: str, run: str = "run") -> Path:
        target = self.folder / name
        if not target.exists():
            arguments = ["export", str(self.folder / run), str(target), "--dtype", "float32", *options]
            assert cli.run(arguments) == 0
        return target


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trained:
    return Trained(tmp_path_factory.mktemp("lora"), corpus)


def test_a_checkpoint_holds_the_adapters_only(trained: Trained) -> None:
    held = set(open_titanlite(trained.job.folder).tensors)
    assert held == {name for name, p in trained.net.named_parameters() if p.requires_grad}
    assert len(held) == 2 * 7


@torch.no_grad()
def test_an_export_is_merged(trained: Trained) -> None:
    merged = tensors_in(trained.export("merged"))
    base = tensors_in(trained.export("base-hf", run="base"))
    adapted = {name.partition(".lora_A")[0] for name, _ in trained.net.named_modules() if "lora_A" in name}
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {f"{name}.weight" for name in adapted}
    for name in adapted:
        layer = trained.net.get_submodule(name)
        exact = layer.weight.double() + 8 / 3 * layer.lora_B.weight.double() @ layer.lora_A.weight.double()
        factor = FAMILY.build_on_meta().export_factor(f"{name}.weight")
        assert torch.equal(merged[f"{name}.weight"], (exact.float().double() * factor).float())
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained.folder / "merged", dtype=torch.float32)
    assert (theirs(row()).logits - trained.net(row())).abs().max() < 1e-4


def test_generate_uses_the_merged_weights(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt", "abc", "--max-new-tokens", "12", "--temperature", "0"]
    texts = []
    for path in (trained.job.folder, trained.export("merged"), trained.base.folder):
        capsys.readouterr()
        assert cli.run(["generate", str(path), *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_peft_computes_the_same_logits_and_gradients(trained: Trained) -> None:
    import peft  # not at the top: it takes seconds
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        trained.export("base-hf", run="base"), dtype=torch.float32
    )
    unadapted = base(row()).logits
    theirs = peft.PeftModel.from_pretrained(base, trained.export("adapter", "--adapter"), is_trainable=True)
    logits = theirs(row()).logits
    wanted = trained.net(row())
    assert (logits - wanted).abs().max() < 1e-4
    assert (logits - unadapted).abs().max() > 0.1
    for values in (logits, wanted):
        F.cross_entropy(values[0, :-1].float(), row()[0, 1:]).backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    ours = {name: p for name, p in trained.net.named_parameters() if p.grad is not None}
    assert len(gradients) == len(ours) == 2 * 7
    for name, p in ours.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        factor = trained.net.export_factor(f"{layer}.weight")  # PEFT's B is ours times the factor
        gradient = gradients[f"base_model.model.{layer}.{matrix}.default.weight"]
        scaled = p.grad / factor if matrix == "lora_B" else p.grad
        assert (gradient - scaled).norm() < 1e-4 * gradient.norm(), name
        if factor != 1 and matrix == "lora_B":  # control
            assert not torch.allclose(gradient, p.grad, rtol=0.1, atol=0)
    trained.net.zero_grad()


@pytest.mark.full
@pytest.mark.parametrize(
    "component",
    [
        family(tie_word_embeddings=True), family("qwen3"), family("qwen2", tie_word_embeddings=True),
        family("mistral", sliding_window=20),
    ],
    ids=lambda component: component.name,
)  # fmt: skip
def test_logits_and_gradients_are_those_of_peft_for_every_family(component: ModelFamily) -> None:
    """PEFT adds adapters with random values to the model of transformers."""
    import peft

    ours, config = random_net(component), LoRA(enable=True, rank=3, alpha=7.0, targets=["*"])
    targets = config.identity(ours)["targets"]
    config.apply(ours)
    lora = peft.LoraConfig(r=3, lora_alpha=7.0, target_modules=targets, init_lora_weights=False)
    theirs = peft.get_peft_model(hugging_face(component), lora)
    adapters = {name: p for name, p in theirs.named_parameters() if p.requires_grad}
    for name, p in adapters.items():
        name = name.removeprefix("base_model.model.").replace(".default", "")
        ours.get_parameter(name).data.copy_(p.detach())
    logits, wanted = ours(row()), theirs(row()).logits
    assert (logits - wanted).abs().max() < 1e-4
    with theirs.disable_adapter():
        assert (logits - theirs(row()).logits).abs().max() > 0.01  # control
    for values in (logits, wanted):
        F.cross_entropy(values[0, :-1].float(), row()[0, 1:]).backward()
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert len(trained) == len(adapters) == 2 * 7 * 2
    for name, p in adapters.items():
        name = name.removeprefix("base_model.model.").replace(".default", "")
        assert (trained[name].grad - p.grad).norm() < 1e-4 * p.grad.norm(), name
    assert all(p.grad is None for p in ours.parameters() if not p.requires_grad)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_of_an_exported_adapter(trained: Trained, dtype: str) -> None:
    written = tensors_in(trained.export(f"adapter-{dtype}", "--adapter", f"--dtype={dtype}"))
    adapters = {name: p.detach() for name, p in trained.net.named_parameters() if p.requires_grad}
    assert written.keys() == {f"base_model.model.{name}" for name in adapters}
    factors = set[float]()
    for name, value in adapters.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        factor = trained.net.export_factor(f"{layer}.weight") if matrix == "lora_B" else 1.0
        wanted = (value.double() * factor).to(getattr(torch, dtype))
        actual = written[f"base_model.model.{name}"]
        assert actual.dtype == wanted.dtype
        assert torch.equal(actual, wanted), name
        factors.add(factor)
    assert factors == {1.0, 0.3}


def test_buffers_that_are_state_are_those_of_the_run(tmp_path: Path, corpus: Path) -> None:
    """They change in training, although the base model's parameters do not."""
    keys = ['--job.imports=["tests.support.auxiliary"]', '--model={name = "auxiliary", flavor = "debug"}']
    base = make_job(tmp_path, corpus, *keys, "--training.steps=2", name="base")
    train(base)
    keys += [f"--checkpoint.initial_load_path={base.folder}", "--lora.enable"]
    for steps in (3, 4):  # the second run resumes
        job = make_job(tmp_path, corpus, *keys, f"--training.steps={steps}")
        train(job)
    steps_applied = {
        folder: open_checkpoint(folder, job.model).tensors["counter.applied_steps"].read((slice(0, 1),))
        for folder in (base.folder, job.folder)
    }
    assert steps_applied == {base.folder: 2, job.folder: 6}
    export = ["export", str(job.folder), str(tmp_path / "adapter"), "--adapter", "--allow-imports"]
    assert cli.run(export) == 0
    assert all("lora_" in name for name in tensors_in(tmp_path / "adapter"))


@pytest.mark.full
def test_peft_takes_no_adapters_of_mlps_beside_experts(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*keys_of(family(**VARIANTS["deepseek_v3"])), "--training.steps=1"]
    base = make_job(tmp_path, corpus, *keys, name="base")
    train(base)
    keys += [f"--checkpoint.initial_load_path={base.folder}", "--lora.enable"]
    runs = {"all": [], "attention": ['--lora.targets=["o_proj"]']}
    codes = {}
    for name, targets in runs.items():
        job = make_job(tmp_path, corpus, *keys, *targets, name=name)
        train(job)
        codes[name] = cli.run(["export", str(job.folder), str(tmp_path / f"{name}-adapter"), "--adapter"])
    assert codes == {"all": 2, "attention": 0}
    assert "would take the adapter of model.layers.0.mlp." in capsys.readouterr().err
    assert not (tmp_path / "all-adapter").exists()


def test_adapters_on_some_layers_of_a_kind_are_named_in_full(trained: Trained) -> None:
    config = read_object(trained.export("adapter", "--adapter") / "adapter_config.json")
    kinds = ("gate_proj", "up_proj", "down_proj")
    wanted = {f"model.layers.0.mlp.{kind}" for kind in kinds}
    assert set(config["target_modules"]) == wanted | {"q_proj", "o_proj"}
    assert (config["r"], config["lora_alpha"]) == (3, 8.0)


def test_another_base_model_is_refused(trained: Trained, capsys: pytest.CaptureFixture[str]) -> None:
    kept = trained.folder / "kept"
    path = trained.base.folder / "checkpoint/step-1"
    other = trained.export("other", run="base")
    path.rename(kept)
    try:
        for folder, message in ((other, "are not those of the base model"), (None, "no such directory")):
            if folder is not None:
                changed = load_file(folder / "model.safetensors")
                changed["model.norm.weight"][0] += 1e-6
                save_file(changed, folder / "model.safetensors")
                shutil.copytree(folder, path)
            for arguments in (
                ["export", str(trained.job.folder), str(trained.folder / "never")],
                ["generate", str(trained.job.folder), "--prompt", "a"],
            ):
                assert cli.run(arguments) == 2
                assert message in capsys.readouterr().err
            assert not (trained.folder / "never").exists()
            shutil.rmtree(path, ignore_errors=True)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        kept.rename(path)


def test_a_moved_base_model_is_named_by_an_option(
    trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    run, path = str(trained.job.folder), trained.base.folder / "checkpoint/step-1"
    merged, moved = tensors_in(trained.export("merged")), trained.folder / "moved"
    trained.export("other", run="base")
    path.rename(moved)
    try:
        again = tensors_in(trained.export("again", f"--base={moved}"))
        assert all(torch.equal(again[name], value) for name, value in merged.items())
        adapter = trained.export("adapter-moved", "--adapter", f"--base={moved}")
        assert read_object(adapter / "adapter_config.json")["base_model_name_or_path"] == str(moved)
        generate = ["generate", run, "--prompt=a", "--max-new-tokens=1"]
        assert cli.run([*generate, f"--base={moved}"]) == 0
        capsys.readouterr()
        assert cli.run(generate) == 2
        assert "if it has moved, `titanlite export` and" in capsys.readouterr().err
        changed = trained.folder / "changed"
        shutil.copytree(trained.folder / "other", changed)
        tensors = load_file(changed / "model.safetensors")
        tensors["model.norm.weight"][0] += 1e-6
        save_file(tensors, changed / "model.safetensors")
        for arguments in (generate, ["export", run, str(trained.folder / "no"), "--adapter"]):
            assert cli.run([*arguments, f"--base={changed}"]) == 2
            assert f"the weights in {changed} are not those of the base model" in capsys.readouterr().err
        for folder, reason in (
            (changed, "model_type is 'mistral', but"),
            (trained.folder / "no", "no such dir"),
        ):
            if folder == changed:
                config = read_object(changed / "config.json") | {"model_type": "mistral"}
                (changed / "config.json").write_text(json.dumps(config))
            assert cli.run([*generate, f"--base={folder}"]) == 2
            error = capsys.readouterr().err.splitlines()[-1]
            assert f"--base={folder} cannot be opened as the base model of the adapters in {run}" in error
            assert reason in error
            assert "if it has moved" not in error
        assert not (trained.folder / "no").exists()
    finally:
        moved.rename(path)


def test_a_base_run_may_train_on(
    tmp_path: Path,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The base model stays the checkpoint that was the newest when the adapters began, in any folder."""
    monkeypatch.chdir(tmp_path)

    def run(*keys: str, name: str, steps: int) -> Job:
        keys = ("--checkpoint.interval=1", f"--training.steps={steps}", *keys)
        job = make_job(tmp_path, corpus, *keys_of(FAMILY), *keys, name=name)
        train(job)
        return job

    def exported(name: str, *options: str) -> dict[str, torch.Tensor]:
        assert cli.run(["export", str(job.folder), str(tmp_path / name), "--dtype=float32", *options]) == 0
        return tensors_in(tmp_path / name)

    lora = ["--lora.enable", "--checkpoint.initial_load_path=base"]
    base = run(name="base", steps=1)
    job = run(*lora, name="run", steps=1)
    before = exported("before")
    run(name="base", steps=2)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for after in (exported("recorded"), exported("given", f"--base={base.folder}")):
        assert all(torch.equal(after[name], value) for name, value in before.items())
    exported("adapter", "--adapter")
    recorded = read_object(tmp_path / "adapter/adapter_config.json")["base_model_name_or_path"]
    assert recorded == str(base.folder / "checkpoint/step-1")
    monkeypatch.chdir(tmp_path)
    (base.folder / "checkpoint/step-2/manifest.json").unlink()  # the newest one does not matter
    monkeypatch.setattr(initial, "Verification", None)  # the fingerprint is enough
    run(*lora, name="run", steps=2)
    assert f"`touch {recorded}.keep` keeps its run from deleting it" in capsys.readouterr().err
    Path(f"{recorded}.keep").touch()
    run(*lora, name="run", steps=3)
    assert ".keep" not in capsys.readouterr().err
    Path(f"{recorded}.keep").unlink()
    shutil.rmtree(recorded)
    message = f"{recorded}: no such directory; its run may have deleted it"
    with pytest.raises(ConfigError, match=message) as e:
        run(*lora, name="run", steps=4)
    assert e.value.key == "checkpoint.initial_load_path"
    capsys.readouterr()
    assert cli.run(["export", str(job.folder), "no", f"--base={base.folder}"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_averages_are_of_a_and_b(trained: Trained, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of all parameters: the average of checkpoints, and the average that [ema] keeps."""
    path = f"--checkpoint.initial_load_path={trained.base.folder / 'checkpoint/step-1'}"
    keys = [*KEYS, TARGETS, path, "--checkpoint.interval=1", "--ema.enable", "--ema.decay=0.5"]
    job = make_job(trained.folder, corpus, *keys, "--ema.start_step=1", "--training.steps=2", name="two")
    train(job)
    newest = str(trained.folder / "averaged")
    average = ["checkpoint", "average", str(job.folder), "--allow-decayed", "-o"]
    assert cli.run([*average, newest, "--last=2"]) == 0
    names = [name for name, p in trained.net.named_parameters() if p.requires_grad]
    steps = [open_titanlite(job.folder / f"checkpoint/step-{step}").tensors for step in (1, 2)]
    whole = {name: tuple(slice(0, n) for n in steps[0][name].shape) for name in names}
    first, last = ({name: step[name].read(whole[name]) for name in names} for step in steps)
    wanted = {name: ((first[name].double() + last[name].double()) / 2).float() for name in names}
    averaged = open_titanlite(Path(newest)).tensors
    kept = open_titanlite(job.folder, average=True).tensors
    assert averaged.keys() == kept.keys() == set(names)
    for name in names:
        assert torch.equal(averaged[name].read(whole[name]), wanted[name])
        assert torch.allclose(kept[name].read(whole[name]), wanted[name], rtol=1e-5, atol=1e-8)
        assert not torch.equal(wanted[name], last[name])
    layer = "model.layers.1.self_attn.q_proj"
    base = trained.base_tensors()[f"{layer}.weight"].double()
    product = wanted[f"{layer}.lora_B.weight"].double() @ wanted[f"{layer}.lora_A.weight"].double()
    for run, options in (("averaged", []), ("two", ["--ema"])):
        merged = tensors_in(trained.export(f"{run}-hf", *options, run=run))
        assert torch.allclose(merged[f"{layer}.weight"].double(), base + 8 / 3 * product, rtol=0, atol=1e-6)

    base_keys = [*keys_of(FAMILY), "--training.seed=5", "--training.steps=1"]
    other_base = make_job(trained.folder, corpus, *base_keys, name="other-base")
    train(other_base)
    keys += ["--lora.alpha=9", f"--checkpoint.initial_load_path={other_base.folder}", "--training.steps=3"]
    other = make_job(trained.folder, corpus, *keys, name="other-run")
    train(other)
    shutil.copytree(other.folder / "checkpoint/step-3", job.folder / "checkpoint/step-3")
    capsys.readouterr()
    assert cli.run([*average, str(trained.folder / "never"), "--last=2"]) == 2
    assert "its lora.alpha is 8.0, not 9.0; its base model is another one" in capsys.readouterr().err


def test_refusals(trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, target = str(trained.base.folder), str(tmp_path / "it")
    assert cli.run(["export", base, target, "--adapter"]) == 2
    assert "has no adapters: leave out --adapter" in capsys.readouterr().err
    assert cli.run(["export", base, target, f"--base={base}"]) == 2
    assert "has no adapters: leave out --base" in capsys.readouterr().err
    for option in ("--keep-padding", "--max-shard-size=5GB"):
        assert cli.run(["export", str(trained.job.folder), target, "--adapter", option]) == 2
        assert f"leave out {option.partition('=')[0]}" in capsys.readouterr().err
    whole = str(trained.export("merged"))
    assert cli.run(["generate", whole, "--prompt=a", f"--base={base}"]) == 2
    assert "which is whole: leave out --base" in capsys.readouterr().err


def test_the_fingerprint_is_of_the_values_and_not_of_the_files(trained: Trained) -> None:
    base = open_titanlite(trained.base.folder)
    whole = fingerprint(digests(base))
    shares = [digests(base, rank, 3) for rank in range(3)]
    assert fingerprint({**shares[2], **shares[0], **shares[1]}) == whole
    folder = trained.folder / "plain"
    net = random_net(FAMILY)
    folder.mkdir()
    save_file({name: p.detach().clone() for name, p in net.named_parameters()}, folder / "a.safetensors")
    before = fingerprint(digests(open_weights(folder, FAMILY)))
    net.get_parameter("model.norm.weight").data[3] += 1e-6
    save_file({name: p.detach().clone() for name, p in net.named_parameters()}, folder / "a.safetensors")
    assert len({whole, before, fingerprint(digests(open_weights(folder, FAMILY)))}) == 3


def test_merged_values_are_read_in_regions(trained: Trained) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    merged: Any = open_checkpoint(trained.job.folder, FAMILY).tensors[name]
    whole = merged.read((slice(0, 32), slice(0, 32)))
    assert torch.allclose(merged.read((slice(3, 9), slice(5, 30))), whole[3:9, 5:30], rtol=0, atol=1e-8)
