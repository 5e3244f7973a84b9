"""Scales are folded into the weights of an export, because Hugging Face's models have none. Weights of other
programs are refused for a model with scales."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.foreign import random_tensors, write_meta, write_torchtitan
from tests.support.jobs import make_job
from tests.support.models import family, keys_of, random_net, row, tensors_in
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint.reader import load_tensors
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.interop.export import write_directory
from titanlite.interop.initial import open_weights
from titanlite.interop.weights import ModelAndTokenizer, check
from titanlite.models.hf_config import read_family
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

SCALES = {"residual_scale": 0.5, "attention_scale": 1.7, "logit_scale": 0.25}


@pytest.mark.parametrize(
    ("name", "tied"),
    [("llama3", True), ("qwen3", False), full("qwen3", True), full("gemma3", True), full("olmo3", False)],
)
@torch.no_grad()
def test_an_export_computes_the_logits_of_the_run(
    tmp_path: Path, corpus: Path, name: str, tied: bool
) -> None:
    component = family(name, tie_word_embeddings=tied, **SCALES)
    job = make_job(tmp_path, corpus, *keys_of(component), "--training.steps=1", "--optimizer.lr=0.1")
    with torch.enable_grad():
        train(job)
    target = tmp_path / "it"
    assert cli.run(["export", str(job.folder), str(target), "--dtype", "float32"]) == 0
    net = job.model.build()
    load_tensors(job.folder / "checkpoint/step-1", {"model": model_tensors(net)})

    plain = read_family(target)
    assert all(getattr(plain.config, key) == 1.0 for key in SCALES)
    folded = plain.build()
    folded.load_state_dict(tensors_in(target))
    wanted = net(row())
    assert torch.allclose(folded(row()), wanted, atol=1e-4)
    assert not torch.allclose(net(row()), random_net(component)(row()), atol=1e-2)
    before = dict(net.named_parameters())
    same = {key for key, value in tensors_in(target).items() if torch.equal(value, before[key])}
    assert 0 < len(same) < len(before), "only weights with a scale differ"

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert (theirs(row()).logits - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("source", ["Hugging Face", "torchtitan", "Meta", "Meta with params.json"])
def test_weights_of_other_programs_have_no_scales(tmp_path: Path, source: str) -> None:
    plain, folder = family(tie_word_embeddings=False), tmp_path / "source"
    if source == "torchtitan":
        folder = write_torchtitan(folder, random_tensors(plain.config))
    else:
        write_meta(folder, random_tensors(plain.config), plain.config, 1)
    if source == "Meta":
        (folder / "params.json").unlink(missing_ok=True)
    elif source == "Hugging Face":
        pair = ModelAndTokenizer(plain, Bytes().build())
        write_directory(open_weights(folder, plain), tmp_path / "hf", pair)
        folder = tmp_path / "hf"
    check(open_weights(folder, plain), plain)
    initialised = family(tie_word_embeddings=False, matrix_init_std=0.01, depth_scaled_init=False)
    check(open_weights(folder, initialised), initialised)
    scaled = family(tie_word_embeddings=False, **SCALES)
    with pytest.raises(ConfigError, match=r"its residual_scale is 1.0, the job's 0.5; its attention_scale"):
        check(open_weights(folder, scaled), scaled)
