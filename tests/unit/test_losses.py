"""The losses against float64: value and gradients, whole and in chunks, with targets that do not count, with
and without a z-loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.tiers import full
from titanlite import losses
from titanlite.config.component import ConfigError
from titanlite.config.shipped import find_config
from titanlite.job import load_job
from titanlite.losses import ChunkedCrossEntropy, CrossEntropy, Loss
from titanlite.models.decoder import RotaryDecoder

VOCABULARY, DIM = 997, 32
LOSSES = {
    "whole": CrossEntropy(),
    "one chunk": ChunkedCrossEntropy(chunk_tokens=1000),
    "chunks": ChunkedCrossEntropy(chunk_tokens=50),
    "uneven chunks": ChunkedCrossEntropy(chunk_tokens=64),
}
# Compiled, the loss is another function. In the default tier one case runs inductor's code.
BACKENDS = {"eager": None, "traced": "aot_eager", "compiled": "inductor"}
backends = pytest.mark.parametrize(
    "backend",
    [
        pytest.param(b, id=name, marks=pytest.mark.full if b == "inductor" else ())
        for name, b in BACKENDS.items()
    ],
)


@pytest.fixture(autouse=True)
def forgotten_graphs() -> None:
    """The compiler does not see the graphs of other tests as earlier ones of the same function."""
    torch._dynamo.reset()


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, and targets of which some rows count none."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 50, DIM, generator=generator) * scale
    weight = torch.randn(VOCABULARY, DIM, generator=generator)
    targets = torch.randint(0, VOCABULARY, (3, 50), generator=generator)
    targets[0, :20] = targets[2] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def gradients(
    loss: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a part of the loss: what is divided by the tokens of all ranks."""
    (loss / 7).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return hidden.grad, weight.grad


@pytest.mark.parametrize(
    ("loss", "backend", "scale"),
    [
        pytest.param(
            loss,
            backend,
            scale,
            id=f"{name}, {how}, {size}",
            marks=() if how == "eager" and scale == 1.0 else pytest.mark.full,
        )
        for name, loss in LOSSES.items()
        for how, backend in BACKENDS.items()
        for size, scale in {"usual": 1.0, "large logits": 30.0}.items()
    ],
)
def test_value_and_gradients_in_float64(
    loss: Loss, backend: str | None, scale: float, request: pytest.FixtureRequest
) -> None:
    if backend == "inductor" and isinstance(loss, ChunkedCrossEntropy) and torch.__version__ < "2.12":
        request.applymarker(pytest.mark.xfail(reason="KeyError: 'buf1' in inductor", strict=True))
    hidden, weight, targets = inputs(torch.float32, scale)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten(), reduction="sum")
    function = loss.build(backend)
    value = function(hidden, weight, targets)
    assert value.dtype == torch.float32
    assert value.item() == pytest.approx(wanted.item(), rel=1e-6)
    for actual, right in zip(gradients(value, hidden, weight), gradients(wanted, *exact)):
        assert (actual - right).abs().max() < 1e-5 * right.abs().max()
    with torch.no_grad():
        assert function(hidden, weight, targets).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_bfloat16_gradients_are_as_good_in_chunks_as_whole() -> None:
    """The weight's gradient is accumulated over 10 chunks, and is no worse than that of one product."""
    errors = {}
    for name in ("whole", "chunks"):
        hidden, weight, targets = inputs(torch.bfloat16)
        exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        wanted = F.cross_entropy(F.linear(*exact).flatten(0, 1), targets.flatten(), reduction="sum")
        loss = ChunkedCrossEntropy(chunk_tokens=15) if name == "chunks" else LOSSES[name]
        actual = gradients(loss.build()(hidden, weight, targets), hidden, weight)
        assert all(g.dtype == torch.bfloat16 for g in actual)
        right = gradients(wanted, *exact)
        errors[name] = [((a - b).norm() / b.norm()).item() for a, b in zip(actual, right)]
    assert all(c < 1.1 * w for c, w in zip(errors["chunks"], errors["whole"])), errors


@backends
@pytest.mark.parametrize("name", ["whole", "chunks"])
def test_a_weight_in_fp32_has_its_gradient_in_fp32(name: str, backend: str | None) -> None:
    """As in a process that shards nothing: the products are bf16's, and only they."""
    hidden, weight, targets = inputs(torch.bfloat16)
    other = weight.detach().float().requires_grad_()
    rounded = gradients(LOSSES[name].build(backend)(hidden, weight, targets), hidden, weight)
    hidden = hidden.detach().requires_grad_()
    actual = gradients(LOSSES[name].build(backend)(hidden, other, targets), hidden, other)
    assert torch.equal(actual[0], rounded[0])
    assert actual[1].dtype == torch.float32
    assert torch.equal(actual[1].bfloat16(), rounded[1])
    if name == "chunks":
        assert not torch.equal(actual[1].bfloat16().float(), actual[1]), "was rounded on its way"


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_nothing_that_counts_is_zero_not_nan(loss: Loss) -> None:
    hidden, weight, targets = inputs(torch.float32)
    value = loss.build()(hidden, weight, torch.full_like(targets, -100))
    assert value.item() == 0.0
    assert all((g == 0).all() for g in gradients(value, hidden, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_first_product_does_not_read_the_sum(dtype: torch.dtype) -> None:
    """It is memory that nobody has written."""
    total, a, b = (
        torch.full((3, 2), float("nan")),
        torch.ones(3, 4, dtype=dtype),
        torch.ones(4, 2, dtype=dtype),
    )
    losses._add_product_(total, a, b, beta=0)
    losses._add_product_(total, a, b, beta=1)
    assert (total == 8).all()


@backends
def test_a_token_that_does_not_count_adds_nothing_even_if_it_is_not_finite(backend: str | None) -> None:
    """Zero times NaN is NaN, in the product that gives the weight's gradient, too."""
    hidden, weight, targets = inputs(torch.float32)
    loss = LOSSES["chunks"].build(backend)
    right = gradients(loss(hidden, weight, targets), hidden, weight)
    ignored = hidden.detach().clone()
    ignored[0, 3] = float("nan")
    ignored.requires_grad_()
    other = weight.detach().requires_grad_()
    value = loss(ignored, other, targets)
    assert value.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(gradients(value, ignored, other), right))


SOFTCAP = 3.0  # of logits with a standard deviation of 6


@backends
@pytest.mark.parametrize("multiplier", [0.0, 0.02], ids=["", "z-loss"])
@pytest.mark.parametrize("name", [full("whole"), "chunks"])
def test_a_soft_cap_has_the_gradient_of_its_formula(
    name: str, multiplier: float, backend: str | None, request: pytest.FixtureRequest
) -> None:
    if backend == "inductor" and name == "chunks" and torch.__version__ < "2.12":
        request.applymarker(pytest.mark.xfail(reason="KeyError: 'buf1' in inductor", strict=True))
    hidden, weight, targets = inputs(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    logits = SOFTCAP * (F.linear(*exact).flatten(0, 1) / SOFTCAP).tanh()
    log_z = logits.logsumexp(-1)[targets.flatten() != -100]
    token_loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
    total = token_loss + multiplier * log_z.square().sum()
    vocabulary = replace(losses.WHOLE_VOCABULARY, softcap=SOFTCAP)
    function = replace(LOSSES[name], z_loss_multiplier=multiplier).build(backend, vocabulary)
    value = function(hidden, weight, targets).flatten()[0]
    assert value.item() == pytest.approx(token_loss.item(), rel=1e-6)
    with torch.no_grad():
        assert function(hidden, weight, targets).flatten()[0].item() == pytest.approx(value.item(), rel=1e-6)
        plain = LOSSES[name].build(backend)(hidden, weight, targets)
        assert plain.item() != pytest.approx(value.item(), rel=1e-2), "control"
    for actual, right in zip(gradients(value, hidden, weight), gradients(total, *exact)):
        assert (actual - right).abs().max() < 1e-5 * right.abs().max()


def test_a_loss_without_soft_caps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any family whose decoder has a cap."""

    class Uncapped(CrossEntropy):
        supports_softcap = False

    job = load_job(str(find_config("debug")))
    uncapped = replace(job, loss=Uncapped())
    uncapped.build_on_meta()
    monkeypatch.setattr(RotaryDecoder, "logit_softcap", 15.0)
    job.build_on_meta()
    with pytest.raises(ConfigError, match="the model caps its logits, which"):
        uncapped.build_on_meta()


MULTIPLIER = 0.02  # large enough for the gradient of the z-loss to show


def z_loss_in_float64(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, multiplier: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sums of the token losses and of the z-loss, by the formula, differentiable."""
    logits = F.linear(hidden, weight).flatten(0, 1)
    log_z = logits.logsumexp(-1)[targets.flatten() != -100]
    return F.cross_entropy(logits, targets.flatten(), reduction="sum"), multiplier * log_z.square().sum()


def z_loss_agrees(loss: CrossEntropy, backend: str | None, multiplier: float = MULTIPLIER) -> bool:
    """Whether values and gradients are those of the formula."""
    hidden, weight, targets = inputs(torch.float32)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    token_loss, z_loss = z_loss_in_float64(*exact, targets, multiplier)
    function = replace(loss, z_loss_multiplier=MULTIPLIER).build(backend)
    values = function(hidden, weight, targets)
    with torch.no_grad():
        assert torch.allclose(function(hidden, weight, targets), values, rtol=1e-6), "in validation"
    wanted = torch.stack([token_loss, z_loss]).detach()
    pairs = zip(gradients(values[0], hidden, weight), gradients(token_loss + z_loss, *exact))
    return torch.allclose(values.detach().double(), wanted, rtol=1e-6) and all(
        (actual - right).abs().max() < 1e-5 * right.abs().max() for actual, right in pairs
    )


Z_LOSSES = {
    "whole": CrossEntropy(),
    "one chunk": ChunkedCrossEntropy(chunk_tokens=1000),
    "10 chunks": ChunkedCrossEntropy(chunk_tokens=22),
}


@backends
@pytest.mark.parametrize("loss", Z_LOSSES.values(), ids=Z_LOSSES.keys())
def test_a_z_loss_has_the_gradient_of_its_formula(
    loss: CrossEntropy, backend: str | None, request: pytest.FixtureRequest
) -> None:
    if backend == "inductor" and isinstance(loss, ChunkedCrossEntropy) and torch.__version__ < "2.12":
        request.applymarker(pytest.mark.xfail(reason="KeyError: 'buf1' in inductor", strict=True))
    assert z_loss_agrees(loss, backend)
    assert not z_loss_agrees(loss, backend, 1.001 * MULTIPLIER), "control: another multiplier"


@pytest.mark.parametrize("function", [losses.loss_and_gradient_, losses.eager_loss_and_gradient_])
def test_bfloat16_gradients_of_a_z_loss_are_rounded_once(function) -> None:
    """A product p (1 + 2 c log Z) of bf16 numbers would be rounded twice."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, VOCABULARY, generator=generator).bfloat16()
    targets = torch.randint(0, VOCABULARY, (20,), generator=generator)
    exact = logits.double().requires_grad_()
    sum(z_loss_in_float64(exact[None], torch.eye(VOCABULARY).double(), targets, MULTIPLIER)).backward()
    function(logits, targets, z_loss_multiplier=MULTIPLIER)
    assert ((logits - exact.grad).abs() <= 1.01 * 2**-8 * exact.grad.abs()).all()


@backends
@pytest.mark.parametrize("name", ["whole", "chunks"])
def test_a_z_loss_of_zero_is_no_z_loss(name: str, backend: str | None) -> None:
    """The same operations: no entry of the result, no kernel, no change of the run's identity."""
    loss = LOSSES[name]
    assert isinstance(loss, CrossEntropy)
    assert loss.auxiliary_losses == ()
    assert replace(loss, z_loss_multiplier=1e-4).auxiliary_losses == ("z_loss",)
    hidden, weight, targets = inputs(torch.float32)
    values, all_gradients = [], []
    for multiplier in (0.0, 1e-30):
        h, w = (x.detach().requires_grad_() for x in (hidden, weight))
        value = replace(loss, z_loss_multiplier=multiplier).build(backend)(h, w, targets)
        assert value.shape == (() if multiplier == 0 else (2,))
        values.append(value.flatten()[0].detach())
        all_gradients.append(gradients(value.flatten()[0], h, w))
    # 1e-30 is lost beside 1, so that only the path of the z-loss differs.
    assert torch.equal(*values)
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(*all_gradients))


@pytest.mark.parametrize("softcap", [0.0, SOFTCAP])
@pytest.mark.parametrize("vocab_size", [VOCABULARY, VOCABULARY - 200])
def test_scores_of_targets(vocab_size: int, softcap: float) -> None:
    hidden, weight, targets = (x.detach() for x in inputs(torch.float32))
    targets = torch.where((targets >= 0) & (targets < vocab_size), targets, 0)
    logits = F.linear(hidden.double(), weight.double())[..., :vocab_size]
    targets[0, 3], targets[1] = logits[0, 3].argmax(), logits[1].argmax(-1)
    counts = torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    targets = torch.where(counts, targets, losses.IGNORE)
    if softcap:
        logits = softcap * (logits / softcap).tanh()
    vocabulary = replace(losses.WHOLE_VOCABULARY, softcap=softcap)
    scores = losses.score_targets(hidden, weight, targets, vocab_size, vocabulary, chunk_tokens=32)
    assert not scores[~counts].any()
    scores = scores.sum(1)
    log_p = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert torch.allclose(scores[:, 0].double(), (log_p * counts).sum(1), rtol=1e-6)
    assert torch.equal(scores[:, 1], ((logits.argmax(-1) != targets) & counts).sum(1).float())
    assert scores[1, 1] == 0 < scores[0, 1], "control: both kinds of sequences"


def test_of_equal_logits_the_first_is_the_most_likely() -> None:
    hidden, weight = torch.ones(1, 2, 1), torch.tensor([[0.0], [1.0], [1.0]])
    scores = losses.score_targets(hidden, weight, torch.tensor([[1, 2]]), vocab_size=3)
    assert scores[0, :, 1].tolist() == [0, 1]


def test_the_keys_of_a_loss_that_extends_cross_entropy_belong_to_the_objective() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Smoothed(CrossEntropy):
        smoothing: float = 0.1

    assert Smoothed(smoothing=0.2).objective == {
        "name": "cross_entropy",
        "z_loss_multiplier": 0.0,
        "smoothing": 0.2,
    }


def test_a_z_loss_belongs_to_the_objective() -> None:
    chunked = ChunkedCrossEntropy(chunk_tokens=7, z_loss_multiplier=1e-4)
    assert chunked.objective == CrossEntropy(z_loss_multiplier=1e-4).objective
    assert chunked.objective == {"name": "cross_entropy", "z_loss_multiplier": 1e-4}


@pytest.mark.parametrize("multiplier", [-1e-4, float("inf"), float("nan")])
def test_a_z_loss_multiplier_is_finite_and_not_negative(multiplier: float) -> None:
    with pytest.raises(ConfigError, match="is not a finite number of at least 0") as e:
        ChunkedCrossEntropy(z_loss_multiplier=multiplier)
    assert e.value.key == "z_loss_multiplier"


class Largest(TorchDispatchMode):
    """The largest tensor that any operation makes, in elements."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


@pytest.mark.parametrize("training", [True, False])
def test_the_logits_are_never_whole(training: bool) -> None:
    def largest(loss: Loss) -> int:
        hidden, weight, targets = inputs(torch.float32)
        function = loss.build()
        with torch.set_grad_enabled(training), Largest() as mode:
            value = function(hidden, weight, targets)
            if training:
                gradients(value, hidden, weight)
        return mode.elements

    assert largest(LOSSES["whole"]) == 150 * VOCABULARY
    assert largest(LOSSES["chunks"]) == 50 * VOCABULARY


def test_how_it_is_computed_is_no_part_of_what_is_minimised() -> None:
    assert ChunkedCrossEntropy(chunk_tokens=7).objective == CrossEntropy().objective


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(1, 1), (10, 1), (11, 2), (12, 2), (20, 2), (21, 3), (32, 4), (25, 5), (29, 3)]
)
def test_chunks_are_equal_if_they_can_be(tokens: int, chunks: int) -> None:
    """32 into 4 of 8 rather than 10, 10, 10, 2; 29 is prime, and 29 chunks would be too small."""
    assert ChunkedCrossEntropy(chunk_tokens=10).num_chunks(tokens) == chunks


def test_a_chunk_has_tokens() -> None:
    with pytest.raises(ConfigError, match="0 is below 1") as e:
        ChunkedCrossEntropy(chunk_tokens=0)
    assert e.value.key == "chunk_tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_two_gradients_can_be_taken_apart(dtype: torch.dtype) -> None:
    """As a pipeline without bubbles takes them: first the hidden states', later the weight's."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 12, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(20, 8, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 20, (1, 12), generator=generator)

    def loss() -> torch.Tensor:
        return ChunkedCrossEntropy(chunk_tokens=4).build()(hidden, weight, targets) / 7

    together, split = torch.autograd.grad(loss(), (hidden, weight)), loss()
    assert torch.equal(torch.autograd.grad(split, (hidden,), retain_graph=True)[0], together[0])
    assert torch.equal(torch.autograd.grad(split, (weight,))[0], together[1])
