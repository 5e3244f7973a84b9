"""Files with a tensor for each matrix of each expert, which titanlite has stacked: they are read and written
under the names and shapes of transformers, on any layout, and what is missing, twice or wrong is named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import ranks
from tests.support.jobs import make_job
from tests.support.models import VARIANTS, family, hugging_face, keys_of, random_net, tensors_in
from tests.support.runs import train_on_rank
from tests.support.tiers import full
from titanlite import cli
from titanlite.checkpoint.state import model_tensors
from titanlite.config.component import ConfigError
from titanlite.interop import dcp
from titanlite.interop.export import ExportFormat, write_directory
from titanlite.interop.formats import open_weights
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.weights import ModelAndTokenizer, check, load_weights, shape_at
from titanlite.models.base import Decoder, Index, ModelFamily
from titanlite.models.deepseek_v3 import DeepSeekV3
from titanlite.models.moe import MoEDecoder
from titanlite.models.olmoe import Olmoe
from titanlite.models.qwen3_moe import Qwen3MoE
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

transformers = pytest.importorskip("transformers")
FAMILY = family(**VARIANTS["qwen3_moe"])
LAYER = "model.layers.0.mlp.experts"
UNMOVED = "--optimizer.lr=1e-30"  # a step with it changes no weight


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of a small Qwen3-MoE."""
    path = tmp_path_factory.mktemp("hf") / "theirs"
    hugging_face(FAMILY).save_pretrained(path)
    return path


def imported(path: Path, component: ModelFamily = FAMILY) -> Decoder:
    weights = open_hugging_face(path, component)
    check(weights, component)
    net = random_net(component, seed=1)
    load_weights(weights, net)
    return net


def write(path: Path, target: Path, component: ModelFamily = FAMILY, **form: Any) -> dict[str, torch.Tensor]:
    pair = ModelAndTokenizer(component, Bytes().build())
    write_directory(open_weights(path, component), target, pair, ExportFormat(**form))
    return tensors_in(target)


def assert_bit_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


# ---- names


@pytest.mark.parametrize(
    ("component", "num_names"),
    [
        (Olmoe(flavor="1B-7B"), 3219),
        full(Qwen3MoE(flavor="30B-A3B"), 18867),
        full(DeepSeekV3(flavor="16B"), 5317),
    ],
)
def test_names_and_shapes_are_those_that_transformers_writes(component: ModelFamily, num_names: int) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**component.hf_config())
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    written = revert_weight_conversion(theirs, theirs.state_dict())
    net = component.build_on_meta()
    ours = [
        (part, shape_at(index, p.shape))
        for name, p in model_tensors(net).items()
        for part, index in net.hf_tensors(name, tuple(p.shape))
    ]
    assert len(ours) == num_names
    assert sorted(ours) == sorted((name, tuple(t.shape)) for name, t in written.items())


def test_memory_has_transformers_5_names_and_both_forms_are_read(directory: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    stacked = {name: t.contiguous() for name, t in model.state_dict().items()}
    assert stacked[f"{LAYER}.gate_up_proj"].shape == (12, 48, 32)
    shutil.copytree(directory, tmp_path / "stacked")
    save_file(stacked, tmp_path / "stacked/model.safetensors")
    for path in (directory, tmp_path / "stacked"):
        assert_bit_equal(dict(imported(path).named_parameters()), stacked)


def test_an_export_is_complete_for_transformers(directory: Path, tmp_path: Path) -> None:
    written = write(directory, tmp_path / "ours", max_shard_bytes=20_000)
    assert_bit_equal(written, tensors_in(directory))
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == written.keys()
    assert all(name in load_file(tmp_path / "ours" / file) for name, file in index.items())
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    _, report = from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert {key: list(names) for key, names in report.items() if names} == {}


def test_a_correction_bias_is_not_rounded(tmp_path: Path) -> None:
    component = family(**VARIANTS["deepseek_v3"])
    hugging_face(component).save_pretrained(tmp_path / "theirs")
    exact = tensors_in(tmp_path / "theirs")
    written = write(tmp_path / "theirs", tmp_path / "ours", component, dtype=torch.bfloat16)
    biases = [name for name in exact if name.endswith("e_score_correction_bias")]
    assert biases
    assert {t.dtype for name, t in written.items() if name not in biases} == {torch.bfloat16}
    assert all(torch.equal(written[name], exact[name]) for name in biases)
    assert any(not torch.equal(exact[name].bfloat16().float(), exact[name]) for name in biases)


def test_control_experts_in_the_order_of_their_names_are_another_model(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorted as text, expert 10 comes before expert 2."""
    right = MoEDecoder.hf_tensors

    def sorted_as_text(net: MoEDecoder, name: str, shape: tuple[int, ...]) -> list[tuple[str, Index]]:
        tensors = right(net, name, shape)
        return [(part, index) for part, (_, index) in zip(sorted(part for part, _ in tensors), tensors)]

    monkeypatch.setattr(MoEDecoder, "hf_tensors", sorted_as_text)
    theirs, net = tensors_in(directory), imported(directory)
    down = net.get_parameter(f"{LAYER}.down_proj")
    assert torch.equal(down[2], theirs[f"{LAYER}.10.down_proj.weight"])
    monkeypatch.undo()
    down = imported(directory).get_parameter(f"{LAYER}.down_proj")
    assert torch.equal(down[2], theirs[f"{LAYER}.2.down_proj.weight"])


# ---- runs


@pytest.mark.full
def test_an_export_does_not_depend_on_the_layout(directory: Path, tmp_path: Path, corpus: Path) -> None:
    """A run that starts from transformers' weights, on two ranks with FSDP and in one process, exports them
    unchanged; the files are equal byte for byte."""
    keys = [f"--checkpoint.initial_load_path={directory}", UNMOVED, "--training.steps=1", *keys_of(FAMILY)]
    ranks.run(2, train_on_rank, tmp_path, corpus, keys, "two", 2)
    train(make_job(tmp_path, corpus, *keys, name="one"))
    sums = []
    for name in ("one", "two"):
        target = tmp_path / f"from-{name}"
        sizes = ["--dtype", "float32", "--max-shard-size", "50KB"]
        assert cli.run(["export", str(tmp_path / name), str(target), *sizes]) == 0
        files = sorted(target.iterdir())
        sums.append({file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files})
    assert len(sums[0]) > 6
    assert sums[0] == sums[1]
    assert_bit_equal(tensors_in(tmp_path / "from-two"), tensors_in(directory))


def test_a_chunk_of_a_checkpoint_is_read_once_for_all_experts_in_a_file(
    directory: Path, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"--checkpoint.initial_load_path={directory}", UNMOVED, "--training.steps=1", *keys_of(FAMILY)]
    train(make_job(tmp_path, corpus, *keys))
    loaded: list[str] = []
    load = dcp._load

    def counted(file: Path, name: str, *rest: Any) -> torch.Tensor:
        loaded.append(name)
        return load(file, name, *rest)

    monkeypatch.setattr(dcp, "_load", counted)
    assert_bit_equal(write(tmp_path / "run", tmp_path / "ours"), tensors_in(directory))
    assert len(loaded) == len(set(loaded)) == len(list(random_net(FAMILY).parameters()))


def test_each_expert_is_read_by_itself(directory: Path) -> None:
    """A rank with the experts 4 to 7 reads no other."""
    stored = open_hugging_face(directory, FAMILY).tensors[f"{LAYER}.gate_up_proj"]
    assert [chunk.shape for chunk in stored.chunks] == [(1, 24, 32)] * 24
    assert {chunk.offsets[0] for chunk in stored._chunks_near((slice(4, 8),))} == {4, 5, 6, 7}


# ---- config.json


def test_config_json_of_transformers_4_and_5(directory: Path, tmp_path: Path) -> None:
    written = FAMILY.hf_config()
    assert written["num_experts"] == 12
    assert "num_local_experts" not in written  # transformers 4 would ignore it
    theirs = json.loads((directory / "config.json").read_text())
    assert (theirs.get("num_experts"), theirs.get("num_local_experts")) == (None, 12)  # transformers 5
    for config in (written, theirs):
        assert Qwen3MoE.from_hf_config(config).config.architecture_fields() == (
            FAMILY.config.architecture_fields()
        )
    with pytest.raises(ConfigError, match="has no norm_topk_prob"):
        Qwen3MoE.from_hf_config({k: v for k, v in written.items() if k != "norm_topk_prob"})


# ---- bad input

Change = Callable[[dict[str, torch.Tensor]], object]
DOWN = f"{LAYER}.10.down_proj.weight"
BAD: dict[str, tuple[Change, str]] = {
    "missing": (
        lambda t: t.pop(DOWN),
        r"does not fit the job's model: model\.layers\.0\.mlp\.experts\.10\.down_proj\.weight of shape "
        r"\(32, 24\) is missing$",
    ),
    "all missing": (
        lambda t: [t.pop(f"{LAYER}.{n}.down_proj.weight") for n in range(12)],
        r"model: model\.layers\.0\.mlp\.experts\.down_proj of shape \(12, 32, 24\) is missing$",
    ),
    "one too many": (
        lambda t: t.update({DOWN.replace("10", "12"): t[DOWN].clone()}),
        r"model: model\.layers\.0\.mlp\.experts\.12\.down_proj\.weight in model\.safetensors is unexpected$",
    ),
    "shape": (
        lambda t: t.update({DOWN: t[DOWN].T.contiguous()}),
        r"experts\.10\.down_proj\.weight in model\.safetensors has shape \(24, 32\), the model's has "
        r"\(32, 24\)$",
    ),
    "dtype": (
        lambda t: t.update({DOWN: t[DOWN].bfloat16()}),
        r"experts\.10\.down_proj\.weight in model\.safetensors is torch\.bfloat16, but "
        r"model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight is torch\.float32$",
    ),
    "quantized": (
        lambda t: t.update({DOWN: t[DOWN].to(torch.int8)}),
        r"experts\.10\.down_proj\.weight in model\.safetensors is torch\.int8; quantized",
    ),
    "both forms": (
        lambda t: t.update({f"{LAYER}.down_proj": torch.zeros(12, 32, 24)}),
        r"experts\.0\.down_proj\.weight in model\.safetensors is unexpected; .*\(and 9 more\)$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named_in_one_line(directory: Path, tmp_path: Path, case: str) -> None:
    change, message = BAD[case]
    shutil.copytree(directory, tmp_path / "theirs")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "theirs/model.safetensors")
    with pytest.raises(ConfigError, match=message) as error:
        imported(tmp_path / "theirs")
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError):  # and nothing is exported
        write(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_an_expert_that_two_files_have_is_refused(directory: Path, tmp_path: Path) -> None:
    hugging_face(FAMILY).save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    file_of = json.loads((tmp_path / "theirs/model.safetensors.index.json").read_text())["weight_map"]
    other = next(file for file in file_of.values() if file != file_of[DOWN])
    tensors = load_file(tmp_path / "theirs" / other)
    save_file({**tensors, DOWN: torch.ones(32, 24)}, tmp_path / "theirs" / other)
    with pytest.raises(ConfigError, match=rf"{DOWN} is in .*{other}, but .* says {file_of[DOWN]}"):
        imported(tmp_path / "theirs")


def test_another_number_of_experts_is_named_with_the_option(directory: Path) -> None:
    other = family(**{**VARIANTS["qwen3_moe"], "n_experts": 16})
    with pytest.raises(ConfigError, match=r"its n_experts is 12, the job's 16; '--model\.overrides=\{n_"):
        imported(directory, other)
