"""Scores of tasks on GPUs: those of the CPU, also in bf16, and over NCCL those of one GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.gpu import run
from titanlite.attention.sdpa import SDPA
from titanlite.data.batch import Batch
from titanlite.losses import ChunkedCrossEntropy
from titanlite.mesh import ALONE
from titanlite.models.llama3 import Llama3
from titanlite.parallel.apply import parallelize
from titanlite.parallel.initialize import fill_normal
from titanlite.parallel.settings import ParallelSettings
from titanlite.parallel.sharded_model import ShardedModel
from titanlite.tasks.requests import Request, Row, make_rows, make_task_batch

pytestmark = pytest.mark.gpu
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
VOCAB_SIZE = 1000  # the model's is 1008
SHAPE = {
    "dim": 128, "n_layers": 2, "n_heads": 4, "n_kv_heads": 4, "head_dim": 32, "hidden_dim": 256,
    "vocab_size": 1008, "tie_word_embeddings": False,
}  # fmt: skip
NUM_REQUESTS, NUM_TARGETS = 32, 2


def model(device: torch.device, dtype: torch.dtype, **shape: int) -> ShardedModel:
    """With a head whose logits are far apart, so that rounding rarely changes the most likely token."""
    with torch.device("meta"):
        net = Llama3(flavor="debug", overrides=SHAPE | shape).build()
    settings = ParallelSettings(attention=SDPA(), param_dtype=dtype)
    sharded = parallelize(net, ChunkedCrossEntropy(), ALONE, settings)
    sharded.materialize(device, seed=0)
    head = sharded.net.get_parameter("lm_head.weight")
    fill_normal(head.data, "lm_head.weight", 0.0, 0.3, seed=0)
    return sharded


def scores(device: torch.device, dtype: torch.dtype, batch: Batch) -> torch.Tensor:
    segments = torch.ones_like(batch.inputs, device=device)
    return model(device, dtype).score(batch.to(device), VOCAB_SIZE, segments, 1).cpu()[:, 0]


def task_batch() -> Batch:
    """Requests of 4 to 50 tokens, of which those with an even number end with the most likely token, if it is
    so by far."""
    generator, on_cpu, requests = torch.Generator().manual_seed(0), model(CPU, torch.float32), []
    for number in range(NUM_REQUESTS):
        length = int(torch.randint(4, 50, (), generator=generator))
        tokens = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
        logits = on_cpu.logits(torch.tensor([tokens[:-1]]))[0, -1, :VOCAB_SIZE]
        (top, second), (token, _) = logits.topk(2)
        if number % 2 == 0 and top - second > 0.3:
            tokens[-1] = int(token)
        requests.append(Request(tokens, NUM_TARGETS))
    return make_task_batch([Row([request], [0]) for request in requests])[0]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.15)], ids=["fp32", "bf16"]
)
def test_scores_are_those_of_the_cpu(dtype: torch.dtype, tolerance: float) -> None:
    batch = task_batch()
    wanted, actual = scores(CPU, torch.float32, batch), scores(CUDA, dtype, batch)
    assert {1.0, 2.0} == set(wanted[:, 1].tolist())
    torch.testing.assert_close(actual[:, 0], wanted[:, 0], rtol=0, atol=tolerance * NUM_TARGETS)
    assert torch.equal(actual[:, 1], wanted[:, 1])
    others = replace(batch, targets=batch.targets.roll(1, 0))  # control: another continuation
    assert (scores(CUDA, dtype, others)[:, 0] - wanted[:, 0]).abs().max() > 10 * tolerance


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)], ids=["fp32", "bf16"]
)
def test_choices_with_one_prefix_have_the_scores_of_requests(dtype: torch.dtype, tolerance: float) -> None:
    """With grouped queries, which not all kernels take with a mask."""
    generator = torch.Generator().manual_seed(0)

    def some_tokens(num: int) -> list[int]:
        return torch.randint(0, VOCAB_SIZE, (num,), generator=generator).tolist()

    prefixes = [some_tokens(num) for num in (70, 33, 5)]
    requests = [Request(prefix + some_tokens(num), num) for prefix in prefixes for num in (1, 4, 3)]
    on_gpu = model(CUDA, dtype, n_kv_heads=2)
    together = make_rows(requests, [3, 3, 3], 1000)
    assert [row.num_shared for row in together] == [69, 32, 4]
    wanted, actual = torch.zeros(2, 9, 2)
    for rows, scores in ((make_rows(requests, [1] * 9, 1000), wanted), (together, actual)):
        batch, segments, num = make_task_batch(rows)
        scores[:] = on_gpu.score(batch.to(CUDA), VOCAB_SIZE, segments.to(CUDA), num).cpu().view(9, 2)
    torch.testing.assert_close(actual[:, 0], wanted[:, 0], rtol=0, atol=tolerance * 4)
    others = wanted.view(3, 3, 2).roll(1, 1)[..., 0].flatten()  # control: another choice
    assert (actual[:, 0] - others).abs().max() > 1


CONTINUATIONS = [" ", *"abcdefghij", " a", "ab"]  # one of the single bytes is the most likely one
FP32 = [
    *("--training.seq_len=256", "--data.holdout_sequences=0", "--model.overrides.head_dim=16"),
    *("--training.global_batch_size=4", "--model.overrides.tie_word_embeddings=false"),
    *("--training.mixed_precision_param=float32", "--validation.enable", "--validation.freq=4"),
]
LAYOUTS = [f"--parallelism.{kind}_parallel_degree=2" for kind in ("tensor", "context", "pipeline")]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", [[], *([layout] for layout in LAYOUTS)], ids=["dp", "tp", "cp", "pp"])
def test_two_gpus_have_the_scores_of_one(tmp_path: Path, corpus: Path, layout: list[str]) -> None:
    questions = [
        {"context": c, "continuation": text} for c in ("abc ", "", "j" * 99) for text in CONTINUATIONS
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    keys = [*FP32, f"--validation.tasks=[{{name = 't', path = '{tmp_path / 't.jsonl'}'}}]"]
    one = tasks_by_step(run(tmp_path, corpus, *keys, name="one"))
    two = tasks_by_step(run(tmp_path, corpus, *keys, *layout, ngpu=2, name="two"))
    assert two == pytest.approx(one, rel=1e-4)
    assert 0 < one["8 tasks/t/acc"] < 1
    assert one["4 tasks/t/perplexity"] != pytest.approx(one["8 tasks/t/perplexity"], rel=1e-2)  # control


def tasks_by_step(metrics: list[dict]) -> dict[str, float]:
    return {
        f"{line['step']} {key}": line[key] for line in metrics for key in line if key.startswith("tasks/")
    }
