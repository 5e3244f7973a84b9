"""The families equal Hugging Face's models: parameter names, shapes and logits. Flavors have the sizes of the
published models, and a written config.json is read back unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiers import full, sampled
from titanlite.config.component import ConfigError
from titanlite.models.base import Decoder, ModelFamily
from titanlite.models.gemma3 import Gemma3, Gemma3Config, OffsetNorm
from titanlite.models.hf_config import read_family
from titanlite.models.llama3 import Llama3
from titanlite.models.mistral import Mistral
from titanlite.models.olmo3 import Olmo3
from titanlite.models.qwen2 import Qwen2
from titanlite.models.qwen3 import Qwen3

transformers = pytest.importorskip("transformers")

FAMILIES = (Gemma3, Llama3, Mistral, Olmo3, Qwen2, Qwen3)
SHAPE = {"dim": 64, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 300}
# With a short original context, positions are in all three ranges of the rope scaling.
SCALED = {"rope_factor": 8.0, "rope_original_max_position": 64, "rope_theta": 1e4}
# The sequences of 256 tokens exceed the original length and the window.
YARN = {"rope_type": "yarn", "rope_factor": 4.0, "rope_original_max_position": 64, "rope_theta": 1e4}
LINEAR = {"rope_type": "linear", "rope_factor": 4.0}
WINDOW = {"sliding_window": 48}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, **WINDOW}  # three layers: SSL
OLMO = {"head_dim": 8, **WINDOW, "layer_pattern": "SSL"}
CASES = {
    "llama3": (Llama3, {"head_dim": 8}),
    "llama3 tied": (Llama3, {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3 scaled rope": (Llama3, {"head_dim": 16, **SCALED}),
    "llama3 scaled rope tied": (Llama3, {"head_dim": 8, "tie_word_embeddings": True, **SCALED}),
    "qwen3": (Qwen3, {"head_dim": 16}),
    "qwen3 tied": (Qwen3, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen2": (Qwen2, {"head_dim": 8}),
    "qwen2 yarn tied": (Qwen2, {"head_dim": 16, "tie_word_embeddings": True, **YARN}),
    "mistral window": (Mistral, {"head_dim": 16, **WINDOW}),
    "mistral window linear": (Mistral, {"head_dim": 8, **WINDOW, **LINEAR}),
    "llama3 yarn": (Llama3, {"head_dim": 16, **YARN, "rope_attention_factor": 0.9, "rope_beta_fast": 8.0}),
    "qwen2 yarn not rounded": (Qwen2, {"head_dim": 32, **YARN, "rope_truncate": False}),
    "qwen3 linear": (Qwen3, {"head_dim": 16, **LINEAR}),
    "qwen3 window": (Qwen3, {"head_dim": 16, **WINDOW}),
    "qwen2 window": (Qwen2, {"head_dim": 16, **WINDOW}),
    "qwen3 mixed": (Qwen3, {"head_dim": 16, **WINDOW, "layer_pattern": "SL"}),
    "qwen2 mixed": (Qwen2, {"head_dim": 16, **WINDOW, "layer_pattern": "LSS"}),
    "mistral": (Mistral, {"head_dim": 16, "sliding_window": 0, "rope_theta": 1e6}),
    "gemma3": (Gemma3, GEMMA),
    "gemma3 linear tied": (Gemma3, {**GEMMA, **LINEAR, "tie_word_embeddings": True}),
    "gemma3 yarn": (Gemma3, {**GEMMA, **YARN, "window_rope_scaled": True, "rope_theta": 1e6}),
    "gemma3 one base": (Gemma3, {**GEMMA, **LINEAR, "window_rope_theta": 0.0, "layer_pattern": ""}),
    "gemma3 full": (Gemma3, {**GEMMA, "sliding_window": 0, "layer_pattern": ""}),
    "olmo3": (Olmo3, {**OLMO, **YARN}),
    "olmo3 tied": (Olmo3, {**OLMO, "head_dim": 16, "layer_pattern": "LS", "tie_word_embeddings": True}),
    "olmo3 two bases": (Olmo3, {**OLMO, "window_rope_theta": 1e4}),
    "olmo3 scaled windows": (Olmo3, {**OLMO, **YARN, "window_rope_scaled": True}),
    "olmo3 full": (Olmo3, {**OLMO, **YARN, "sliding_window": 0, "layer_pattern": ""}),
}
DEFAULT_TIER = {
    *list(CASES)[:6], "qwen3 mixed", "qwen2 yarn tied", "mistral window linear", "gemma3 linear tied",
    "olmo3",
}  # fmt: skip


def family_of(case: str) -> ModelFamily:
    family, overrides = CASES[case]
    return family(flavor="debug", overrides={**SHAPE, "tie_word_embeddings": False, **overrides})


def pair(family: ModelFamily) -> tuple[Decoder, Any]:
    """The same random model in titanlite and in transformers, with random norms, too."""
    net = family.build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.15)
        for name, p in net.named_parameters():
            if name.endswith("norm.weight"):
                p.add_(net.init_normal(name)[0])
    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    missing, unexpected = theirs.load_state_dict(net.state_dict(), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if family.config.tie_word_embeddings else [])
    return net, theirs


@pytest.fixture(params=sampled(CASES, DEFAULT_TIER))
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


def differences_of_gradients(ours: Decoder, theirs: Any) -> dict[str, float]:
    """The largest difference of each parameter's gradients of the loss of 64 tokens, relative to the largest
    gradient of the parameter."""
    inputs = tokens().clamp(min=2)  # transformers drops the gradient of padding: Gemma's 0, Olmo 3's 1
    targets = inputs[:, -64:].flatten()
    for logits in (ours(inputs), theirs(inputs).logits):
        torch.nn.functional.cross_entropy(logits[:, -65:-1].flatten(0, 1), targets).backward()
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    return {
        name: float((p.grad - wanted[name]).abs().max() / wanted[name].abs().max())
        for name, p in ours.named_parameters()
    }


@pytest.mark.parametrize("case", sampled(CASES, {"gemma3 linear tied", "olmo3"}))
def test_gradients(case: str) -> None:
    differences = differences_of_gradients(*pair(family_of(case)))
    assert max(differences.values()) < 1e-5  # between 1e-6 and 3e-6


@pytest.mark.parametrize("changed", [{"sliding_window": 49}, full({"window_rope_theta": 9000.0})], ids=str)
def test_control_the_window_and_the_base_change_the_gradients(changed: dict[str, Any]) -> None:
    family = family_of("gemma3")
    ours, theirs = pair(family)
    other = replace(family, overrides=family.overrides | changed).build()
    other.load_state_dict(ours.state_dict())
    assert max(differences_of_gradients(other, theirs).values()) > 1e-3


@pytest.mark.full
@torch.no_grad()
def test_likeliest_tokens_in_bf16(models) -> None:
    """The most likely tokens agree wherever the two largest logits differ by more than bf16's rounding (a
    tenth of the logits' spread). Over all positions, titanlite agrees with fp32 as often as transformers
    does, but for 1% of the positions, which depend on the CPU."""
    ours, theirs = models
    exact = ours(tokens(8))
    first, second = exact.topk(2).values.unbind(-1)
    decided = first - second > 0.1 * exact.std(-1)
    assert decided.float().mean() > 0.7
    actual, wanted = ours.bfloat16()(tokens(8)).argmax(-1), theirs.bfloat16()(tokens(8)).logits.argmax(-1)

    def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
        return (a == b).float().mean().item()

    assert agreement(actual[decided], wanted[decided]) > 0.99
    assert agreement(actual, exact.argmax(-1)) > agreement(wanted, exact.argmax(-1)) - 0.01


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


@pytest.mark.parametrize(
    ("case", "without"),
    [
        ("mistral window", {"sliding_window": 0}),
        ("mistral window", {"sliding_window": 49}),
        ("qwen3 mixed", {"sliding_window": 49}),
        ("qwen3 mixed", {"layer_pattern": "LS"}),
        ("mistral window linear", {"rope_type": "llama3", "rope_factor": 1.0}),
        ("qwen2 yarn tied", {"rope_type": "llama3", "rope_factor": 1.0}),
        ("qwen2 yarn tied", {"rope_type": "linear"}),
        ("qwen2 yarn tied", {"rope_attention_factor": 1.0}),
        ("qwen2 yarn tied", {"rope_truncate": False}),
        ("qwen2", "q_proj.bias"),
        ("qwen2", "k_proj.bias"),
        ("qwen2", "v_proj.bias"),
        ("gemma3", {"sliding_window": 49}),
        ("gemma3", {"layer_pattern": "SLS"}),
        ("gemma3", {"window_rope_theta": 0.0}),
        ("gemma3", {"rope_theta": 1e4}),
        ("gemma3", {"query_pre_attn_scalar": 16}),
        ("gemma3 linear tied", {"window_rope_scaled": True}),
        ("olmo3", {"sliding_window": 49}),
        ("olmo3", {"layer_pattern": "SLS"}),
        ("olmo3", {"rope_type": "linear"}),
        ("olmo3", {"window_rope_scaled": True}),
        ("olmo3", {"window_rope_theta": 9000.0}),
    ],
    ids=str,
)
@torch.no_grad()
def test_control_a_window_a_scaling_or_a_bias_counts(case: str, without: dict[str, Any] | str) -> None:
    """The logits differ from transformers' without it."""
    family = family_of(case)
    ours, theirs = pair(family)
    wanted = theirs(tokens()).logits
    if isinstance(without, str):
        ours.get_parameter(f"model.layers.1.self_attn.{without}").zero_()
    else:
        other = replace(family, overrides=family.overrides | without).build()
        other.load_state_dict(ours.state_dict())
        ours = other
    difference = (ours(tokens()) - wanted).abs().amax((0, 2))
    assert difference.max() > 1e-2
    if "sliding_window" in without:  # the first tokens see all earlier ones
        assert difference[:48].max() < 1e-4


@pytest.mark.parametrize("fault", ["norms without the offset", "embedding without the scale", "SiLU"])
@torch.no_grad()
def test_control_each_part_of_gemma_counts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits differ from transformers' without it."""
    ours, theirs = pair(family_of("gemma3"))
    wanted = theirs(tokens()).logits
    if fault == "norms without the offset":
        monkeypatch.setattr(OffsetNorm, "offset", 0.0)
    elif fault == "embedding without the scale":
        monkeypatch.setattr(Gemma3Config, "embedding_scale", 1.0)
    else:
        monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate: torch.nn.functional.silu(x))
    assert (ours(tokens()) - wanted).abs().max() > 1e-2


SIZES = [
    (Llama3, "1B", 1_235_814_400),
    (Llama3, "3B", 3_212_749_824),
    (Llama3, "8B", 8_030_261_248),
    (Llama3, "70B", 70_553_706_496),
    (Llama3, "405B", 405_853_388_800),
    (Qwen2, "0.5B", 494_032_768),
    full(Qwen2, "1.5B", 1_543_714_304),
    full(Qwen2, "3B", 3_085_938_688),
    (Qwen2, "7B", 7_615_616_512),
    full(Qwen2, "14B", 14_770_033_664),
    full(Qwen2, "32B", 32_763_876_352),
    full(Qwen2, "72B", 72_706_203_648),
    (Mistral, "7B-v0.1", 7_241_732_096),
    full(Mistral, "7B-v0.3", 7_248_023_552),
    full(Mistral, "12B", 12_247_782_400),
    full(Mistral, "24B", 23_572_403_200),
    (Qwen3, "0.6B", 596_049_920),
    (Qwen3, "1.7B", 1_720_574_976),
    (Qwen3, "4B", 4_022_468_096),
    (Qwen3, "8B", 8_190_735_360),
    (Qwen3, "14B", 14_768_307_200),
    (Qwen3, "32B", 32_762_123_264),
    (Gemma3, "1B", 999_885_952),
    # Keras's presets of the text models have 64 rows of the vocabulary less.
    (Gemma3, "4B", 3_880_099_328 + 64 * 2560),
    (Gemma3, "12B", 11_765_788_416 + 64 * 3840),
    (Gemma3, "27B", 27_009_002_240 + 64 * 5376),
    # OLMo 2's 7B and 32B have the same layers, and 74 rows more in the embedding and in the head.
    (Olmo3, "7B", 7_298_617_344 - 2 * 74 * 4096),
    (Olmo3, "32B", 32_234_279_936 - 2 * 74 * 5120),
]


@pytest.mark.full
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
    if theirs.rope_factor == 1.0:  # config.json has no keys for a scaling of 1
        assert ours.rope_factor == 1.0
    else:
        assert ours == theirs
    assert ours.architecture_fields() == theirs.architecture_fields()


@pytest.mark.parametrize("case", CASES)
def test_a_config_is_read_as_transformers_writes_it(case: str, tmp_path: Path) -> None:
    family = family_of(case)
    transformers.AutoConfig.for_model(**family.hf_config()).save_pretrained(tmp_path)
    assert read_family(tmp_path).hf_config() == family.hf_config()


@pytest.mark.parametrize(("family", "flavor"), [(f, n) for f in FAMILIES for n in f.flavors])
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
# Those of Qwen2.5 0.5B's and of Mistral 7B v0.1's and v0.3's.
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
    "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
    "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1", "use_mrope": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
    "hidden_size": 4096, "intermediate_size": 14336, "max_position_embeddings": 32768,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.34.0.dev0", "vocab_size": 32000,
}  # fmt: skip
# Those of Gemma 3 1B's, and of the text_config of 27B's in the form of transformers 5.
GEMMA_1B = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attention_bias": False,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "transformers_version": "4.52.4",
    "vocab_size": 262144,
}  # fmt: skip
GEMMA_27B = {
    "model_type": "gemma3_text", "head_dim": 128, "hidden_size": 5376, "intermediate_size": 21504,
    "num_attention_heads": 32, "num_hidden_layers": 62, "num_key_value_heads": 16,
    "query_pre_attn_scalar": 168, "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip
# Those of Olmo 3 32B's.
OLMO_32B = {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": False,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 65536,
    "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278,
}  # fmt: skip
LINEAR_8 = {"rope_type": "linear", "factor": 8.0}
YARN_2 = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768}
MISTRAL_3 = {**MISTRAL, "rope_theta": 1000000.0, "sliding_window": None, "vocab_size": 32768}


def test_published_configs(tmp_path: Path) -> None:
    assert read_family(write(tmp_path, LLAMA)) == Llama3(flavor="1B")
    assert read_family(write(tmp_path, QWEN)) == Qwen3(flavor="8B")
    assert read_family(write(tmp_path, QWEN2)) == Qwen2(flavor="0.5B")
    assert read_family(write(tmp_path, MISTRAL)) == Mistral(flavor="7B-v0.1")
    assert read_family(write(tmp_path, MISTRAL_3)) == Mistral(flavor="7B-v0.3")
    assert read_family(write(tmp_path, GEMMA_1B)) == Gemma3(flavor="1B")
    assert read_family(write(tmp_path, GEMMA_27B)) == Gemma3(flavor="27B")
    assert read_family(write(tmp_path, OLMO_32B)) == Olmo3(flavor="32B")
    layer_types = ["full_attention" if (i + 1) % 4 == 0 else "sliding_attention" for i in range(64)]
    assert read_family(write(tmp_path, OLMO_32B | {"layer_types": layer_types})) == Olmo3(flavor="32B")
    multimodal = {"model_type": "gemma3", "text_config": GEMMA_27B, "vision_config": {}}
    assert read_family(write(tmp_path, multimodal)) == Gemma3(flavor="27B")
    before_5 = {key: value for key, value in GEMMA_27B.items() if key != "rope_parameters"}
    assert read_family(write(tmp_path, before_5 | {"rope_scaling": LINEAR_8})) == Gemma3(flavor="27B")
    without = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "rope_scaling", "num_key_value_heads")}
    c = read_family(write(tmp_path, without)).config
    assert (c.head_dim, c.n_kv_heads, c.rope_factor) == (64, 32, 1.0)


@pytest.mark.parametrize("key", ["attention_bias", "mlp_bias", "pretraining_tp", "rope_parameters"])
def test_a_null_is_a_missing_key(key: str, tmp_path: Path) -> None:
    """transformers 4 reads it as false, 1, or no rope_parameters."""
    assert read_family(write(tmp_path, LLAMA | {key: None})) == Llama3(flavor="1B")


def test_rope_scaling_is_preferred_as_in_transformers(tmp_path: Path) -> None:
    """Model cards ask people to add it to config.json, where transformers 5 has written rope_parameters."""
    parameters = {"rope_type": "default", "rope_theta": 1e6}
    write(tmp_path, QWEN2 | {"rope_scaling": YARN_2, "rope_parameters": parameters})
    assert transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_type"] == "yarn"
    config = read_family(tmp_path).config
    assert (config.rope_type, config.rope_factor, config.rope_theta) == ("yarn", 2.0, 1e6)


TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
CONTEXT = {"max_position_embeddings": 256, "sliding_window": 48}
ROPES = {
    "qwen2.5 extended": (QWEN2, {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
    "no original length": (QWEN2, {"type": "yarn", "factor": 2.0}),
    "deepseek": (
        MISTRAL,
        {
            "rope_type": "yarn", "factor": 40, "beta_fast": 16, "beta_slow": 2, "mscale": 1.0,
            "mscale_all_dim": 0.5, "original_max_position_embeddings": 64,
        },
    ),
    "factor 1": (QWEN2, {"rope_type": "yarn", "factor": 1.0}),
    "linear": (MISTRAL_3, {"type": "linear", "factor": 4.0}),
    "llama3": (LLAMA, LLAMA["rope_scaling"]),
    "default": (MISTRAL, {"rope_type": "default"}),
    "none": (MISTRAL, None),
}  # fmt: skip


GEMMA_ROPES: dict[str, dict[str, Any]] = {
    "bases": {"rope_theta": 5e4, "rope_local_base_freq": 100.0},
    "no bases": {"rope_theta": None, "rope_local_base_freq": None},
    "scaling": {"rope_theta": 5e4, "rope_scaling": LINEAR_8},
    "parameters": {
        "rope_parameters": {"full_attention": {"rope_theta": 5e4} | LINEAR_8, "sliding_attention": None},
    },
    "both": {
        "rope_scaling": LINEAR_8, "rope_theta": 7.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100.0},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("rope", "pattern"),
    [
        ("scaling", {"sliding_window_pattern": 2}),
        ("both", {}),
        *(full(rope, {}) for rope in GEMMA_ROPES if rope != "both"),
        *(full(rope, {"sliding_window_pattern": 2}) for rope in GEMMA_ROPES if rope != "scaling"),
    ],
    ids=str,
)
@torch.no_grad()
def test_the_layers_of_a_gemma_model(rope: str, pattern: dict[str, Any], tmp_path: Path) -> None:
    """The logits of a model of this config.json equal those of transformers, which reads it, too."""
    config = {key: value for key, value in GEMMA_1B.items() if key != "sliding_window_pattern"}
    config |= TINY | CONTEXT | {"head_dim": 16} | pattern | GEMMA_ROPES[rope] | {"num_hidden_layers": 6}
    config = {key: value for key, value in config.items() if value is not None}
    family = read_family(write(tmp_path, config))
    ours, _ = pair(family)
    assert family.config.layer_letters == "SL" * 3 if pattern else "SSSSSL"
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    assert (ours(tokens()) - theirs.eval()(tokens()).logits).abs().max() < 1e-4


@pytest.mark.parametrize("new", [False, True], ids=["transformers 4", "transformers 5"])
@pytest.mark.parametrize("rope", sampled(ROPES, {"qwen2.5 extended", "deepseek", "linear"}))
@torch.no_grad()
def test_a_published_config_at_a_tiny_width(rope: str, new: bool, tmp_path: Path) -> None:
    """The logits of a model of this config.json equal those of transformers, which reads it, too."""
    base, scaling = ROPES[rope]
    config = base | TINY | {"head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2} | CONTEXT
    if new:
        theta = config.pop("rope_theta")
        config |= {"rope_scaling": None, "rope_parameters": {"rope_theta": theta, **(scaling or {})}}
    else:
        config["rope_scaling"] = scaling
    write(tmp_path, config)
    ours, _ = pair(read_family(tmp_path))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    assert (ours(tokens()) - theirs.eval()(tokens()).logits).abs().max() < 1e-4


def test_a_llama_with_a_window_has_no_hugging_face_form() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window = 16: .* has no sliding window") as e:
        Llama3(flavor="debug", overrides={"sliding_window": 16}).hf_config()
    assert e.value.key == "model.overrides.sliding_window"


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        (Qwen3, {"layer_pattern": "SL", "window_rope_theta": 1e4}),
        (Mistral, {"window_rope_theta": 1e4}),
        (Qwen2, {"layer_pattern": "SL", "window_rope_scaled": False, **LINEAR}),
    ],
    ids=str,
)
def test_two_rotary_embeddings_have_no_hugging_face_form(family: Any, rope: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="all layers have the same rotary embedding") as e:
        family(flavor="debug", overrides={"sliding_window": 16, **rope}).hf_config()
    assert e.value.key == "model.overrides.window_rope_theta"
    without_effect = {"sliding_window": 16, **rope, "window_rope_theta": 0.0, "window_rope_scaled": True}
    assert family(flavor="debug", overrides=without_effect).hf_config()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_type": "yarm", "rope_factor": 2.0}, "unknown rope_type 'yarm'; did you mean 'yarn'?"),
        ({"rope_type": "yarn"}, "rope_type = 'yarn' without a rope_factor scales nothing; set both"),
        ({"sliding_window": -1}, "sliding_window = -1 is below 0"),
        ({"rope_attention_factor": -0.5}, "rope_attention_factor = -0.5 is below 0"),
        ({"rope_factor": 0.0}, "rope_factor = 0.0 is not above 0"),
        ({"rope_factor": float("inf")}, "rope_factor = inf is not finite"),
        ({"sliding_window": 0, "norm_eps": float("nan")}, "norm_eps = nan is not finite"),
        ({"rope_factor": 0.5}, "rope_factor = 0.5 is below 1"),
        ({"rope_type": "yarn", "rope_factor": 0.5}, "rope_factor = 0.5 is below 1"),
        (
            {"rope_factor": 2.0, "rope_low_freq_factor": 4.0},
            "rope_low_freq_factor = 4.0 is not below rope_high_freq_factor = 4.0",
        ),
    ],
)
def test_wrong_fields_are_told(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        Qwen2(flavor="debug", overrides=overrides)
    assert message in str(e.value)


def test_the_window_of_a_config_without_one_is_that_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, {key: value for key, value in MISTRAL.items() if key != "sliding_window"})
    assert read_family(tmp_path).config.sliding_window == 4096
    assert transformers.AutoConfig.from_pretrained(tmp_path).sliding_window == 4096


@pytest.mark.parametrize(
    ("change", "window", "pattern"),
    [
        ({"max_window_layers": 0}, 32768, ""),
        ({"max_window_layers": 0, "sliding_window": None}, 0, ""),
        ({"max_window_layers": 99}, 0, ""),
        ({"max_window_layers": 21}, 32768, "L" * 21 + "SSS"),
        ({"layer_types": ["sliding_attention"] * 24}, 32768, ""),
        ({"layer_types": ["sliding_attention"] * 24, "max_window_layers": None}, 32768, ""),
        ({"layer_types": ["full_attention"] * 24, "max_window_layers": 0}, 0, ""),
        ({"layer_types": ["sliding_attention", "full_attention"] * 12}, 32768, "SL"),
    ],
    ids=str,
)
def test_the_windows_of_a_qwen_model(
    change: dict[str, Any], window: int, pattern: str, tmp_path: Path
) -> None:
    write(tmp_path, QWEN2 | {"use_sliding_window": True} | change)
    config = read_family(tmp_path).config
    assert (config.sliding_window, config.layer_pattern) == (window, pattern)
    if None not in change.values():  # which transformers refuses, or reads as a value
        wanted = transformers.AutoConfig.from_pretrained(tmp_path)
        letters = ["SL"[one == "full_attention"] for one in wanted.layer_types]
        assert config.layer_letters == "".join(letters)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (
            LLAMA,
            {"model_type": "gpt2"},
            'model_type "gpt2" is not supported (known: ',
        ),
        (LLAMA, {"model_type": "gpt_neox"}, 'model_type "gpt_neox" is not supported'),
        ({"model_type": "gemma3"}, {}, "text_config is missing or not an object"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
            'rope_type "dynamic" is not supported (known: default, linear, llama3, yarn)',
        ),
        (QWEN2, {"rope_parameters": {"type": "longrope"}}, 'rope_type "longrope" is not supported'),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, 'rope_type "llama3" has no factor'),
        (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is not an object"),
        (LLAMA, {"rope_scaling": []}, "rope_scaling is not an object"),
        (QWEN2, {"rope_scaling": False, "rope_parameters": {}}, "rope_scaling is not an object"),
        (LLAMA, {"rope_scaling": None, "rope_parameters": [1]}, "rope_parameters is not an object"),
        (MISTRAL, {"rope_scaling": YARN_2, "rope_parameters": 1}, "rope_parameters is not an object"),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_factor = 0.5 is below 1"),
        (
            QWEN2,
            {"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.3}},
            "attention_factor is not supported with a factor of 1",
        ),
        (QWEN2, {"rope_scaling": YARN_2 | {"attention_factor": 0.0}}, "attention_factor = 0 is not above 0"),
        (QWEN2, {"rope_scaling": {"type": "yarn"}}, 'rope_type "yarn" has no factor'),
        (
            QWEN2,
            {"rope_scaling": {"type": "yarn", "factor": "4"}},
            "config.json: factor: expected float, got '4'",
        ),
        (
            QWEN2,
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": 0}},
            "truncate: expected bool, got 0",
        ),
        (
            MISTRAL,
            {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}},
            "a rope_type for each type of layer is not supported",
        ),
        (
            MISTRAL,
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is not supported",
        ),
        (
            {key: value for key, value in QWEN2.items() if key != "rope_theta"},
            {"rope_scaling": YARN_2, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_theta is 10000.0, in rope_parameters 1000000.0",
        ),
        (MISTRAL, {"sliding_window": "4096"}, "sliding_window: expected int, got '4096'"),
        (MISTRAL, {"sliding_window": -1}, "sliding_window = -1 is below 0"),
        (
            MISTRAL,
            {"num_attention_heads": 24},
            "hidden_size = 4096 is not a multiple of num_attention_heads = 24, and head_dim is missing",
        ),
        (MISTRAL, {"head_dim": 127}, "head_dim = 127 is odd"),
        (QWEN2, {"intermediate_size": None}, "config.json has no intermediate_size"),
        (LLAMA, {"hidden_act": "gelu"}, 'hidden_act = "gelu"; only "silu" is supported'),
        (LLAMA, {"attention_bias": True}, "attention_bias = true; only false is supported"),
        (LLAMA, {"use_sliding_window": True}, "use_sliding_window = true; only false is supported"),
        (
            QWEN2,
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 24},
            'layer_types: "linear_attention" is not supported',
        ),
        (
            QWEN2,
            {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
            "layer_types is not a list of 24 layers",
        ),
        (
            QWEN2,
            {"use_sliding_window": True, "max_window_layers": None},
            "max_window_layers = null is not an integer",
        ),
        (QWEN, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5; only 1.0 is supported"),
        (
            GEMMA_1B,
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0; only null is supported",
        ),
        (
            OLMO_32B,
            {"rope_theta": 1e4},
            "rope_parameters: sliding_attention has no rope_theta: transformers 4 reads rope_theta = 10000.0",
        ),
        (GEMMA_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0; only null is supported"),
        (GEMMA_1B, {"hidden_activation": "gelu"}, 'hidden_activation = "gelu"; only "gelu_pytorch_tanh" is'),
        (
            GEMMA_1B,
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention = true; only false is",
        ),
        (GEMMA_1B, {"sliding_window_pattern": 0}, "sliding_window_pattern = 0 is not a number of layers"),
        (GEMMA_1B, {"query_pre_attn_scalar": 168.5}, "query_pre_attn_scalar: expected int, got 168.5"),
        (GEMMA_1B, {"rope_parameters": LINEAR_8}, "rope_parameters: factor is not a type of layer"),
        (GEMMA_1B, {"rope_parameters": [1]}, "rope_parameters is not an object"),
        (GEMMA_1B, {"rope_scaling": "linear"}, "rope_scaling is not an object"),
        (
            GEMMA_1B,
            {"rope_parameters": {"full_attention": 1}},
            "rope_parameters: full_attention is not an object",
        ),
        (
            GEMMA_1B,
            {"rope_parameters": {"sliding_attention": LINEAR_8}},
            "sliding_attention has another scaling than full_attention, which is not supported",
        ),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
        (LLAMA, {"hidden_size": None}, "config.json has no hidden_size"),
        (LLAMA, {"num_hidden_layers": "16"}, "config.json: num_hidden_layers: expected int, got '16'"),
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
