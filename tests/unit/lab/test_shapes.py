"""The shapes of a ladder: sizes, ratios and divisibility, for every shipped family."""

from __future__ import annotations

import pytest

from tests.support.tiers import full
from titanlite.job import load_job
from titanlite.lab.shapes import MULTIPLE, SPACING, Shape, candidates, count, default_sizes, nearest


@pytest.mark.parametrize(
    "config", ["llama3_125m", full("llama3_8b"), "qwen3_30m", full("qwen3_0_6b"), full("olmoe_1b_7b")]
)
def test_shapes_resemble_the_job(config: str) -> None:
    model = load_job(config, world_size=None).model
    job, whole, candidate_shapes = model.config, count(model, {}), candidates(model)
    sizes = [size for size in default_sizes(whole) if nearest(candidate_shapes, size)]
    assert len(sizes) >= 2
    assert sizes[-1] == round(whole / SPACING)
    for size in sizes:
        shape = nearest(candidate_shapes, size)
        assert shape is not None
        fields = shape.fields
        assert count(model, fields) == shape.parameters  # blocks are counted, not built
        assert 0.9 < shape.parameters / size < 1.1
        assert fields["dim"] == fields["n_heads"] * job.dim // job.n_heads
        assert fields["n_heads"] % fields["n_kv_heads"] == 0
        hidden_dims = [name for name in ("hidden_dim", "moe_hidden_dim") if name in fields]
        assert hidden_dims == (["moe_hidden_dim"] if model.num_experts else ["hidden_dim"])
        for name in hidden_dims:
            assert fields[name] % MULTIPLE == 0
            assert fields[name] / fields["dim"] == pytest.approx(getattr(job, name) / job.dim, rel=0.07)
        group = fields["n_heads"] / fields["n_kv_heads"] / (job.n_heads / job.n_kv_heads)
        aspect = fields["dim"] / fields["n_layers"] / (job.dim / job.n_layers)
        assert 0.6 < group < 1.7
        assert 1 / 4 < aspect < 4
        assert "head_dim" not in fields
        assert "vocab_size" not in fields


def test_the_group_of_query_heads_is_kept_where_the_size_allows() -> None:
    model = load_job("llama3_125m", world_size=None).model
    candidate_shapes = candidates(model)
    kept = {
        shape.fields["n_heads"] / shape.fields["n_kv_heads"]
        for size in (20e6, 50e6, 100e6)
        if (shape := nearest(candidate_shapes, int(size)))
    }
    assert kept == {3.0}


def test_a_size_that_the_vocabulary_does_not_allow_has_no_shape() -> None:
    model = load_job("llama3_8b", world_size=None).model
    assert nearest(candidates(model), 10_000_000) is None


def test_the_nearest_shape_changes_the_ratios_least() -> None:
    """A nearer size wins over equal ratios only if they cost more than the size."""
    near, like = Shape({"dim": 1}, 100, 0.5), Shape({"dim": 2}, 108, 0.0)
    assert nearest([near, like], 100) is like
    assert nearest([near, like._replace(change=0.4)], 100) is near
    assert nearest([like._replace(parameters=111)], 100) is None
