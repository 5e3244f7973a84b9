"""Checkpoints in nanochat's format: a model that reads one computes what nanochat's own code does, and an
export gives the same tensors back. The values were recorded by benchmarks/nanochat_values.py."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpt_quality import Scorer, default_eps
from tests.support.jobs import make_job
from tests.support.nanochat import CONFIG, FIELDS, random_tensors, tokens, write_checkpoint
from titanlite.config.component import ConfigError
from titanlite.contrib import nanochat
from titanlite.contrib.nanochat import write_nanochat
from titanlite.interop.formats import open_weights
from titanlite.interop.weights import check, load_weights
from titanlite.models.base import Decoder
from titanlite.models.gpt import FLAVORS, Gpt
from titanlite.models.llama3 import Llama3
from titanlite.tools import export
from titanlite.train import train

RECORDED = json.loads((Path(__file__).parents[2] / "golden/nanochat.json").read_text())
FAMILY = Gpt(flavor="debug", overrides=FIELDS)


def loaded(folder: Path, family: Gpt = FAMILY) -> Decoder:
    weights, net = open_weights(folder, family), family.build()
    check(weights, family)
    load_weights(weights, net)
    return net


def assert_recorded(net: Decoder) -> None:
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    logits = net(inputs)
    wanted = torch.tensor(RECORDED["logits"])
    assert (logits[:, ::51, :8].flatten(0, 1) - wanted).abs().max() < 2e-5
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(RECORDED["loss"], rel=1e-6)
    loss.backward()
    norms = dict[str, float]()
    for ours, (theirs, _) in nanochat._names(net.config).items():
        if ours in dict(net.named_parameters()):
            gradient = net.get_parameter(ours).grad
            assert gradient is not None
            norms[theirs] = (norms.get(theirs, 0.0) ** 2 + gradient.norm().item() ** 2) ** 0.5
    assert norms == pytest.approx(RECORDED["gradient_norms"], rel=1e-4)


def test_an_imported_model_computes_what_nanochat_does(tmp_path: Path) -> None:
    assert_recorded(loaded(write_checkpoint(tmp_path / "d5")))


def test_control_rows_of_queries_that_stay_are_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nanochat, "EXCHANGED", ("nothing",))
    with pytest.raises(AssertionError):
        assert_recorded(loaded(write_checkpoint(tmp_path / "d5")))


def test_the_benchmark_scores_the_tokens_of_documents_of_any_length(tmp_path: Path) -> None:
    net, documents = loaded(write_checkpoint(tmp_path / "d5")), [[0] * 9, tokens()[0, :30].tolist()]
    scorer: Any = SimpleNamespace(
        documents=documents, device=torch.device("cpu"), num_bytes=100,
        tokenizer=SimpleNamespace(bos=0, vocab_size=320),
    )  # fmt: skip
    losses = [
        torch.nn.functional.cross_entropy(
            net(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:]), reduction="sum"
        )
        for ids in documents
    ]
    wanted = sum(losses).item() / math.log(2) / 100
    assert Scorer.bits_per_byte(scorer, net) == pytest.approx(wanted, rel=1e-5)
    scorer.documents = documents[:1]  # control
    assert Scorer.bits_per_byte(scorer, net) != pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_benchmark_measures_the_epsilon_of_norms(dtype: torch.dtype) -> None:
    x = torch.full((8,), 1e-3, dtype=dtype)
    eps = default_eps(x.device, dtype)
    assert torch.equal(torch.nn.functional.rms_norm(x, (8,)), torch.nn.functional.rms_norm(x, (8,), eps=eps))
    assert not torch.equal(torch.nn.functional.rms_norm(x, (8,)), x / 1e-3)  # control: an epsilon matters


def test_a_run_starts_from_it_and_its_export_is_nanochats(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_checkpoint(tmp_path / "d5")
    model = [f"--model.overrides.{key}={json.dumps(value)}" for key, value in FIELDS.items()]
    keys = ["--model.name=gpt", *model, f"--checkpoint.initial_load_path={source}", "--training.steps=1"]
    train(make_job(tmp_path, corpus, *keys, "--optimizer.lr=1e-30"))
    target = tmp_path / "export"
    with pytest.raises(ConfigError, match=r"gpt has no Hugging Face form .*; use --format=nanochat"):
        export.main([str(tmp_path / "run"), str(target)])
    assert export.main([str(tmp_path / "run"), str(target), "--format=nanochat"]) == 0
    assert "gpt debug" in capsys.readouterr().out
    assert json.loads((target / "meta_000000.json").read_text())["model_config"] == {
        **CONFIG, "sequence_len": 512, "window_pattern": "SLSLL",
    }  # fmt: skip
    actual, wanted = torch.load(target / "model_000000.pt"), random_tensors()
    assert actual.keys() == wanted.keys()
    assert all(torch.allclose(actual[name], tensor, atol=1e-7) for name, tensor in wanted.items())


def test_the_newest_step_counts_and_a_compiled_models_names_are_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d5")
    for name in ("model_000010.pt", "model_999999.pt"):
        (folder / name).write_bytes(b"never read")
    torch.save({f"_orig_mod.{k}": v for k, v in random_tensors().items()}, folder / "model_1000000.pt")
    (folder / "meta_000010.json").rename(folder / "meta_1000000.json")
    assert_recorded(loaded(folder))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layer_pattern": "L", "sliding_window": 0}, "layer_pattern"),
        ({"smear": False}, "smear"),
        ({"logit_softcap": 0.0}, "logit_softcap"),
        ({"value_embedding_interval": 1}, "value_embedding_interval"),
    ],
    ids=str,
)
def test_another_model_is_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    folder, family = write_checkpoint(tmp_path / "d5"), Gpt(flavor="debug", overrides=FIELDS | overrides)
    with pytest.raises(ConfigError, match=message):
        check(open_weights(folder, family), family)


def test_a_wrong_folder_is_one_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "d5")
    with pytest.raises(ConfigError, match="read for the model gpt only; the job's is llama3"):
        open_weights(folder, Llama3(flavor="debug"))
    (folder / "meta_000010.json").write_text('{"model_config": {"n_layer": 5}}')
    with pytest.raises(ConfigError, match="has no model_config with the numbers"):
        open_weights(folder, FAMILY)
    for n_head, message in ((0, "has no model_config with the numbers"), (5, "no multiple of n_head = 5")):
        config = {"model_config": CONFIG | {"n_head": n_head}}
        (folder / "meta_000010.json").write_text(json.dumps(config))
        with pytest.raises(ConfigError, match=message):
            open_weights(folder, FAMILY)
    (folder / "meta_000010.json").unlink()
    with pytest.raises(ConfigError, match=r"model_000010\.pt has no meta_000010\.json beside it"):
        open_weights(folder, FAMILY)
    missing = {name: t for name, t in random_tensors().items() if name != "lm_head.weight"}
    folder = write_checkpoint(tmp_path / "headless", missing)
    with pytest.raises(ConfigError, match=r"lm_head\.weight .*is missing"):
        check(open_weights(folder, FAMILY), FAMILY)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"smear": False}, "have smear = True; this one has False"),
        ({"sliding_window": 128}, r"windows are n x 128 \+ 1 tokens \(129, 257, \.\.\.\), not 128"),
        ({"layer_pattern": "SLSLN"}, "layers are S and L; layer_pattern has N"),
        ({"layer_pattern": "SLSLS"}, "last layer has no window; that of layer_pattern is S"),
        ({"vocab_size": 321}, "multiple of 64 ids"),
    ],
    ids=str,
)
def test_a_model_that_nanochat_cannot_express_is_not_exported(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    family = Gpt(flavor="debug", overrides=FIELDS | overrides)
    net = family.build()
    weights = open_weights(write_checkpoint(tmp_path / "d5"), FAMILY)
    tensors = {name: nanochat._lazy(p.detach(), tmp_path) for name, p in net.named_parameters()}
    other = type(weights)(tmp_path, "test", tensors, {})
    with pytest.raises(ConfigError, match=message):
        write_nanochat(other, tmp_path / "export", family)
    assert not (tmp_path / "export").exists()


def test_an_unknown_format_of_an_export_and_a_wrong_choice_are_one_line(tmp_path: Path) -> None:
    arguments = [str(tmp_path), str(tmp_path / "new")]
    with pytest.raises(ConfigError, match="unknown format 'nanochat2'"):
        export.main([*arguments, "--format=nanochat2"])
    for option, message in {
        "--keep-padding": "--format=nanochat has no such choice",
        "--adapter": "--format=nanochat cannot write adapters",
        "--dtype=bfloat16": "--format=nanochat writes float32 only",
    }.items():
        with pytest.raises(ConfigError, match=message):
            export.main([*arguments, "--format=nanochat", option])


def test_windows_of_flavors_are_nanochats() -> None:
    assert {FLAVORS[name].sliding_window for name in ("d8", "d26")} == {nanochat._window_of(2048)}
    assert FLAVORS["debug"].sliding_window == nanochat._window_of(512)
