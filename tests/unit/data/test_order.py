"""Pins the order of sequences: `permute` is a bijection for every n and key, with golden values on both sides
of the table/Feistel boundary; `quotas` are exact; `Mixture` gives every source its quota in every block,
passes through each source in full before any of its sequences comes again, and depends on the seed and on
nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers import full
from titanlite.data import order
from titanlite.data.order import MIXING_BLOCK, TABLE, Mixture, key_of, permute, quotas

# permute(i, n, key) for i = 0, 1, 2, 3, n // 2, n - 1 (mod n). A changed value changes the data of every run.
GOLDEN = {
    (2, 1): [0, 1, 0, 1, 1, 1],
    (5, 7): [4, 2, 0, 3, 0, 1],
    (4096, 3): [557, 1051, 3232, 1485, 857, 256],
    (4097, 3): [4052, 2133, 1457, 2274, 3772, 2257],
    (100003, 42): [39002, 60622, 48337, 6554, 83571, 64990],
    (3 * 10**12, 99): [
        1868649826847,
        196640899928,
        1224593684182,
        1996900027813,
        1319103328311,
        1752165144881,
    ],
}


def image(n: int, key: int) -> np.ndarray:
    """The image of every index below n."""
    return permute(np.arange(n), n, key)


def assert_bijection(n: int, key: int) -> None:
    images = image(n, key)
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(n)), f"permute is no bijection for n = {n}, key = {key}"


def test_bijection_for_every_small_n() -> None:
    for n in range(1, 701):
        assert_bijection(n, key=n * 7919)


def test_network_is_a_bijection_for_every_small_n(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Feistel network, also for small n, for which `permute` uses a table."""
    monkeypatch.setattr(order, "TABLE", 0)
    for n in range(1, 701):
        assert_bijection(n, key=n * 7919)


@pytest.mark.parametrize("n", [1000, TABLE - 1, TABLE, TABLE + 1, 16384, 16385, 65536, 65537, 100003])
def test_bijection_across_the_boundary(n: int) -> None:
    for key in (0, 1, 2**64 - 1, key_of("epoch", 0, "a", 0)):
        assert_bijection(n, key)


@given(st.integers(TABLE + 1, 2**40), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))
def test_injective_up_to_2_to_the_40(n: int, key: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = np.unique(np.concatenate([rng.integers(0, n, 200), np.arange(100), np.arange(n - 100, n)]))
    images = permute(index, n, key)
    assert images.min() >= 0
    assert images.max() < n
    assert len(np.unique(images)) == len(index)


@given(st.sampled_from([3, 1000, TABLE, TABLE + 1, 10**6, 10**12]), st.data())
def test_an_image_does_not_depend_on_what_else_is_asked(n: int, data: st.DataObject) -> None:
    index = np.asarray(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    before = index.copy()
    assert permute(index, n, 5).tolist() == [int(permute(np.asarray([i]), n, 5)[0]) for i in index]
    assert np.array_equal(index, before)


@pytest.mark.parametrize(("n", "key"), GOLDEN)
def test_golden_images(n: int, key: int) -> None:
    index = np.array([0, 1, 2, 3, n // 2, n - 1]) % n
    assert permute(index, n, key).tolist() == GOLDEN[n, key]


def test_golden_keys() -> None:
    assert key_of() == 11823289474629449774
    assert key_of("epoch", 1, "a", 0) == 13618391921173258152
    assert key_of("mix", 0, 0) == 6968783187407017440


def test_keys_tell_their_parts_apart() -> None:
    parts = [("a", 1), ("a", "1"), ("a1",), ("a", 1, 0), ("a", 0, 1), ("a",), ("b", 1)]
    assert len({key_of(*p) for p in parts}) == len(parts)


def chi_squares(n: int, bins: int, permutation: Callable[[np.ndarray, int, int], np.ndarray]) -> list[float]:
    """For 1000 keys, standard scores of two chi-squares: where sequences land, how far apart neighbours
    land."""
    starts = np.linspace(0, n - 2, 10).astype(np.int64)
    where, apart = np.zeros((10, bins)), np.zeros((10, bins))
    for k in range(1000):
        images = permutation(np.concatenate([starts, starts + 1]), n, key_of("mix", 0, k))
        here, distance = images[:10], (images[10:] - images[:10]) % n - 1
        where[np.arange(10), here * bins // n] += 1
        apart[np.arange(10), distance * bins // (n - 1)] += 1
    scores = []
    for counts, size in ((where, n), (apart, n - 1)):
        edges = [-(-b * size // bins) for b in range(bins + 1)]  # the numbers x with x * bins // size == b
        expected = np.diff(edges) / size * 1000
        freedom = 10 * (bins - 1)
        scores.append((((counts - expected) ** 2 / expected).sum() - freedom) / (2 * freedom) ** 0.5)
    return scores


@pytest.mark.parametrize("n", [11, full(1000), full(TABLE + 1), full(10007), full(10**9)])
def test_images_are_uniform_over_keys(n: int) -> None:
    """The scores are within five standard deviations on both sides: neither biased nor too even."""
    assert max(abs(z) for z in chi_squares(n, 10, permute)) < 5


def test_uniformity_bound_catches_bad_permutations() -> None:
    """Negative control: the identity, and a random rotation, whose images are uniform but stay neighbours."""
    assert chi_squares(1000, 10, lambda index, n, key: index)[0] > 100
    where, apart = chi_squares(1000, 10, lambda index, n, key: (index + key % n) % n)
    assert abs(where) < 5
    assert apart > 100


@pytest.mark.full
def test_fixed_points_are_as_many_as_chance_has() -> None:
    """A random permutation has one fixed point on average, with variance one."""
    for n, num_keys in ((50, 300), (TABLE + 1, 100)):
        counts = [int((image(n, key_of(k)) == np.arange(n)).sum()) for k in range(num_keys)]
        assert abs(np.mean(counts) - 1) < 5 / num_keys**0.5


@given(
    st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=12),
    st.one_of(st.just(MIXING_BLOCK), st.integers(0, 10**6)),
)
def test_quotas_sum_and_are_within_one_of_the_share(weights: list[float], total: int) -> None:
    counts = quotas(weights, total)
    assert sum(counts) == total
    whole = sum(Fraction(w) for w in weights)
    for count, w in zip(counts, weights):
        assert count >= 0
        assert abs(count - Fraction(w) * total / whole) < 1 + Fraction(1, 10**6)


def test_quotas_largest_remainder_and_ties() -> None:
    assert quotas([1, 1, 1], 1000) == [334, 333, 333]
    assert quotas([1, 1, 1, 1], 2) == [1, 1, 0, 0]
    assert quotas([0.7, 0.2, 0.1], 1000) == [700, 200, 100]
    assert quotas([1, 5], 10) == [2, 8]  # 1.67 and 8.33
    assert quotas([3.5], 7) == [7]


SIZES, UIDS, WEIGHTS = [7, 450, 6000], ["a", "b", "c"], [1, 2.5, 3]


def test_every_block_holds_the_exact_quotas() -> None:
    mixture = Mixture(SIZES, UIDS, WEIGHTS, seed=3)
    assert mixture.stages[0].quotas == quotas(WEIGHTS, MIXING_BLOCK)
    for block in (*range(20), 10**6, 10**9):
        source, sequence = mixture.locate(np.arange(block * MIXING_BLOCK, (block + 1) * MIXING_BLOCK))
        assert np.bincount(source, minlength=3).tolist() == mixture.stages[0].quotas
        assert (sequence >= 0).all()
        assert (sequence < np.asarray(SIZES)[source]).all()


def test_each_source_is_consumed_without_gaps() -> None:
    """After every block, each sequence of a source was read floor(epochs) or ceil(epochs) times."""
    mixture = Mixture(SIZES, UIDS, WEIGHTS, seed=3)
    seen: list[Counter[int]] = [Counter() for _ in SIZES]
    for block in range(20):
        source, sequence = mixture.locate(np.arange(block * MIXING_BLOCK, (block + 1) * MIXING_BLOCK))
        for k, size in enumerate(SIZES):
            seen[k].update(sequence[source == k].tolist())
            epochs, rest = divmod((block + 1) * mixture.stages[0].quotas[k], size)
            expected = {epochs: size - rest, epochs + 1: rest}
            actual = Counter(seen[k][r] for r in range(size))
            assert actual == Counter({times: sequences for times, sequences in expected.items() if sequences})


def test_a_source_is_read_in_the_order_of_its_own_key() -> None:
    """The closed form: b blocks take images 0 .. b * quota - 1 of the epoch's permutation."""
    size, seed = 10**6, 11
    mixture = Mixture([size, 500], ["big", "small"], [3, 1], seed)
    source, sequence = mixture.locate(np.arange(4 * MIXING_BLOCK))
    taken = np.arange(4 * mixture.stages[0].quotas[0])
    expected = permute(taken, size, key_of("epoch", seed, "big", 0))
    assert sorted(sequence[source == 0].tolist()) == sorted(expected.tolist())


@pytest.mark.parametrize("size", [3000, 5000, 1000])
def test_one_epoch_covers_every_sequence_once_and_epochs_differ(size: int) -> None:
    _, sequences = Mixture([size], ["a"], [1.0], seed=0).locate(np.arange(3 * size))
    epochs = sequences.reshape(3, size)
    for epoch in epochs:
        assert np.array_equal(np.sort(epoch), np.arange(size))
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert (epochs[i] == epochs[j]).sum() < 20  # one is expected by chance


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.1, 1), min_size=4, max_size=4),
    number=st.integers(1, 5000),
)
def test_no_sequence_comes_again_before_all_others_came(
    sizes: list[int], weights: list[float], number: int
) -> None:
    """A source's sequences come in the order of its permutations, wherever an epoch ends within a block, and
    `taken` counts them."""
    mixture = Mixture(sizes, [str(k) for k in range(len(sizes))], weights[: len(sizes)], seed=0)
    sources, sequences = mixture.locate(np.arange(number))
    for k, (size, taken) in enumerate(zip(sizes, mixture.taken(number))):
        seen = sequences[sources == k]
        assert len(seen) == taken
        for begin in range(0, taken, size):
            epoch = seen[begin : begin + size]
            assert len(np.unique(epoch)) == len(epoch)


def test_golden_places() -> None:
    mixture = Mixture([70, 5000, 130_000], ["a", "b", "c"], [1, 2, 3], seed=5)
    sources, sequences = mixture.locate(np.array([0, 1, 2, 999, 1000, 123_456_789, 10**12]))
    assert sources.tolist() == [1, 2, 2, 2, 1, 0, 0]
    assert sequences.tolist() == [4836, 34613, 21644, 118087, 3425, 66, 42]


def sequences_of(mixture: Mixture, uid: str, blocks: int) -> list[int]:
    """The sequences of a source in the first blocks, as a sorted list."""
    source, sequence = mixture.locate(np.arange(blocks * MIXING_BLOCK))
    return sorted(sequence[source == mixture.fingerprints.index(uid)].tolist())


def test_other_sources_and_their_places_leave_a_source_its_order() -> None:
    """Alone, with one other source and among four, at any position: the same first 2000 sequences of `a`."""
    size = 5000
    alone = sequences_of(Mixture([size], ["a"], [1], 0), "a", blocks=2)
    assert len(set(alone)) == 2000
    two = Mixture([size, 70], ["a", "b"], [1, 1], 0)
    swapped = Mixture([70, size], ["b", "a"], [1, 1], 0)
    four = Mixture([70, 900, size, 8], ["b", "c", "a", "d"], [1, 1, 1, 1], 0)
    assert sequences_of(two, "a", blocks=4) == alone
    assert sequences_of(swapped, "a", blocks=4) == alone
    assert sequences_of(four, "a", blocks=8) == alone
    other = Mixture(
        [size], ["another"], [1], 0
    )  # negative control: the order is the content's, not the place's
    assert sequences_of(other, "another", blocks=2) != alone


def test_the_seed_changes_sources_and_sequences() -> None:
    numbers = np.arange(5 * MIXING_BLOCK)
    (source_a, sequence_a), (source_b, sequence_b) = (
        Mixture(SIZES, UIDS, WEIGHTS, seed).locate(numbers) for seed in (0, 1)
    )
    assert (source_a != source_b).mean() > 0.3
    assert (sequence_a != sequence_b).mean() > 0.8
    again = Mixture(SIZES, UIDS, WEIGHTS, 0).locate(numbers)
    assert np.array_equal(again[0], source_a)
    assert np.array_equal(again[1], sequence_a)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30), st.integers(0, 2**32))
def test_a_place_does_not_depend_on_what_else_is_asked(numbers: list[int], seed: int) -> None:
    mixture = Mixture(SIZES, UIDS, WEIGHTS, seed)
    source, sequence = mixture.locate(np.asarray(numbers))
    for i, number in enumerate(numbers):
        one_source, one_sequence = mixture.locate(np.asarray([number]))
        assert (one_source[0], one_sequence[0]) == (source[i], sequence[i])


@st.composite
def changing_mixtures(draw: st.DrawFn) -> tuple[list[int], list[list[float]], list[int]]:
    """Sizes of sources, the weights of each stage, and the first sequence of each later stage."""
    num_sources = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(1, 700), min_size=num_sources, max_size=num_sources))
    lengths = draw(st.lists(st.integers(1, 1500), max_size=3))
    weight = st.integers(0, 9).map(float)
    one = st.lists(weight, min_size=num_sources, max_size=num_sources).filter(any)
    return sizes, [draw(one) for _ in range(len(lengths) + 1)], np.cumsum(lengths).tolist()


def mixture_of(sizes: list[int], weights: list[list[float]], firsts: list[int], seed: int = 0) -> Mixture:
    names = [str(k) for k in range(len(sizes))]
    return Mixture(sizes, names, weights[0], seed, list(zip(firsts, weights[1:])))


@settings(max_examples=60, deadline=None)
@given(changing_mixtures(), st.integers(0, 3000))
def test_a_change_of_weights_repeats_and_omits_no_sequence_of_an_epoch(
    job: tuple[list[int], list[list[float]], list[int]], end: int
) -> None:
    sizes = job[0]
    mixture = mixture_of(*job)
    sources, sequences = mixture.locate(np.arange(end))
    taken = mixture.taken(end)
    assert sum(taken) == end
    for k, size in enumerate(sizes):
        mine = sequences[sources == k]
        assert len(mine) == taken[k]
        for begin in range(0, len(mine), size):
            epoch = mine[begin : begin + size]
            assert len(set(epoch.tolist())) == len(epoch), "a sequence came twice in an epoch"
        alone, _ = mixture.locate(np.arange(end)[::-1])
        assert np.array_equal(alone[::-1], sources)


def test_counting_from_zero_after_a_change_is_found() -> None:
    """The control of the test above."""
    mixture = mixture_of([700, 300], [[1.0, 1.0], [3.0, 1.0]], [400])
    mixture.stages[1]._before[:] = 0
    sources, sequences = mixture.locate(np.arange(600))
    mine = sequences[sources == 0]
    assert len(mine) < 700
    assert len(set(mine.tolist())) < len(mine)


@settings(max_examples=30, deadline=None)
@given(changing_mixtures())
def test_what_comes_before_a_change_does_not_depend_on_it(
    job: tuple[list[int], list[list[float]], list[int]],
) -> None:
    sizes, weights, firsts = job
    for i, first in enumerate(firsts):
        numbers = np.arange(first)
        with_change = mixture_of(*job).locate(numbers)
        without = mixture_of(sizes, weights[: i + 1], firsts[:i]).locate(numbers)
        assert all(np.array_equal(a, b) for a, b in zip(with_change, without))


def test_a_change_to_the_same_proportions_changes_nothing() -> None:
    sizes, numbers = [500, 800], np.arange(3000)
    one = mixture_of(sizes, [[3, 1], [1, 1]], [1700])
    same = mixture_of(sizes, [[3, 1], [6, 2], [1, 1]], [900, 1700])
    other = mixture_of(sizes, [[3, 1], [2, 1], [1, 1]], [900, 1700])
    assert all(np.array_equal(a, b) for a, b in zip(one.locate(numbers), same.locate(numbers)))
    assert one.taken(2500) == same.taken(2500)
    assert not np.array_equal(one.locate(numbers)[1], other.locate(numbers)[1])


def test_every_block_of_a_later_stage_holds_the_exact_quotas() -> None:
    mixture = mixture_of([500, 800, 900], [[1, 1, 1], [0, 3, 1]], [1234])
    for block in range(3):
        first = 1234 + block * MIXING_BLOCK
        sources, _ = mixture.locate(np.arange(first, first + MIXING_BLOCK))
        assert np.bincount(sources, minlength=3).tolist() == [0, 750, 250]
