"""Pairwise covering of a test grid: every two settings of any two options meet in some job.

The full product of layouts, cases and options is thousands of jobs; faults sit in one option or in
the meeting of two.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Combination = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(combination: Mapping[str, Any]) -> set[Pair]:
    """The pairs of settings that `combination` tests."""
    return set(itertools.combinations(sorted(combination.items(), key=lambda item: item[0]), 2))


def cover(
    options: Mapping[str, Sequence[Any]],
    full: Sequence[str] = (),
    apart: Sequence[tuple[str, str]] = (),
) -> list[Combination]:
    """A short list of combinations, always the same, in which every pair of settings occurs.

    Options named in `full` meet in all their products, one combination for each. Pairs of options
    in `apart` need not meet. Greedy: each combination is grown by the setting that adds most new pairs.
    """
    missing: dict[Pair, None] = {}  # a dict for its order
    for first, second in itertools.combinations(sorted(options), 2):
        if not {(first, second), (second, first)} & set(apart):
            products = itertools.product(options[first], options[second])
            missing |= {((first, a), (second, b)): None for a, b in products}
    chosen: list[Combination] = []

    def grow(start: Combination) -> None:
        combination = dict(start)
        for name in options:
            if name in combination:
                continue
            turn = len(chosen) % len(options[name])  # ties go to each setting in turn
            combination[name] = max(
                (*options[name][turn:], *options[name][:turn]),
                key=lambda value: len(pairs_of({**combination, name: value}) & missing.keys()),
            )
        for pair in pairs_of(combination):
            missing.pop(pair, None)
        chosen.append({name: combination[name] for name in options})

    if full:
        for values in itertools.product(*(options[name] for name in full)):
            grow(dict(zip(full, values, strict=True)))
    while missing:
        grow(dict(next(iter(missing))))
    return chosen
