"""The examples of a family, an attention backend and a loss train on one rank and on two, by FSDP and by
tensor parallel, with the same numbers; and each does what it says.

Runs train in processes of their own, so that the examples are registered in no other test.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.models import family, random_net
from tests.support.runs import train_on_rank
from titanlite.data.batch import Batch
from titanlite.losses import CrossEntropy
from titanlite.mesh import ALONE
from titanlite.parallel.activation_checkpoint import ActivationCheckpoint
from titanlite.parallel.apply import parallelize
from titanlite.parallel.settings import ParallelSettings

TENSOR = "--parallelism.tensor_parallel_degree=2"
FAMILY = [
    "--job.imports=['tests.examples.squared_relu']",
    "--model.name=squared_relu",
    "--model.overrides.tie_word_embeddings=false",
]
BACKEND = [
    "--job.imports=['tests.examples.sliding_window']",
    "--attention={ backend = 'sliding_window', window = 5 }",
]
LOSS = ["--job.imports=['tests.examples.z_loss']", "--loss={ name = 'z_loss', coefficient = 0.1 }"]
EXAMPLES = {"family": FAMILY, "backend": BACKEND, "loss": LOSS}


def losses(run_on: Any, folder: Path, corpus: Path, *keys: str, ranks: int = 1) -> list[float]:
    """The losses of a run of five steps."""
    arguments = [*keys, "--training.steps=5"]
    run_on(ranks, train_on_rank, folder, corpus, arguments, "run", ranks)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["train/loss"] for line in lines]


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
def test_it_trains_alike_on_every_layout(tmp_path: Path, corpus: Path, run_on: Any, example: str) -> None:
    keys = EXAMPLES[example]
    one = losses(run_on, tmp_path / "one", corpus, *keys)
    assert one[-1] < one[0] - 0.1
    for name, layout in {"fsdp": [], "tensor": [TENSOR]}.items():
        two = losses(run_on, tmp_path / name, corpus, *keys, *layout, ranks=2)
        assert two == pytest.approx(one, abs=2e-5), name
    plain = losses(run_on, tmp_path / "plain", corpus)
    assert plain != pytest.approx(one, abs=1e-3), "the example changes nothing"


def test_the_example_of_a_loss_is_its_formula() -> None:
    from tests.examples.z_loss import ZLoss

    hidden, weight = torch.randn(2, 6, 8), torch.randn(20, 8)
    targets = torch.randint(0, 20, (2, 6))
    targets[0, :3] = -100
    logits = F.linear(hidden, weight).flatten(0, 1)
    counted = (targets != -100).flatten()
    wanted = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    wanted = wanted + 0.5 * logits.logsumexp(-1)[counted].square().sum()
    assert torch.allclose(ZLoss(coefficient=0.5).build()(hidden, weight, targets), wanted, rtol=1e-5)


def test_the_example_of_a_backend_sees_its_window() -> None:
    from tests.examples.sliding_window import SlidingWindow

    backend, tokens = SlidingWindow(window=3), torch.zeros(1, 8, dtype=torch.int64)
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    out = backend.for_sequences(tokens).attend(q, k, v)
    alone = backend.for_sequences(tokens[:, 5:]).attend(q[:, 5:], k[:, 5:], v[:, 5:])
    assert torch.allclose(out[:, 7], alone[:, 2], atol=1e-6)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    assert torch.allclose(backend.for_documents(positions, 2).attend(q, k, v)[:, 5:], alone, atol=1e-6)
    assert not torch.allclose(out[:, 5:], alone, atol=1e-3)


@pytest.mark.parametrize(("kept_ops", "times"), [((), 2), (("aten.silu.",), 1)])
def test_selective_checkpointing_keeps_the_operators_that_a_backend_names(
    monkeypatch: pytest.MonkeyPatch, kept_ops: tuple[str, ...], times: int
) -> None:
    """The operator stands for a kernel of the backend: it runs once per block instead of twice."""
    from tests.examples.sliding_window import SlidingWindow

    monkeypatch.setattr(SlidingWindow, "kept_ops", kept_ops)
    settings = ParallelSettings(
        attention=SlidingWindow(window=3), activation_checkpoint=ActivationCheckpoint(mode="selective")
    )
    model = parallelize(random_net(family()), CrossEntropy(), ALONE, settings)
    names = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    tokens = torch.arange(24).view(2, 12)
    with Watch():
        model.forward_backward([Batch(tokens, tokens, 24, 0)], torch.tensor(24))
    assert names.count("aten.silu.default") == times * len(model.net.blocks())
