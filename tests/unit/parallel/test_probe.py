"""Pins the probe: its statistics equal those of attention that is written out; planted faults of a model are
found where they are; nothing that training depends on changes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.auxiliary import Net
from tests.support.jobs import make_job, metrics_of
from tests.support.parallel_residual import ParallelResidual
from tests.support.probes import BLOCK, HEAD, UNIT, batch, model, probed, same
from tests.support.runs import history, state_of
from tests.support.tiers import full
from titanlite.attention import recording
from titanlite.attention.base import Attention
from titanlite.attention.sdpa import SDPAttention
from titanlite.data.batch import Batch
from titanlite.losses import CrossEntropy
from titanlite.mesh import ALONE
from titanlite.metrics.probe import probe_metrics
from titanlite.models.decoder import Block, RotaryDecoder
from titanlite.models.layers import apply_rope, rope_tables
from titanlite.parallel.apply import parallelize
from titanlite.parallel.probe import BlockStatistics, mlp_units
from titanlite.parallel.settings import ParallelSettings
from titanlite.torch_compat import compilations
from titanlite.train import train


@torch.no_grad()
def written_out(net: RotaryDecoder, batch: Batch) -> list[BlockStatistics]:
    """The statistics of a forward whose attention probabilities are computed in full, in float64."""
    T = batch.inputs.shape[1]
    positions = torch.arange(T) if batch.positions is None else batch.positions
    starts = torch.zeros_like(batch.inputs) if batch.positions is None else torch.arange(T) - batch.positions
    visible_BTT = (starts[:, :, None] == starts[:, None, :]) & torch.ones(T, T, dtype=torch.bool).tril()
    config = net.config
    cos, sin = rope_tables(positions, config.head_dim, config.rope_theta, config.rope_scaling)
    assert net.model.embed_tokens is not None
    x, result = net.model.embed_tokens(batch.inputs), []
    for name, block in net.blocks().items():
        assert isinstance(block, Block)
        attention, h = block.self_attn, block.input_layernorm(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, config.head_dim))
            for p in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (apply_rope(z, cos, sin) for z in (q, k))
        k, v = (z.repeat_interleave(config.n_heads // config.n_kv_heads, 2) for z in (k, v))
        scores = torch.einsum("bqhe,bshe->bhqs", q.double(), k.double()) / math.sqrt(config.head_dim)
        scores = scores.masked_fill(~visible_BTT[:, None], -math.inf)
        p = scores.softmax(-1)
        x = x + attention.o_proj(torch.einsum("bhqs,bshe->bqhe", p, v.double()).float().flatten(-2))
        h = block.post_attention_layernorm(x)
        units = F.silu(block.mlp.gate_proj(h)) * block.mlp.up_proj(h)
        x = x + block.mlp.down_proj(units)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
        dead = units.abs().amax((0, 1)) <= 1e-3 * units.square().mean().sqrt()
        result.append(
            BlockStatistics(
                f"model.layers.{name}",
                x.square().mean().sqrt().item(),
                x.abs().max().item(),
                scores[:, :, -64:].amax((0, 2, 3)).tolist(),
                entropy[:, :, -64:].mean((0, 2)).tolist(),
                100 * dead.float().mean().item(),
            )
        )
    return result


@pytest.mark.parametrize(
    ("compiled", "with_documents"), [(False, True), (False, False), (True, True), full(True, False)]
)
def test_the_statistics_are_those_of_attention_that_is_written_out(
    compiled: bool, with_documents: bool
) -> None:
    sharded, data = model(**({"compile": "eager"} if compiled else {})), batch(with_documents)
    if compiled:
        sharded.forward_backward([data], torch.tensor(data.num_targets))
    before = len(compilations())
    actual = sharded.probe(data)
    assert same(actual, written_out(sharded.net, data))
    assert [b.block for b in actual] == ["model.layers.0", "model.layers.1"]
    if compiled:  # neither the probe nor the step after it compiles anything
        sharded.forward_backward([data], torch.tensor(data.num_targets))
        assert 0 < before == len(compilations())


def test_planted_faults_are_found_where_they_are() -> None:
    metrics = probe_metrics(actual := probed(1, True, {}))
    assert metrics["probe/attention_logit_max_head"] == f"{BLOCK} head {HEAD}"
    assert metrics["probe/attention_entropy_min_head"] == f"{BLOCK} head {HEAD}"
    assert metrics["probe/attention_logit_max"] == max(actual[1].attention_logit_max) > 100
    assert metrics["probe/attention_entropy_min"] == min(actual[1].attention_entropy) < 0.5
    assert metrics["probe/dead_units_pct_block"] == BLOCK
    assert metrics["probe/dead_units_pct"] == pytest.approx(100 / 64)
    assert metrics["probe/residual_max_block"] == BLOCK
    assert metrics["probe/residual_max"] == actual[1].residual_max > actual[0].residual_max
    assert metrics["probe/residual_rms_last"] == actual[1].residual_rms
    assert actual[0].dead_units_pct == 0


def test_a_block_that_is_not_finite_is_named() -> None:
    """The blocks after it have NaN, too. As a maximum, NaN would lose against the block before."""
    sharded = model()
    with torch.no_grad():
        sharded.net.get_submodule(f"{BLOCK}.mlp.down_proj").weight[0, 0] = math.nan
    metrics = probe_metrics(actual := sharded.probe(batch()))
    assert math.isfinite(actual[0].residual_max)
    assert math.isnan(metrics["probe/residual_max"])
    assert metrics["probe/residual_max_block"] == BLOCK == actual[1].block
    with torch.no_grad():
        sharded.net.get_submodule(f"{BLOCK}.self_attn.k_proj").weight[0, 0] = math.nan
    metrics = probe_metrics(sharded.probe(batch()))
    for key in ("probe/attention_logit_max", "probe/attention_entropy_min"):
        assert math.isnan(metrics[key])
        assert metrics[f"{key}_head"].startswith(f"{BLOCK} head ")


def test_a_unit_that_one_token_uses_is_not_dead() -> None:
    sharded, data = model(), batch()
    up = sharded.net.get_submodule(f"{BLOCK}.mlp.up_proj")
    assert sharded.probe(data)[1].dead_units_pct == pytest.approx(100 / 64)

    def use_once(layer: nn.Module, args: object, output: torch.Tensor) -> None:
        output[2, 5, UNIT] = 1.0

    up.register_forward_hook(use_once)
    assert sharded.probe(data)[1].dead_units_pct == 0


@pytest.mark.parametrize("fault", ["mask", "heads", "scale", "queries"])
def test_control_a_probe_with_a_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    sharded, data = model(), batch()
    wanted = written_out(sharded.net, data)
    statistics = recording.attention_statistics
    if fault == "mask":
        causal = SDPAttention().visible_keys
        monkeypatch.setattr(SDPAttention, "visible_keys", lambda self, k, queries: causal(k, queries))
    if fault == "heads":
        mean = lambda *args: [x.mean().expand_as(x) for x in statistics(*args)]  # noqa: E731
        monkeypatch.setattr(recording, "attention_statistics", mean)
    if fault == "scale":
        monkeypatch.setattr(recording, "attention_statistics", lambda q, *rest: statistics(2 * q, *rest))
    if fault == "queries":
        monkeypatch.setattr("titanlite.parallel.sharded_model.NUM_QUERIES", 63)
    assert not same(sharded.probe(data), wanted)
    monkeypatch.undo()
    assert same(sharded.probe(data), wanted)


# ---- families and backends that tell less


class Silent(Attention):
    """Attention that does not tell which keys a query sees."""

    def attend(self, q_BTHE: torch.Tensor, k_BTKE: torch.Tensor, v_BTKE: torch.Tensor) -> torch.Tensor:
        return SDPAttention().attend(q_BTHE, k_BTKE, v_BTKE)


def test_what_is_not_known_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    sharded = model()
    monkeypatch.setattr(type(sharded.attention), "for_sequences", lambda self, tokens: Silent())
    monkeypatch.setattr(RotaryDecoder, "mlp_down", "")
    monkeypatch.setattr(sharded, "_mlp_units", mlp_units(sharded.net))
    actual = sharded.probe(batch(with_documents=False))
    assert all(
        b.attention_logit_max == b.attention_entropy == [] and b.dead_units_pct is None for b in actual
    )
    assert probe_metrics(actual).keys() == {
        "probe/residual_rms_last", "probe/residual_max", "probe/residual_max_block"
    }  # fmt: skip


def test_a_family_from_outside_names_its_layer() -> None:
    net = ParallelResidual(flavor="tiny").build()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    with torch.no_grad():
        net.get_submodule("h.1.mlp.up").weight[5] = 0  # gelu(0) = 0
    actual = parallelize(net, CrossEntropy(), ALONE, ParallelSettings()).probe(batch())
    assert [b.block for b in actual] == ["h.0", "h.1"]
    assert [b.dead_units_pct for b in actual] == [0, pytest.approx(100 / 64)]


# ---- nothing changes


def test_a_probe_changes_no_buffer_no_random_numbers_and_leaves_no_hook(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded = model(family="auxiliary")
    net, forward = sharded.net, Net.forward

    def careless(self: Net, *args: object) -> torch.Tensor:
        self.counter.applied_steps += torch.rand(1)
        return forward(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Net, "forward", careless)
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()]
    seed = torch.random.get_rng_state()
    auxiliary = sharded.auxiliary_losses
    sharded.probe(batch())
    assert net.counter.applied_steps.item() == 0
    assert torch.equal(torch.random.get_rng_state(), seed)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in net.modules()] == hooks
    assert sharded.auxiliary_losses is auxiliary


def test_training_is_the_same_with_and_without_probes(tmp_path: Path, corpus: Path) -> None:
    keys = ["--training.steps=5", "--checkpoint.interval=5"]
    plain = make_job(tmp_path, corpus, *keys, name="plain")
    job = make_job(tmp_path, corpus, *keys, "--metrics.probe_freq=2", "--metrics.log_freq=100", name="probed")
    assert train(plain) == train(job) == 0
    steps = [1, 2, 4, 5]
    lines = metrics_of(job)
    assert [line["step"] for line in lines] == steps
    assert all("probe/attention_logit_max" in line and line["time/probe_s"] > 0 for line in lines)
    assert history(job) == [values for values in history(plain) if values[0] in steps]
    assert state_of(job, 5) == state_of(plain, 5) != {}
    assert not any(key.startswith("probe/") for line in metrics_of(plain) for key in line)
    assert not (plain.folder / "probe.jsonl").exists()
    tables = [json.loads(line) for line in (job.folder / "probe.jsonl").read_text().splitlines()]
    assert [table["step"] for table in tables] == steps
    for line, table in zip(lines, tables):
        assert [len(block["attention_entropy"]) for block in table["blocks"]] == [4, 4]
        assert table["blocks"][-1]["residual_rms"] == line["probe/residual_rms_last"]
