"""Checkpoints of torchtitan and of Meta give the logits of their own layout, which a small reference here
computes in complex numbers; what else lies in them is left alone, and nothing in them is executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.foreign import random_tensors, reference_logits, write_meta, write_torchtitan
from tests.support.jobs import make_job, metrics_of
from tests.support.models import SCALED, VARIANTS, family, random_net, row
from tests.support.tiers import sampled
from titanlite.checkpoint.commit import CheckpointError
from titanlite.config.component import ConfigError
from titanlite.contrib.meta_weights import IN_BLOCK, IN_BLOCK_OF_DEEPSEEK, OUTSIDE_BLOCKS
from titanlite.data.loader import MicroBatches, SequenceLoader
from titanlite.data.step_sizes import StepSizes
from titanlite.interop.initial import open_weights
from titanlite.interop.weights import check, load_weights
from titanlite.models.base import Decoder
from titanlite.models.llama3 import Llama3
from titanlite.train import train

UNTIED = {"tie_word_embeddings": False}


def our_logits(path: Path, model_family: Llama3, tokens: torch.Tensor) -> torch.Tensor:
    weights = open_weights(path, model_family)
    check(weights, model_family)
    net = random_net(model_family, seed=1)
    load_weights(weights, net)
    with torch.no_grad():
        return net(tokens)


SHAPES = {
    "plain": UNTIED,
    "scaled rope": {**UNTIED, **SCALED},
    "head dim apart": {**UNTIED, "head_dim": 16},
}


@pytest.mark.parametrize("shape", sampled(SHAPES, {"head dim apart"}))
@pytest.mark.parametrize(
    "source", ["titan 0.2", "titan 0.1", "titan 0.3", "meta", "meta in two", "llama 2 in two"]
)
def test_logits_are_those_of_the_sources_layout(tmp_path: Path, source: str, shape: str) -> None:
    model_family = family(**SHAPES[shape])
    c, w = model_family.config, random_tensors(model_family.config)
    if source.startswith("titan"):
        path = write_torchtitan(tmp_path, w, source.split()[1])
    else:
        path = write_meta(tmp_path / "meta", w, c, 2 if "two" in source else 1, int("2 in" in source))
    wanted = reference_logits(w, c, row())
    assert (our_logits(path, model_family, row()) - wanted).abs().max() < 1e-4
    # The control: rows of q and k left in their order are another model.
    net = random_net(model_family, seed=1)
    weights = open_weights(path, model_family)
    load_weights(weights, net)
    with torch.no_grad():
        for i in range(c.n_layers):
            net.get_parameter(f"model.layers.{i}.self_attn.q_proj.weight").copy_(
                w[f"layers.{i}.attention.wq.weight"]
            )
        assert (net(row()) - wanted).abs().max() > 1e-2


def test_any_rows_of_q_can_be_read(tmp_path: Path) -> None:
    model_family = family(**UNTIED)
    w = random_tensors(model_family.config)
    stored = open_weights(write_torchtitan(tmp_path, w), model_family).tensors[
        "model.layers.0.self_attn.q_proj.weight"
    ]
    whole = stored.read((slice(0, 32), slice(0, 32)))
    heads = w["layers.0.attention.wq.weight"].unflatten(0, (4, 8))
    assert torch.equal(whole.unflatten(0, (4, 8)), torch.cat((heads[:, 0::2], heads[:, 1::2]), 1))
    for begin in range(32):
        for end in range(begin + 1, 33):
            assert torch.equal(stored.read((slice(begin, end), slice(3, 9))), whole[begin:end, 3:9])


@pytest.mark.parametrize("source", ["titan", "meta"])
def test_a_run_starts_from_it(tmp_path: Path, corpus: Path, source: str) -> None:
    model_family = family(**UNTIED)
    w = random_tensors(model_family.config)
    path = (
        write_torchtitan(tmp_path, w)
        if source == "titan"
        else write_meta(tmp_path / "m", w, model_family.config, 2)
    )
    start = [f"--checkpoint.initial_load_path={path}", "--model.overrides.tie_word_embeddings=false"]
    job = make_job(tmp_path, corpus, *start, "--training.steps=1")
    train(job)
    rows = job.data.build(job.tokenizer.build(), seq_len=32, seed=job.training.seed)
    batch = next(
        SequenceLoader(rows, MicroBatches(0, StepSizes.constant(8), 8, 0, 1), num_workers=0, pin_memory=False)
    )
    logits = reference_logits(w, model_family.config, batch.inputs)
    wanted = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()).item()
    assert metrics_of(job)[0]["train/loss"] == pytest.approx(wanted, abs=1e-4)


def test_a_tied_model_takes_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    tied, untied = family(), family(**UNTIED)
    w = random_tensors(untied.config)
    with pytest.raises(ConfigError, match=r"lm_head\.weight .* differs from the embedding"):
        our_logits(write_torchtitan(tmp_path / "a", w), tied, row())
    w["output.weight"] = w["tok_embeddings.weight"].clone()
    path = write_meta(tmp_path / "b", w, tied.config, 2)
    assert (our_logits(path, tied, row()) - reference_logits(w, tied.config, row())).abs().max() < 1e-4


# ---- Qwen3, with and without experts, and DeepSeek-V3

MIXTURE = family(**VARIANTS["qwen3_moe"])
BIAS = "e_score_correction_bias"


def in_torchtitan(net: Decoder) -> dict[str, torch.Tensor]:
    """The tensors of a model under torchtitan 0.2.2's names."""
    named = {name: buffer for name, buffer in net.named_buffers() if name.endswith(BIAS)}
    named = {f"{name.split('.mlp.')[0][6:]}.moe.expert_bias": buffer for name, buffer in named.items()}
    names = OUTSIDE_BLOCKS | (IN_BLOCK_OF_DEEPSEEK if named else IN_BLOCK)
    for name, p in net.named_parameters():
        tensor = p.detach()
        layer = name.removeprefix("model.").rpartition(".mlp.")[0]
        if name.endswith("experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            named |= {f"{layer}.moe.experts.w1": gate.clone(), f"{layer}.moe.experts.w3": up.clone()}
            named.setdefault(
                f"{layer}.moe.expert_bias", torch.zeros(len(tensor))
            )  # 0.2.2 never moves Qwen3's
        elif name.endswith("experts.down_proj"):
            named[f"{layer}.moe.experts.w2"] = tensor
        else:
            for theirs, ours in names.items():
                name = name.replace(f".{ours}.", f".{theirs}.") if theirs in IN_BLOCK_OF_DEEPSEEK else name
                name = theirs if name == ours else name
            named[name.removeprefix("model.")] = tensor
    return named


@pytest.mark.parametrize("release", ["0.2", "0.3"])
@pytest.mark.parametrize("variant", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_other_families_are_read_bit_for_bit(tmp_path: Path, variant: str, release: str) -> None:
    model_family = family(**VARIANTS[variant])
    net = random_net(model_family)
    weights = open_weights(write_torchtitan(tmp_path, in_torchtitan(net), release), model_family)
    check(weights, model_family)
    ours = random_net(model_family, seed=1)
    load_weights(weights, ours)
    assert all(torch.equal(p, net.get_parameter(name)) for name, p in ours.named_parameters())
    biases = [name for name, _ in ours.named_buffers() if name.endswith(BIAS)]
    assert all(torch.equal(ours.get_buffer(name), net.get_buffer(name)) for name in biases)
    assert bool(biases) == (variant == "deepseek_v3")


BAD_EXPERTS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (
        lambda w: w.pop("layers.1.moe.experts.w3"),
        r"model\.layers\.1\.mlp\.experts\.gate_up_proj of shape \(12, 48, 32\) is missing",
    ),
    "shape": (
        lambda w: w.update({"layers.1.moe.experts.w3": torch.ones(12, 16, 32)}),
        r"layers\.1\.moe\.experts\.w1 in .* is unexpected",
    ),
    "shared expert": (
        lambda w: w.update({"layers.1.moe.shared_experts.w1.weight": torch.ones(24, 32)}),
        r"layers\.1\.moe\.shared_experts\.w1\.weight in .* is unexpected",
    ),
    "bias": (
        lambda w: w["layers.1.moe.expert_bias"].add_(0.001),
        r"layers\.1\.moe\.expert_bias is not zero: it takes part in the choice of experts",
    ),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_experts_that_do_not_fit_are_named(tmp_path: Path, case: str) -> None:
    change, message = BAD_EXPERTS[case]
    w = in_torchtitan(random_net(MIXTURE))
    change(w)
    with pytest.raises(ConfigError, match=message) as error:
        check(open_weights(write_torchtitan(tmp_path, w), MIXTURE), MIXTURE)
    assert "\n" not in str(error.value)


def test_other_families_are_refused(tmp_path: Path) -> None:
    path = write_torchtitan(tmp_path, random_tensors(family(**UNTIED).config))
    with pytest.raises(ConfigError, match=r"Llama, Qwen3 and DeepSeek-V3 only; the job's model is olmoe$"):
        open_weights(path, family(**VARIANTS["olmoe"]))


# ---- bad input


class Evil:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return (print, ("executed",))


def evil_meta(path: Path) -> None:
    torch.save({"norm.weight": torch.ones(3), "evil": Evil()}, path / "consolidated.00.pth")


def evil_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))


def without(name: str, **more: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda w: {n: t for n, t in w.items() if n != name} | more


def cut(file: str) -> Callable[[Path], None]:
    def truncate(path: Path) -> None:
        data = (path / file).read_bytes()
        (path / file).write_bytes(data[: len(data) // 2])

    return truncate


def other_heads(path: Path) -> None:
    params = json.loads((path / "params.json").read_text())
    (path / "params.json").write_text(json.dumps({**params, "n_heads": 8}))


WRONG: dict[str, tuple[str, Any, Callable[[Path], None] | None, str]] = {
    "titan missing": (
        "titan",
        without("norm.weight"),
        None,
        r"model\.norm\.weight of shape \(32,\) is missing",
    ),
    "titan extra": (
        "titan",
        without("", **{"layers.0.attention.q_norm.weight": torch.ones(8)}),
        None,
        r"model\.layers\.0\.self_attn\.q_norm\.weight in .*distcp is unexpected",
    ),
    "titan shape": (
        "titan",
        without("norm.weight", **{"norm.weight": torch.ones(31)}),
        None,
        r"model\.norm\.weight in .* has shape \(31,\), the model's has \(32,\)",
    ),
    "not a llama": ("titan", lambda w: {"x": torch.ones(1)}, None, r"no tok_embeddings\.weight, but"),
    "titan cut": (
        "titan",
        dict,
        cut("__0_0.distcp"),
        r"__0_0\.distcp has [\d,]+ bytes and does not contain all of",
    ),
    "titan pickle": ("titan", dict, evil_metadata, "asks for builtins.print"),
    "meta missing": (
        "meta",
        without("norm.weight"),
        None,
        r"model\.norm\.weight of shape \(32,\) is missing",
    ),
    "meta pickle": ("meta", dict, evil_meta, r"consolidated\.00\.pth .*Unsupported .*print"),
    "meta cut": ("meta", dict, cut("consolidated.01.pth"), r"consolidated\.01\.pth is not a complete file"),
    "meta heads": ("meta", dict, other_heads, "n_heads is 8, the job's 4"),
    "meta file": (
        "meta",
        dict,
        lambda p: (p / "consolidated.00.pth").unlink(),
        r"consolidated\.00\.pth is not there",
    ),
    "meta last file": (
        "meta",
        dict,
        lambda p: (p / "consolidated.01.pth").unlink(),
        r"/m has 1 of the model's 2 files; consolidated\.01\.pth is missing",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused(tmp_path: Path, case: str, capfd: pytest.CaptureFixture[str]) -> None:
    source, change, damage, message = WRONG[case]
    model_family = family(**UNTIED)
    w = change(random_tensors(model_family.config))
    path = (
        write_torchtitan(tmp_path, w)
        if source == "titan"
        else write_meta(tmp_path / "m", w, model_family.config, 2)
    )
    if damage:
        damage(path)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        check(open_weights(path, model_family), model_family)
    assert "executed" not in capfd.readouterr().out


def test_a_run_with_weights_that_do_not_fit_writes_nothing(tmp_path: Path, corpus: Path) -> None:
    path = write_torchtitan(tmp_path, {"x": torch.ones(1)})
    job = make_job(tmp_path, corpus, f"--checkpoint.initial_load_path={path}", "--training.steps=1")
    with pytest.raises(ConfigError, match=r"no tok_embeddings\.weight, but") as error:
        train(job)
    assert error.value.key == "checkpoint.initial_load_path"
    assert not job.folder.exists()
