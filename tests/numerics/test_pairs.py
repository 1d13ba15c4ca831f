"""The covering lists cover: what the grid's docstrings claim."""

from __future__ import annotations

import itertools

from tests.numerics.pairs import cover

OPTIONS = {"a": tuple("pqrstu"), "b": tuple("vwxyz"), "c": (1, 2), "d": (1, 2, 3), "e": (True, False)}


def _met(combinations: list[dict], first: str, second: str) -> set:
    return {(combination[first], combination[second]) for combination in combinations}


def test_every_pair_occurs_in_few_combinations() -> None:
    combinations = cover(OPTIONS)
    for first, second in itertools.combinations(OPTIONS, 2):
        assert _met(combinations, first, second) == set(itertools.product(OPTIONS[first], OPTIONS[second]))
    assert len(combinations) <= 1.2 * 6 * 5
    assert combinations == cover(OPTIONS)


def test_full_options_meet_in_all_products() -> None:
    combinations = cover(OPTIONS, full=("a", "d", "e"))
    met = {(combination["a"], combination["d"], combination["e"]) for combination in combinations}
    assert len(met) == len(combinations) == 6 * 3 * 2


def test_options_apart_need_not_meet() -> None:
    combinations = cover(OPTIONS, apart=[("b", "a")])
    assert len(combinations) < 6 * 5
    for pair in itertools.combinations(OPTIONS, 2):
        if pair != ("a", "b"):
            assert _met(combinations, *pair) == set(itertools.product(*(OPTIONS[name] for name in pair)))
