"""Experts in MXFP4, as gpt-oss is published: their values are those of the format, whatever region is read.
Blocks that lack their scales are named. An export has no quantization."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.jobs import make_job
from tests.support.models import VARIANTS, family, keys_of, random_net, tensors_in
from titanlite.config.component import ConfigError
from titanlite.interop.export import ExportFormat, write_directory
from titanlite.interop.formats import open_weights
from titanlite.interop.huggingface import open_hugging_face
from titanlite.interop.mxfp4 import values_of
from titanlite.interop.weights import ModelAndTokenizer, check, load_weights
from titanlite.models.load_balance import is_load
from titanlite.tokenizers.bytes import Bytes
from titanlite.train import train

FAMILY = family(**{**VARIANTS["gpt_oss"], "dim": 64, "moe_hidden_dim": 32})
QUANTIZATION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
LAYER = "model.layers.1.mlp.experts"


def value(nibble: int, scale: int) -> float:
    """A number in E2M1 by its bits -- sign, two of the exponent, one of the mantissa -- times the scale."""
    sign, exponent, mantissa = nibble >> 3, (nibble >> 1) & 3, nibble & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-1.0) ** sign * magnitude * 2.0 ** (scale - 127)


def by_hand(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, I, O], one value at a time."""
    E, O, G, _ = blocks.shape
    out = torch.zeros(E, 32 * G, O, dtype=torch.bfloat16)
    for e, o, g in ((e, o, g) for e in range(E) for o in range(O) for g in range(G)):
        scale = int(scales[e, o, g])
        for i, byte in enumerate(blocks[e, o, g].tolist()):
            out[e, 32 * g + 2 * i, o] = value(byte & 15, scale)
            out[e, 32 * g + 2 * i + 1, o] = value(byte >> 4, scale)
    return out


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in the layout of the published files."""
    folder = tmp_path_factory.mktemp("mxfp4") / "gpt-oss"
    folder.mkdir()
    tensors, generator = {}, torch.Generator().manual_seed(0)
    for name, p in random_net(FAMILY).state_dict().items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            E, I, O = p.shape
            blocks = torch.randint(0, 256, (E, O, I // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(118, 127, (E, O, I // 32), generator=generator, dtype=torch.uint8)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        elif not is_load(name):
            tensors[name] = p.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    config = FAMILY.hf_config() | {"quantization_config": QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache  # a value at a time takes half a second
def expected(directory: Path) -> dict[str, torch.Tensor]:
    stored = load_file(directory / "model.safetensors")
    names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
    whole = {name: by_hand(stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales")) for name in names}
    return stored | whole


def test_a_model_has_the_values_of_the_format(directory: Path) -> None:
    weights = open_hugging_face(directory, FAMILY)
    check(weights, FAMILY)
    net, wanted = random_net(FAMILY, seed=1), expected(directory)
    load_weights(weights, net)
    actual = {name: t for name, t in net.state_dict().items() if not is_load(name)}
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor.float()), name
    assert wanted[f"{LAYER}.down_proj"].unique().numel() > 40


def test_values_are_those_of_transformers(directory: Path) -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    stored, wanted = load_file(directory / "model.safetensors"), expected(directory)
    for name in ("gate_up_proj", "down_proj"):
        theirs = mxfp4.convert_moe_packed_tensors(
            stored[f"{LAYER}.{name}_blocks"], stored[f"{LAYER}.{name}_scales"]
        )
        assert torch.equal(theirs, wanted[f"{LAYER}.{name}"])


def test_control_the_order_of_the_values_of_a_byte_counts(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    blocks, scales = (stored[f"{LAYER}.down_proj{end}"] for end in ("_blocks", "_scales"))
    swapped = ((blocks & 15) << 4) | (blocks >> 4)
    assert not torch.equal(values_of(swapped, scales), values_of(blocks, scales))


def test_every_number_is_exact() -> None:
    """All nibbles with all scales; the largest are infinite, and with the scale 255 none is a number."""
    blocks = torch.tensor([i | (i << 4) for i in range(16)], dtype=torch.uint8)
    for scale in range(255):
        actual = values_of(blocks[None], torch.tensor([scale], dtype=torch.uint8))
        for i, number in enumerate(actual.view(16, 2)[:, 0].tolist()):
            wanted = value(i, scale)
            assert number == wanted or (abs(wanted) >= 2.0**128 and abs(number) == float("inf"))
    assert not values_of(blocks[None], torch.tensor([255], dtype=torch.uint8)).isfinite().any()


@pytest.mark.parametrize(
    "region",
    [
        (slice(0, 12), slice(0, 64), slice(0, 64)),
        (slice(3, 5), slice(0, 64), slice(0, 64)),
        (slice(2, 9), slice(31, 33), slice(0, 64)),
        (slice(11, 12), slice(40, 41), slice(5, 17)),
    ],
    ids=str,
)
def test_any_region_is_read(directory: Path, region: tuple[slice, ...]) -> None:
    """As for shards of ranks."""
    stored = open_hugging_face(directory, FAMILY).tensors[f"{LAYER}.gate_up_proj"]
    assert stored.shape == (12, 64, 64)
    assert torch.equal(stored.read(region), expected(directory)[f"{LAYER}.gate_up_proj"][region])
    assert len(stored.row_blocks()) == 12  # one expert is in memory at a time


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_export_has_no_quantization(directory: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    pair = ModelAndTokenizer(FAMILY, Bytes().build())
    weights = open_weights(directory, FAMILY)
    write_directory(weights, tmp_path / "ours", pair, ExportFormat(dtype=dtype))
    config = json.loads((tmp_path / "ours/config.json").read_text())
    assert "quantization_config" not in config
    actual, wanted = tensors_in(tmp_path / "ours"), expected(directory)
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], t.to(dtype)) for name, t in wanted.items())
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    weight = theirs.state_dict()[f"{LAYER}.gate_up_proj"]
    assert torch.equal(weight.bfloat16(), wanted[f"{LAYER}.gate_up_proj"])


def test_a_run_starts_from_them(directory: Path, tmp_path: Path, corpus: Path) -> None:
    initial = f"--checkpoint.initial_load_path={directory}"
    job = make_job(tmp_path, corpus, *keys_of(FAMILY), initial, "--training.steps=1", "--optimizer.lr=1e-30")
    train(job)
    weights = open_weights(job.folder, FAMILY).tensors[f"{LAYER}.down_proj"]
    whole = tuple(slice(0, size) for size in weights.shape)
    wanted = expected(directory)[f"{LAYER}.down_proj"].float()
    assert torch.allclose(weights.read(whole), wanted, rtol=0, atol=1e-20)  # zeros have moved by the rate


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{LAYER}.down_proj_scales"), "has no model.layers.1.mlp.experts.down_proj_scales"),
        (
            lambda t: t.update({f"{LAYER}.down_proj_scales": t[f"{LAYER}.down_proj_scales"][:, :-1].clone()}),
            r"expected blocks \[E, O, I / 32, 16\] and uint8 scales",
        ),
        (
            lambda t: t.update({f"{LAYER}.down_proj_scales": t[f"{LAYER}.down_proj_scales"].float()}),
            "its scales are torch.float32",
        ),
        (lambda t: t.pop(f"{LAYER}.down_proj_blocks"), "experts.down_proj of shape .* is missing"),
    ],
    ids=["missing", "shape", "dtype", "no blocks"],
)
def test_blocks_without_fitting_scales_are_named(
    directory: Path, tmp_path: Path, change: object, message: str
) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        check(open_hugging_face(tmp_path, FAMILY), FAMILY)


def test_values_that_are_not_finite_are_refused(directory: Path, tmp_path: Path, corpus: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{LAYER}.down_proj_scales"][3, 4, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    initial = f"--checkpoint.initial_load_path={tmp_path}"
    with pytest.raises(ConfigError, match=r"experts\.down_proj has values that are not finite"):
        train(make_job(tmp_path, corpus, *keys_of(FAMILY), initial, "--training.steps=1"))
