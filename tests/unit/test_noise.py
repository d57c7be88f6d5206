"""The noise: published answers of its generator, its law, and that it depends on nothing but its place."""

from __future__ import annotations

import math

import pytest
import torch

from ddtree.noise import gumbel, philox


def words(*values: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([value]) for value in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Random123's own test vectors for philox4x32 with ten rounds.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)  # fmt: skip
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    answer = philox(words(*counter), words(*key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in answer) == expected


def noise(rows: list[tuple[int, int, int]], vocab_size: int = 50) -> torch.Tensor:
    seeds, indices, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    return gumbel(seeds, indices, positions, vocab_size)


def test_a_row_is_the_same_in_every_company() -> None:
    rows = [(3, 0, 10), (-1, 2, 10), (3, 0, 2**33), (3, 1, 10)]
    together = noise(rows)
    for index, row in enumerate(rows):
        assert torch.equal(noise([row])[0], together[index])
    assert torch.equal(noise(rows[::-1]), together.flip(0))


def test_a_token_has_the_same_noise_in_every_vocabulary() -> None:
    """Also where large vocabularies are computed row by row."""
    rows = [(5, 0, 1), (6, 0, 2)]
    wide = noise(rows, 9001)
    assert torch.equal(noise(rows, 50), wide[:, :50])
    assert wide.shape == (2, 9001)


@pytest.mark.parametrize("other", [(4, 0, 7), (3, 1, 7), (3, 0, 8), (3 + 2**32, 0, 7), (3, 0, 7 + 2**32)])
def test_every_part_of_the_place_counts(other: tuple[int, int, int]) -> None:
    assert not (noise([(3, 0, 7)]) == noise([other])).any()


def test_it_is_standard_gumbel() -> None:
    """Kolmogorov and Smirnov's distance of a million values; 1.95 / √n is the bound of one in a thousand."""
    values = noise([(seed, 0, position) for seed in range(50) for position in range(20)], 1000).flatten()
    ordered = values.double().sort().values
    law = torch.exp(-torch.exp(-ordered))
    steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
    assert float((law - steps).abs().max()) < 1.95 / math.sqrt(len(ordered))


def test_neighbours_are_not_correlated() -> None:
    values = noise(
        [(seed, index, position) for seed in range(40) for index in (0, 1) for position in range(20)], 64
    )
    centred = ((values - values.mean()) / values.std()).reshape(40, 2, 20, 64)
    for shifted, base in (
        (centred[1:], centred[:-1]),
        (centred[:, 1:], centred[:, :-1]),
        (centred[:, :, 1:], centred[:, :, :-1]),
        (centred[..., 1:], centred[..., :-1]),
    ):
        assert abs(float((shifted * base).mean())) < 4 / math.sqrt(base.numel())


def test_it_is_finite_everywhere() -> None:
    assert torch.isfinite(noise([(seed, 0, 0) for seed in range(200)], 5000)).all()


def by_hand(seed: int, sequence_index: int, position: int, token: int) -> float:
    """Integers and `math` alone."""
    word = 2**32 - 1
    counter = [token // 4, sequence_index, position & word, position >> 32]
    key = [seed & word, seed >> 32]
    for _ in range(10):
        high, low = divmod(counter[0] * 0xD2511F53, 2**32)
        other_high, other_low = divmod(counter[2] * 0xCD9E8D57, 2**32)
        counter = [other_high ^ counter[1] ^ key[0], other_low, high ^ counter[3] ^ key[1], low]
        key = [(key[0] + 0x9E3779B9) & word, (key[1] + 0xBB67AE85) & word]
    return -math.log(-math.log((counter[token % 4] + 0.5) / 2**32))


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_computes_what_is_computed_by_hand(device: str) -> None:
    places = [(7, 0, 11), (2**64 - 2, 5, 2**35 + 1), (2**40 + 3, 1, 0)]
    seeds, indices, positions = (
        torch.tensor([place[part] - (place[part] >> 63 << 64) for place in places], device=device)
        for part in range(3)
    )
    got = gumbel(seeds, indices, positions, 999).cpu()
    expected = torch.tensor(
        [[by_hand(*place, token) for token in range(999)] for place in places], dtype=torch.float64
    ).float()
    # One unit in the last place, where a device's logarithm rounds otherwise.
    assert torch.allclose(got, expected, rtol=2e-7, atol=2e-7)
    assert (got == expected).float().mean() > 0.999
