"""The families equal Hugging Face's models: parameter names, shapes and logits. Flavors have the sizes of the
published models, and a written config.json is read back unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.hf_config import read_family
from titanlite.models.llama3 import Llama3
from titanlite.models.qwen3 import Qwen3

transformers = pytest.importorskip("transformers")

SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 300}
# With a short original context, positions are in all three ranges of the rope scaling.
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 64, "rope_theta": 1e4}
CASES = {
    "llama3": (Llama3, {"head_dim": 8}),
    "llama3 tied": (Llama3, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3 scaled rope": (Llama3, {"head_dim": 16, **SCALED}),
    "llama3 scaled rope tied": (Llama3, {"head_dim": 8, "tie_word_embeddings": True, **SCALED}),
    "qwen3": (Qwen3, {"head_dim": 16}),
    "qwen3 tied": (Qwen3, {"head_dim": 16, "tie_word_embeddings": True}),
}


def family_of(case: str) -> ModelFamily:
    family, overrides = CASES[case]
    return family(flavor="debug", overrides={**SHAPE, "tie_word_embeddings": False, **overrides})


def pair(family: ModelFamily) -> tuple[Decoder, Any]:
    """The same random model in titanlite and in transformers, with random norms, too."""
    net = family.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15 + (p.ndim == 1))
    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing, unexpected = theirs.load_state_dict(net.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if family.config.tie_word_embeddings else [])
    return net, theirs


@pytest.fixture(params=CASES)
def models(request: pytest.FixtureRequest) -> tuple[Decoder, Any]:
    return pair(family_of(request.param))


def tokens(num_sequences: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, SHAPE["vocab_size"], (num_sequences, 256), generator=generator)


def test_names_and_shapes(models) -> None:
    ours, theirs = models
    names = {name: p.shape for name, p in ours.named_parameters()}
    assert names == {name: p.shape for name, p in theirs.named_parameters()}


@torch.no_grad()
def test_logits(models) -> None:
    ours, theirs = models
    assert (ours(tokens()) - theirs(tokens()).logits).abs().max() < 1e-4


@torch.no_grad()
def test_likeliest_tokens_in_bf16(models) -> None:
    """The most likely tokens agree wherever the two largest logits differ by more than bf16's rounding (a
    tenth of the logits' spread). Over all positions, titanlite agrees with fp32 as often as transformers
    does."""
    ours, theirs = models
    exact = ours(tokens(8))
    first, second = exact.topk(2).values.unbind(-1)
    decided = first - second > 0.1 * exact.std(-1)
    assert decided.float().mean() > 0.7
    actual, wanted = ours.bfloat16()(tokens(8)).argmax(-1), theirs.bfloat16()(tokens(8)).logits.argmax(-1)

    def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a == b).float().mean().item()

    assert agreement(actual[decided], wanted[decided]) > 0.99
    assert agreement(actual, exact.argmax(-1)) > agreement(wanted, exact.argmax(-1)) - 0.005


@torch.no_grad()
def test_control_each_part_of_a_family_counts() -> None:
    """The logits differ without the norms, and with another rotary embedding."""
    ours, theirs = pair(family_of("qwen3"))
    wanted = theirs(tokens()).logits
    for name in ("q_norm", "k_norm"):
        weight = ours.blocks()["1"].self_attn.get_submodule(name).weight
        before = weight.clone()
        weight.copy_(before.flip(0))
        assert (ours(tokens()) - wanted).abs().max() > 1e-2
        weight.copy_(before)
    scaled, plain = (pair(family_of(case))[0] for case in ("llama3 scaled rope", "llama3"))
    assert scaled.config.rope_scaling != plain.config.rope_scaling


SIZES = [
    (Llama3, "1B", 1_235_814_400),
    (Llama3, "3B", 3_212_749_824),
    (Llama3, "8B", 8_030_261_248),
    (Llama3, "70B", 70_553_706_496),
    (Llama3, "405B", 405_853_388_800),
    (Qwen3, "0.6B", 596_049_920),
    (Qwen3, "1.7B", 1_720_574_976),
    (Qwen3, "4B", 4_022_468_096),
    (Qwen3, "8B", 8_190_735_360),
    (Qwen3, "14B", 14_768_307_200),
    (Qwen3, "32B", 32_762_123_264),
]


@pytest.mark.parametrize(("family", "flavor", "parameters"), SIZES)
def test_flavors_have_the_published_sizes(family: Any, flavor: str, parameters: int) -> None:
    chosen = family(flavor=flavor)
    with torch.device("meta"):
        net = chosen.build()
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**chosen.hf_config())
        )
    assert sum(p.numel() for p in net.parameters()) == parameters
    assert {n: p.shape for n, p in net.named_parameters()} == {
        n: p.shape for n, p in theirs.named_parameters()
    }
    c = chosen.config
    looked_up = 0 if c.tie_word_embeddings else c.vocab_size * c.dim
    assert net.num_matmul_parameters() == parameters - looked_up


# ---- config.json


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_read_as_it_is_written(case: str, tmp_path: Path) -> None:
    family = family_of(case)
    actual = read_family(write(tmp_path, family.hf_config()))
    assert type(actual) is type(family)
    ours, theirs = actual.config, family.config
    if theirs.__dict__.get("rope_factor") == 1.0:  # config.json has no keys for a scaling of 1
        assert ours.rope_factor == 1.0
    else:
        assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_read_as_transformers_writes_it(case: str, tmp_path: Path) -> None:
    family = family_of(case)
    transformers.AutoConfig.for_model(**family.hf_config()).save_pretrained(tmp_path)
    assert read_family(tmp_path).hf_config() == family.hf_config()


@pytest.mark.parametrize(("family", "flavor"), [(f, n) for f in (Llama3, Qwen3) for n in f.flavors])
def test_a_published_shape_is_a_flavor(family: Any, flavor: str, tmp_path: Path) -> None:
    actual = read_family(write(tmp_path, family(flavor=flavor).hf_config()))
    assert actual == family(flavor=flavor)


# The relevant keys of Llama 3.2 1B's and Qwen3 8B's config.json, as written before transformers 5.
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 2048,
    "attention_bias": False, "mlp_bias": False, "head_dim": 64, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 16,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "vocab_size": 128256, "pretraining_tp": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "hidden_size": 4096,
    "attention_bias": False, "head_dim": 128, "intermediate_size": 12288, "max_position_embeddings": 40960,
    "max_window_layers": 36, "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_configs(tmp_path: Path) -> None:
    assert read_family(write(tmp_path, LLAMA)) == Llama3(flavor="1B")
    assert read_family(write(tmp_path, QWEN)) == Qwen3(flavor="8B")
    without = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_scaling", "num_key_value_heads")}
    c = read_family(write(tmp_path, without)).config
    assert (c.head_dim, c.n_kv_heads, c.rope_factor) == (64, 32, 1.0)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"model_type": "gpt2"}, 'model_type "gpt2" is not supported (known: llama, qwen3)'),
        (LLAMA, {"model_type": "qwen3_moe"}, 'model_type "qwen3_moe" is not supported'),
        (LLAMA, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 'rope_type "yarn" is not supported'),
        (QWEN, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 'rope_type "yarn" is not supported'),
        (QWEN, {"rope_scaling": LLAMA["rope_scaling"]}, 'rope_type "llama3" is not supported, "default" is'),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3"}},
            "does not describe a llama model: KeyError: 'factor'",
        ),
        (LLAMA, {"hidden_act": "gelu"}, 'hidden_act = "gelu"; only "silu" is supported'),
        (LLAMA, {"attention_bias": True}, "attention_bias = true; only false is supported"),
        (QWEN, {"use_sliding_window": True}, "use_sliding_window = true; only false is supported"),
        (QWEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; only 1.0 is supported"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        (LLAMA, {"hidden_size": None}, "config.json has no hidden_size"),
        (LLAMA, {"num_hidden_layers": "16"}, "n_layers: expected int, got '16'"),
        (LLAMA, {"num_key_value_heads": 5}, "not a multiple of n_kv_heads = 5"),
        (QWEN, {"num_hidden_layers": 0}, "n_layers = 0 is not above 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_unsupported_config_is_refused(base: dict, change: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as e:
        read_family(write(tmp_path, base | change))
    assert message in str(e.value)
    assert str(tmp_path) in str(e.value)
    assert "\n" not in str(e.value)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_family(tmp_path)
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_family(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="is not a JSON object"):
        read_family(tmp_path)
