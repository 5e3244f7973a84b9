"""Compile and activation checkpointing: one graph serves all blocks, values do not change, and activations
are recomputed."""

from __future__ import annotations

import logging
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import full, sampled
from titanlite.attention.sdpa import SDPA
from titanlite.config.component import ConfigError
from titanlite.data.batch import Batch
from titanlite.losses import ChunkedCrossEntropy, CrossEntropy, cross_entropy
from titanlite.mesh import ALONE
from titanlite.models.base import Decoder
from titanlite.models.decoder import Block
from titanlite.models.llama3 import Llama3
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint, apply_activation_checkpoint
from titanlite.parallel.apply import parallelize
from titanlite.parallel.compile import Compilations, Compile, apply_compile
from titanlite.parallel.settings import ParallelSettings

SHAPE = {
    "dim": 32,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "hidden_dim": 64,
    "vocab_size": 99,
}


def build() -> Decoder:
    net = Llama3(flavor="debug", overrides=SHAPE).build()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return net


def step(net: Decoder) -> tuple[float, list[torch.Tensor]]:
    tokens = torch.arange(24).reshape(2, 12)
    loss = net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens))
    loss.backward()
    return loss.item(), [p.grad for p in net.parameters()]


MODES = {
    "none": ActivationCheckpoint(),
    "full": ActivationCheckpoint(mode="full"),
    "op": ActivationCheckpoint(mode="selective"),
    "every second": ActivationCheckpoint(mode="selective", selective_ac_option="2"),
    "mlp": ActivationCheckpoint(mode="selective", selective_ac_option="mlp"),
    "attention": ActivationCheckpoint(mode="selective", selective_ac_option="attention"),
    "norms and mlp": ActivationCheckpoint(mode="selective", selective_ac_option="norms+mlp"),
    "memory budget": ActivationCheckpoint(mode="memory_budget", memory_budget=0.3),
}


def close(actual: tuple[float, list[torch.Tensor]], wanted: tuple[float, list[torch.Tensor]]) -> bool:
    return actual[0] == pytest.approx(wanted[0], rel=1e-6) and all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(actual[1], wanted[1])
    )


@pytest.mark.parametrize("name", sampled(MODES, {"every second"}))
def test_one_graph_serves_all_blocks_and_changes_nothing(name: str) -> None:
    checkpointing, wanted = MODES[name], step(build())
    torch.compiler.reset()
    net, compilations = build(), Compilations()
    apply_activation_checkpoint(net, checkpointing)
    traced = checkpointing.mode == "memory_budget" or checkpointing.selective_ac_option == "op"
    apply_compile(net, Compile(enable=True, backend="aot_eager" if traced else "eager"))
    names = [name for name, _ in net.named_parameters()]
    assert close(step(net), wanted)
    kinds = 2 if checkpointing.selective_ac_option == "2" else 1  # of blocks: with and without checkpointing
    graphs = compilations.since_last()["compile/graphs"]
    assert graphs == kinds, "every block compiled its own graph, or none at all"
    assert [name for name, _ in net.named_parameters()] == names


@pytest.mark.full
@pytest.mark.parametrize("mode", ["none", full("full")])
def test_one_graph_serves_all_attention_objects_of_a_backend(mode: str) -> None:
    """A mask is an input of the graph: a micro-batch with other documents does not recompile it."""
    torch.compiler.reset()
    nets, compilations = (build(), build()), Compilations()
    apply_activation_checkpoint(nets[1], ActivationCheckpoint(mode=mode))
    apply_compile(nets[1], Compile(enable=True, backend="aot_eager"))
    tokens = torch.arange(24).reshape(2, 12)
    losses = []
    for length in (3, 5, 12):
        positions = torch.arange(12).expand(2, -1) % length
        attention = SDPA().for_documents(positions, num_documents=2 * -(-12 // length))
        head_fn = partial(cross_entropy, targets_BT=tokens)
        plain, compiled = (net(tokens, positions, attention, head_fn) for net in nets)
        compiled.backward()
        assert compiled.item() == pytest.approx(plain.item(), rel=1e-6)
        losses.append(plain.item())
    assert len(set(losses)) == 3
    assert compilations.since_last()["compile/graphs"] == 1


@pytest.mark.parametrize("masked", [False, full(True)])
def test_each_sequence_length_has_one_graph(masked: bool) -> None:
    """With validation at the full length in between. A graph with symbolic sizes would serve several lengths,
    and a run that resumes would not have it."""
    torch.compiler.reset()
    nets, compilations = (build(), build()), Compilations()
    apply_compile(nets[1], Compile(enable=True, backend="eager"))
    tokens = torch.arange(24).reshape(2, 12)
    batch = Batch(tokens, tokens, tokens.numel(), 0, torch.arange(12).expand(2, -1) % 5 if masked else None)
    graphs = []
    for num_splits in (4, 2, 1, 2, 4):
        models = [parallelize(net, CrossEntropy(), ALONE, ParallelSettings()) for net in nets]
        split = batch.split(num_splits)
        plain, compiled = (m.forward_backward([split], torch.tensor(24)) for m in models)
        assert compiled.item() == pytest.approx(plain.item(), rel=1e-6)
        graphs.append(compilations.since_last().get("compile/graphs", 0))
        plain, compiled = (m.loss_sum(batch) for m in models)
        assert compiled.item() == pytest.approx(plain.item(), rel=1e-6)
        graphs.append(compilations.since_last().get("compile/graphs", 0))
    assert graphs == [1, 1, 1, 0, 1, 0, 0, 0, 0, 0]
    for a, b in zip(nets[0].parameters(), nets[1].parameters()):
        assert torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.full
def test_more_lengths_than_torch_allows_by_default() -> None:
    torch.compiler.reset()
    net, compilations = build(), Compilations()
    apply_compile(net, Compile(enable=True, backend="eager"))
    lengths = range(2, 14)
    for length in lengths:
        tokens = torch.arange(length)[None]
        net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens)).backward()
    assert compilations.since_last()["compile/graphs"] == len(lengths) > 8


def test_a_break_in_a_graph_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    net = build()
    inner = Block.forward
    monkeypatch.setattr(
        Block, "forward", lambda self, x, *a: inner(self, torch._dynamo.graph_break() or x, *a)
    )
    apply_compile(net, Compile(enable=True))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        step(net)


def test_the_loss_is_one_graph_for_all_chunks() -> None:
    torch.compiler.reset()
    compilations = Compilations()
    hidden = torch.randn(2, 24, 8, requires_grad=True)
    weight, targets = torch.randn(99, 8, requires_grad=True), torch.randint(0, 99, (2, 24))
    loss = ChunkedCrossEntropy(chunk_tokens=20).build("aot_eager")  # 3 chunks of 16
    loss(hidden, weight, targets).backward()
    assert compilations.since_last()["compile/graphs"] == 1


@pytest.mark.full  # in the default tier, tests/unit/test_losses.py runs code that inductor generates
@pytest.mark.parametrize("name", ["none", "op", "memory budget"])
def test_the_real_compiler_changes_nothing(name: str) -> None:
    checkpointing, wanted = MODES[name], step(build())
    torch.compiler.reset()
    net = build()
    apply_activation_checkpoint(net, checkpointing)
    apply_compile(net, Compile(enable=True))
    assert close(step(net), wanted)


def test_a_backend_is_one_that_torch_knows() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'aot_eagre'; did you mean 'aot_eager'") as e:
        Compile(backend="aot_eagre")
    assert e.value.key == "backend"


def test_cuda_graphs_are_refused_where_they_cannot_be_recorded() -> None:
    graphs, none = Compile(cuda_graphs=True), Compile()
    for case, words in (
        ((2, False, False, False), "one GPU, not on 2 ranks"),
        ((1, True, False, False), "with experts"),
        ((1, False, True, False), "document masks"),
        ((1, False, False, True), "enable_cpu_offload"),
    ):
        none.check(*case)
        with pytest.raises(ConfigError, match=words) as error:
            graphs.check(*case)
        assert error.value.key == "compile.cuda_graphs"
    graphs.check(1, False, False, False)
    graphs.check_device(torch.device("cuda"))
    none.check_device(torch.device("cpu"))
    with pytest.raises(ConfigError, match="CUDA device, not cpu"):
        graphs.check_device(torch.device("cpu"))


def kept_elements(checkpointing: ActivationCheckpoint, compile: bool = False) -> int:
    """The number of elements that are kept for the backward. The compiler itself already keeps fewer."""
    torch.compiler.reset()
    net = build()
    apply_activation_checkpoint(net, checkpointing)
    apply_compile(net, Compile(enable=compile, backend="aot_eager"))
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes() // t.itemsize
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        tokens = torch.arange(24).reshape(2, 12)
        net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens))
    return sum(kept.values())


@pytest.mark.full
def test_what_is_recomputed_is_not_kept() -> None:
    everything = kept_elements(MODES["none"])
    kept = {name: kept_elements(config) / everything for name, config in MODES.items()}
    assert kept["full"] < 0.5
    assert kept["full"] < kept["every second"] < 0.8
    assert kept["mlp"] < 0.8
    assert kept["attention"] < 0.9
    assert kept["norms and mlp"] < kept["mlp"]


@pytest.mark.full
def test_the_compiler_keeps_to_its_budget() -> None:
    whole = kept_elements(MODES["none"], compile=True)
    kept = [
        kept_elements(ActivationCheckpoint(mode="memory_budget", memory_budget=share), compile=True) / whole
        for share in (1.0, 0.5, 0.0)
    ]
    assert kept[0] == 1
    assert kept[2] < kept[1] < 0.8
    assert kept_elements(MODES["none"], compile=True) == whole, "the budget of an earlier model is still set"


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def calls(checkpointing: ActivationCheckpoint) -> tuple[int, int]:
    """The numbers of matrix products and attention calls in a step."""
    net = build()
    apply_activation_checkpoint(net, checkpointing)
    with Calls() as mode:
        step(net)
    return mode.count["aten.mm.default"], mode.count[
        "aten._scaled_dot_product_flash_attention_for_cpu.default"
    ]


def test_matrix_products_and_attention_calls_that_are_repeated() -> None:
    once, layers = calls(MODES["none"]), SHAPE["n_layers"]
    assert once[1] == layers
    again = {
        name: tuple((n - first) / layers for n, first in zip(calls(config), once))
        for name, config in MODES.items()
    }
    # The products are q, k, v, o, gate, up and down. No backward needs the result of `down`, so the repeated
    # forward stops before it.
    assert again == {
        "none": (0, 0), "full": (6, 1), "op": (3, 0), "every second": (3, 0.5), "mlp": (2, 0),
        "attention": (3, 1), "norms and mlp": (2, 0), "memory budget": (0, 0),
    }  # fmt: skip


def test_a_block_number_above_the_number_of_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 blocks have no block 5") as e:
        apply_activation_checkpoint(build(), ActivationCheckpoint(mode="selective", selective_ac_option="5"))
    assert e.value.key == "activation_checkpoint.selective_ac_option"


@pytest.mark.parametrize("option", ["mlp+op", "2+mlp", "0"])
def test_op_and_numbers_are_not_joined_with_others(option: str) -> None:
    with pytest.raises(ConfigError, match="cannot be joined with others; attention, mlp, norms can"):
        ActivationCheckpoint(mode="selective", selective_ac_option=option)


@pytest.mark.parametrize("option", ["ops", "mlp+", "mlp,norms", ""])
def test_an_unknown_option_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match="unknown option") as e:
        ActivationCheckpoint(mode="selective", selective_ac_option=option)
    assert e.value.key == "selective_ac_option"


def test_a_budget_is_a_share() -> None:
    with pytest.raises(ConfigError, match=r"1\.5 is not in \[0, 1\]"):
        ActivationCheckpoint(mode="memory_budget", memory_budget=1.5)


def test_samples_leave_the_compiler_alone() -> None:
    torch.compiler.reset()
    net, compilations = build(), Compilations()
    apply_compile(net, Compile(enable=True, backend="eager"))
    model = parallelize(net, CrossEntropy(), ALONE, ParallelSettings())
    for length in (3, 5, 8):
        model.logits(torch.arange(length)[None])
    assert compilations.since_last() == {}
    step(net)
    assert compilations.since_last()["compile/graphs"] == 1


@pytest.mark.full
def test_compilations_after_the_first_report_are_told_with_their_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(
        logging.INFO, logger="titanlite"
    )  # also sets the handler's level, because torch's loggers log more
    torch.compiler.reset()
    net, compilations = build(), Compilations()
    step(net)
    assert compilations.since_last() == {}, "nothing was compiled"
    compilations = Compilations()
    apply_compile(net, Compile(enable=True, backend="aot_eager"))
    step(net)
    first = compilations.since_last()
    assert first["compile/graphs"] == 1
    assert first["compile/seconds"] > 0
    step(net)
    assert compilations.since_last() == {}
    assert not caplog.messages
    tokens = torch.arange(20).reshape(2, 10)
    net(tokens, head_fn=partial(cross_entropy, targets_BT=tokens)).backward()
    assert compilations.since_last()["compile/graphs"] == 1
    (said,) = caplog.messages
    assert said.startswith("compiled forward again")
    assert said.endswith("expected 12, actual 10")
