"""Qwen3.5, dense and with experts, equals transformers' models in fp64: in fp32, each differs from fp64 by up
to 7e-4 of the largest gradient. Decoding and packed documents equal the whole forward. A config.json is read
and written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tiers import full
from titanlite.attention.gated_delta_rule_kernels import torch_rule
from titanlite.attention.kv_cache import KVCache
from titanlite.attention.linear import LinearBackend
from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError
from titanlite.models import qwen3_5
from titanlite.models.base import Decoder, LossHead, ModelFamily
from titanlite.models.hf_config import read_family
from titanlite.models.layers import OffsetNorm
from titanlite.models.qwen3_5 import Qwen3_5
from titanlite.models.qwen3_5_moe import Qwen3_5MoE
from titanlite.parallel.initialize import fill_normal

SHAPE: dict[str, Any] = {
    "dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 100,
    "delta_n_k_heads": 2, "delta_n_v_heads": 4, "delta_k_head_dim": 8, "delta_v_head_dim": 12,
    "tie_word_embeddings": False,
}  # fmt: skip
DENSE = {**SHAPE, "hidden_dim": 48}
EXPERTS = {
    **SHAPE, "n_experts": 6, "n_experts_per_token": 3, "moe_hidden_dim": 24, "shared_hidden_dim": 40,
}  # fmt: skip
CASES: dict[str, tuple[type[ModelFamily], dict[str, Any]]] = {
    "dense": (Qwen3_5, DENSE),
    "tied": (Qwen3_5, {**DENSE, "layer_pattern": "LD", "rotary_share": 0.5, "tie_word_embeddings": True}),
    "experts": (Qwen3_5MoE, EXPERTS),
}


def family_of(case: str, **changed: Any) -> ModelFamily:
    family, overrides = CASES[case]
    return family(flavor="debug", overrides={**overrides, **changed})


def random_net(family: ModelFamily) -> Decoder:
    net, g = family.build(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(torch.randn(p.shape, generator=g) * 0.15 + net.init_normal(name)[0])
    return net


def tokens(length: int = 100) -> torch.Tensor:
    return torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(1))


class _DoubleTorch:
    """The module torch, in which float32 means float64."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that compute in fp32 compute in fp64."""
    transformers = pytest.importorskip("transformers", minversion="5.6")
    for name in ("qwen3_5", "qwen3_5_moe"):
        models = getattr(transformers.models, name)
        monkeypatch.setattr(getattr(models, f"modeling_{name}"), "torch", _DoubleTorch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def theirs_of(net: Decoder, family: ModelFamily, state: dict[str, torch.Tensor] | None = None) -> Any:
    """transformers' model with the weights of `net` or of `state`."""
    import transformers

    config = transformers.AutoConfig.for_model(**family.hf_config())
    theirs = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    state = dict(net.named_parameters()) if state is None else state
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if family.config.tie_word_embeddings else [])
    return theirs.eval().double()


def results(net: Any) -> dict[str, torch.Tensor]:
    """The logits, and the gradients of the loss of 40 tokens."""
    net.zero_grad()
    logits = net(tokens())
    logits = logits if torch.is_tensor(logits) else logits.logits
    loss = torch.nn.functional.cross_entropy(logits[:, -41:-1].flatten(0, 1), tokens()[:, -40:].flatten())
    loss.backward()
    return {"logits": logits.detach(), **{name: p.grad.clone() for name, p in net.named_parameters()}}


def largest_difference(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Relative to the largest value of each tensor."""
    assert actual.keys() == wanted.keys()
    return max(float((actual[name] - x).abs().max() / x.abs().max()) for name, x in wanted.items())


@pytest.mark.parametrize("case", ["dense", full("tied"), "experts"])
def test_logits_and_gradients_equal_transformers(doubles: None, case: str) -> None:
    family = family_of(case)
    net = random_net(family)
    wanted = results(theirs_of(net, family))
    assert wanted["logits"].std() > 0.2
    # The weights of experts are computed in fp32.
    assert largest_difference(results(net.double()), wanted) < (1e-4 if case == "experts" else 1e-10)


def _gate_before_query(self: Any, x: Any, cos: Any, sin: Any, attention: Any) -> Any:
    self.q_proj.weight.data = (
        self.q_proj.weight.data.unflatten(0, (-1, 2, self.head_dim)).flip(1).flatten(0, 2)
    )
    return ORIGINAL(self, x, cos, sin, attention)


ORIGINAL = qwen3_5.SelfAttention.forward


@pytest.mark.parametrize("fault", ["gate before query", "norms without the offset", "other rotary dims"])
def test_control_each_part_counts(doubles: None, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_of("dense")
    net = random_net(family)
    wanted = theirs_of(net, family)(tokens()).logits
    if fault == "other rotary dims":
        other = family_of("dense", rotary_share=0.5).build()
        other.load_state_dict(net.state_dict())
        net = other
    elif fault == "gate before query":
        monkeypatch.setattr(qwen3_5.SelfAttention, "forward", _gate_before_query)
    else:
        monkeypatch.setattr(OffsetNorm, "offset", 0.0)
    assert (net.double()(tokens()) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("case", ["dense", full("tied")])
def test_multi_token_prediction_is_a_plain_computation(doubles: None, case: str) -> None:
    """Loss and gradients are those of transformers' layer behind the joining of its two inputs. The order of
    the two is vllm's, as other programs repeat it."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer

    net = random_net(family_of(case, n_mtp_layers=1)).double()
    ids, T = tokens(), 100
    names = net.hf_tensors
    state = {names(name, p.shape)[0][0]: p for name, p in net.named_parameters()}
    assert len(state) == len(dict(net.named_parameters()))

    def loss(hidden: torch.Tensor, weight: torch.Tensor, shift: int = 1) -> torch.Tensor:
        logits = hidden[:, : T - shift] @ weight.T
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, shift:].flatten(), reduction="sum"
        )

    later = torch.nn.functional.pad(ids[:, 1:], (0, 1))
    head = LossHead(loss, lambda distance: (later, lambda h, w: loss(h, w, 1 + distance)))
    main = net(ids, head_fn=head)
    actual = net.auxiliary_losses()["mtp_loss"]

    family = family_of(case)
    theirs = theirs_of(net, family, {name: p for name, p in state.items() if not name.startswith("mtp.")})
    layer = Qwen3_5DecoderLayer(theirs.config, theirs.config.layer_types.index("full_attention")).double()
    prefix = "mtp.layers.0."
    layer.load_state_dict({n.removeprefix(prefix): p for n, p in state.items() if n.startswith(prefix)})

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (1 + state[f"mtp.{name}.weight"])

    def expected(embedding_first: bool = True) -> torch.Tensor:
        h = theirs.model(ids).last_hidden_state
        embedded = theirs.model.embed_tokens(later)
        both = norm(embedded, "pre_fc_norm_embedding"), norm(h, "pre_fc_norm_hidden")
        x = torch.cat(both if embedding_first else both[::-1], -1) @ state["mtp.fc.weight"].T
        mask = torch.full((T, T), -torch.inf, dtype=x.dtype).triu(1)[None, None]
        x = layer(x, theirs.model.rotary_emb(x, torch.arange(T)[None]), mask)
        return 0.3 * loss(norm(x, "norm"), theirs.lm_head.weight, 2)

    wanted = expected()
    assert actual.item() == pytest.approx(wanted.item(), rel=1e-10)
    assert expected(embedding_first=False).item() != pytest.approx(wanted.item(), rel=1e-3)  # control
    assert main.item() == pytest.approx(
        loss(theirs.model(ids).last_hidden_state, theirs.lm_head.weight).item()
    )
    (of_ours,) = torch.autograd.grad(actual, [net.get_parameter("model.embed_tokens.weight")])
    (of_theirs,) = torch.autograd.grad(wanted, [theirs.model.embed_tokens.weight])
    assert (of_ours - of_theirs).abs().max() < 1e-8 * of_theirs.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("case", ["dense", full("experts")])
def test_decoding_equals_the_whole_forward(case: str) -> None:
    net, ids = random_net(family_of(case)), tokens(40)
    whole = net(ids)
    cache, outs = KVCache(40), []
    for part in ids.split((30, *[1] * 10), dim=1):
        outs.append(net(part, cache.advance(part.shape[1], part.device), cache))
    assert (torch.cat(outs, 1) - whole).abs().max() < 1e-3
    state = cache._linear.states[0].convolution
    assert state.untyped_storage().nbytes() == state.nbytes  # of a few tokens, not of all
    cache = KVCache(40)
    outs = []
    for part in ids.split((30, *[1] * 10), dim=1):  # control: states are lost
        outs.append(net(part, cache.advance(part.shape[1], part.device), cache))
        cache._linear.states.clear()
    assert (torch.cat(outs, 1) - whole).abs().max() > 1e-2


@torch.no_grad()
def test_no_bit_of_another_document_reaches_a_token() -> None:
    net, ids = random_net(family_of("dense")), tokens(60)
    positions = torch.cat((torch.arange(25), torch.arange(35))).expand(2, -1)
    backend = LinearBackend(softmax=SDPA(), rule=torch_rule)
    other = ids.clone()
    other[:, :25] = (ids[:, :25] + 1) % 100
    packed = [net(x, positions, backend.for_documents(positions, 4)) for x in (ids, other)]
    assert torch.equal(packed[0][:, 25:], packed[1][:, 25:])
    alone = net(ids[:, 25:])
    assert (packed[0][:, 25:] - alone).abs().max() < 1e-3
    whole = [net(x, None, backend.for_sequences(x)) for x in (ids, other)]
    assert not torch.equal(whole[0][:, 25:], whole[1][:, 25:])  # control


def test_initial_values() -> None:
    """exp(A_log) is uniform between 0.01 and 16; other parameters of a gated delta net have their means."""
    net = family_of("dense").build()
    name = "model.layers.0.linear_attn.A_log"
    values = torch.empty(4096)
    fill_normal(values, name, *net.init_normal(name), 0, function=net.init_function(name))
    rates = values.exp()
    assert 0.01 <= rates.min() < 0.1
    assert 15.9 < rates.max() <= 16.0
    assert abs(rates.mean() - 8.005) < 0.25
    assert abs(rates.std() - 16 / math.sqrt(12)) < 0.15
    assert net.init_normal("model.layers.0.linear_attn.dt_bias") == (1.0, 0.0)
    assert net.init_normal("model.layers.0.linear_attn.norm.weight") == (1.0, 0.0)
    assert net.init_normal("model.layers.0.input_layernorm.weight") == (0.0, 0.0)
    assert net.init_function("model.layers.0.linear_attn.dt_bias") is None


def test_flops_count_states_and_not_keys() -> None:
    net = family_of("dense").build_on_meta()
    matmul = 6 * net.num_matmul_parameters()
    assert net.flops_per_token(0) == matmul + 3 * 18 * 4 * 8 * 12
    assert net.flops_per_token(1000) - net.flops_per_token(0) == 6 * 4 * (16 + 16) * 1000  # of one layer


SIZES = [
    (Qwen3_5, "0.8B", 752_393_024),
    (Qwen3_5, "2B", 1_881_825_088),
    (Qwen3_5, "4B", 4_205_751_296),
    (Qwen3_5, "9B", 8_953_803_264),
    (Qwen3_5, "27B", 26_895_998_464),
    (Qwen3_5MoE, "35B-A3B", 34_660_610_688),
    (Qwen3_5MoE, "397B-A17B", 396_346_350_336),
]


@pytest.mark.parametrize(("family", "flavor", "size"), SIZES, ids=lambda value: str(value))
def test_sizes(family: type[ModelFamily], flavor: str, size: int) -> None:
    assert sum(p.numel() for p in family(flavor=flavor).build_on_meta().parameters()) == size


@pytest.mark.parametrize("case", list(CASES))
def test_a_written_config_is_read_back(case: str, tmp_path: Path) -> None:
    family = family_of(case, max_position=4096, rope_theta=5e5, n_mtp_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(family.hf_config()))
    read = read_family(tmp_path)
    assert (type(read), read.config) == (type(family), family.config)


PUBLISHED: dict[str, Any] = {  # text_config of Qwen3.5-27B, as other programs repeat it
    "attention_bias": False, "attn_output_gate": True, "full_attention_interval": 4, "head_dim": 256,
    "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
}  # fmt: skip


def test_a_published_config_is_the_flavor(tmp_path: Path) -> None:
    flavor = Qwen3_5(flavor="27B", overrides={"n_mtp_layers": 1}).config
    layer_types = (["linear_attention"] * 3 + ["full_attention"]) * 16
    multimodal = {"model_type": "qwen3_5", "text_config": PUBLISHED, "vision_config": {}}
    for config in (PUBLISHED, {**PUBLISHED, "layer_types": layer_types}, multimodal):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_family(tmp_path).config == flavor


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate: only true is supported"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings: only false is supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, in rope_parameters 0.25"),
        ({"model_type": [1]}, r"model_type \[1\] is not supported"),
        ({"rope_parameters": [1]}, "rope_parameters is not an object"),
        ({"full_attention_interval": 0}, "full_attention_interval = 0 is not a number of layers"),
        ({"layer_types": ["sliding_attention"] * 64}, 'layer_types: "sliding_attention" is not supported'),
        ({"linear_num_value_heads": 40}, "delta_n_v_heads = 40 is not a multiple of delta_n_k_heads = 16"),
        ({"partial_rotary_factor": 0.27, "rope_parameters": {}}, "rotary_share = 0.27: 69.12 of head_dim"),
    ],
    ids=str,
)
def test_a_config_that_is_not_supported_is_one_line(
    changed: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changed))
    with pytest.raises(ConfigError, match=message) as e:
        read_family(tmp_path)
    assert "\n" not in str(e.value)


def test_letters_of_a_pattern() -> None:
    with pytest.raises(
        ConfigError, match=r"'S' is neither L \(all earlier tokens\) nor D \(a gated delta net\)"
    ):
        family_of("dense", layer_pattern="SL")
    kinds = [str(kind) for kind in family_of("dense").attention_kinds]
    assert kinds == ["linear", "linear", "linear", "full"]
    assert replace(family_of("dense").config, layer_pattern="DDDLDDDL").shortest_pattern == "DDDL"
