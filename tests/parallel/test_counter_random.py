"""Numbers by counters: those of a twin in Python integers, the same for any split, and uniform."""

from __future__ import annotations

import torch

from cpmoe.parallel.counter_random import derive, token_keys, uniform

GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
        x = (x ^ (x >> shift)) * factor % 2**32
    return x ^ (x >> 15)


def twin_derive(key: int, number: int) -> int:
    return mix64((mix64(key % 2**64) + number * GOLDEN) % 2**64)


def twin_key(seed: int, sequence: int, place: int) -> int:
    return twin_derive(twin_derive(sequence, seed), place)


def twin_uniform(key: int, column: int) -> float:
    bits = mix32(key % 2**32 ^ column * (GOLDEN >> 32) % 2**32)
    return (mix32((bits + (key >> 32)) % 2**32) >> 8) / 2**24


def test_numbers_are_those_of_the_twin():
    sequences, places = [0, 3, 10**9], [0, 1, 7, 131071, 2**40]
    keys = token_keys(-5, torch.tensor(sequences), torch.tensor(places))
    layered = derive(keys, 12)
    numbers = uniform(layered.flatten(), 5).view(3, 5, 5)
    for b, sequence in enumerate(sequences):
        for t, place in enumerate(places):
            key = twin_key(-5, sequence, place)
            assert keys[b, t].item() % 2**64 == key
            assert layered[b, t].item() % 2**64 == twin_derive(key, 12)
            expected = [twin_uniform(twin_derive(key, 12), column) for column in range(5)]
            assert numbers[b, t].tolist() == expected


def test_a_token_has_its_numbers_wherever_it_is():
    sequences, places = torch.arange(4), torch.arange(32)
    whole = token_keys(1, sequences, places)
    part = token_keys(1, sequences[2:], places[5::3])
    assert torch.equal(part, whole[2:, 5::3])
    numbers = uniform(whole.flatten(), 6).view(4, 32, 6)
    assert torch.equal(uniform(part.flatten(), 6), numbers[2:, 5::3].flatten(0, 1))


def test_numbers_are_uniform_and_independent():
    keys = token_keys(0, torch.arange(8), torch.arange(512)).flatten()
    numbers = uniform(keys, 64)
    assert numbers.min() >= 0 and numbers.max() < 1
    others = [uniform(derive(keys, 1), 64), numbers.roll(1, 0), numbers.roll(1, 1)]
    others.append(uniform(token_keys(1, torch.arange(8), torch.arange(512)).flatten(), 64))
    bound = 5 / numbers.numel() ** 0.5  # five standard deviations
    centred = (numbers.double() - 0.5) * 12**0.5
    assert abs(centred.mean()) < bound
    assert abs((centred**2).mean() - 1) < bound
    for other in others:
        assert abs((centred * (other.double() - 0.5) * 12**0.5).mean()) < bound
    for axis in (0, 1):  # also of each column and each token
        spread = (centred.mean(axis) * numbers.shape[axis] ** 0.5).square().mean()
        assert abs(spread - 1) < 5 * (2 / numbers.shape[1 - axis]) ** 0.5
    assert len(keys.unique()) == len(keys)
