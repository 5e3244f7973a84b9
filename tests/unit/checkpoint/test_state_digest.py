"""Pins the digests of a state: equal for any shards, others for any change of a bit, name, dtype or shape."""

from __future__ import annotations

import torch

from titanlite.checkpoint.state_digest import HashedShard, combine, hash_shard, tensor_digests

STATE = {
    "model.a": torch.randn(10, 3),
    "model.b": torch.randn(7),
    "model.eight": torch.randn(6, 8),  # rows of 32 bytes, which are not hashed
    "model.nine": torch.randn(2, 9),  # and fewer rows than shards
    "model.experts": torch.randn(4, 6, 5).bfloat16(),
    "optimizer.a.step": torch.tensor(3.0),
    "optimizer.a.codes": torch.arange(20, dtype=torch.int8).view(5, 4),
}


def hashed(state: dict[str, torch.Tensor], num_shards: int, dims: dict[str, int]) -> list[HashedShard]:
    shards = []
    for name, tensor in state.items():
        if not tensor.ndim:
            shards.append(hash_shard(name, tensor))
            continue
        dim, begin = dims.get(name, 0), 0
        for part in tensor.chunk(num_shards, dim):
            offsets = [0] * tensor.ndim
            offsets[dim] = begin
            begin += part.shape[dim]
            shards.append(hash_shard(name, part, tensor.shape, offsets))
    assert None not in shards
    return shards[::-1]  # in any order


def test_digests_do_not_depend_on_the_shards() -> None:
    whole = tensor_digests(hashed(STATE, 1, {}))
    assert list(whole) == sorted(STATE)
    for num_shards in (2, 3, 4):
        for dims in ({}, {"model.experts": 1}):
            assert tensor_digests(hashed(STATE, num_shards, dims)) == whole


def test_any_change_is_another_digest() -> None:
    before = combine(tensor_digests(hashed(STATE, 2, {})))
    flipped = STATE["model.experts"].clone()
    flipped.view(torch.uint8)[1, 2, 3] ^= 1
    for name, change, is_weight in (
        ("model.experts", flipped, True),
        ("model.a", STATE["model.a"].view(3, 10), True),
        ("model.b", STATE["model.b"].view(torch.int32), True),
        ("optimizer.a.step", torch.tensor(4.0), False),
    ):
        after = combine(tensor_digests(hashed(STATE | {name: change}, 2, {})))
        assert after["state"] != before["state"]
        assert (after["weights"] != before["weights"]) == is_weight
    renamed = {name.replace("model.a", "model.c"): tensor for name, tensor in STATE.items()}
    assert combine(tensor_digests(hashed(renamed, 1, {}))) != before


def test_a_shard_that_cuts_rows_has_no_digest() -> None:
    assert hash_shard("model.a", torch.zeros(10, 2), (10, 3), (0, 0)) is None
