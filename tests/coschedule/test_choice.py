"""What the times of the first steps lead to: overlap only where it is faster beyond noise."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from cpmoe.coschedule.choice import MARGIN, MAX_ROUNDS, MIN_ROUNDS, Measurement, Timing


def measure(seconds: Callable[[int, str], float]) -> Measurement:
    """Steps until a choice is made; `seconds(step, policy)` says how long each takes."""
    measurement = Measurement()
    step = 0
    while measurement.choice is None:
        step += 1
        measurement.add(step, seconds(step, measurement.next_policy()))
    return measurement


def noisy(gain: float, noise: float, seed: int) -> Callable[[int, str], float]:
    generator = random.Random(seed)
    return lambda _, policy: (1 - gain * (policy == "overlap")) * generator.lognormvariate(0, noise)


def test_the_first_step_of_each_policy_is_a_warm_up_and_rounds_turn():
    timings = measure(lambda step, policy: 9.0 if step < 4 else 1.0 + (policy == "overlap")).timings
    assert [(t.policy, t.counts) for t in timings[:8]] == [
        ("serial", False), ("serial", True), ("overlap", False), ("overlap", True),
        ("overlap", True), ("serial", True), ("serial", True), ("overlap", True),
    ]  # fmt: skip


def test_clear_differences_are_seen_in_the_fewest_rounds():
    for gain, choice in ((0.2, "overlap"), (-0.2, "serial")):
        for seed in range(50):
            measurement = measure(noisy(gain, 0.01, seed))
            assert measurement.choice == choice and len(measurement.gains()) == MIN_ROUNDS


def choices(gain: float, noise: float) -> list[str | None]:
    return [measure(noisy(gain, noise, seed)).choice for seed in range(100)]


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_in_quiet_no_choice_costs_more_than_a_hundredth(noise):
    for gain in (-0.05, -0.02, -0.01):
        assert "overlap" not in choices(gain, noise)
    for gain in (0.03, 0.1):
        assert "serial" not in choices(gain, noise)


def test_in_noise_serial_stays():
    """Steps that scatter by 5 %: what loses 2 % is taken seldom, what gains 20 % always."""
    assert choices(-0.02, 0.05).count("overlap") <= 6
    assert "overlap" not in choices(-0.1, 0.05)
    assert "serial" not in choices(0.2, 0.05)


def test_a_few_slow_steps_do_not_decide():
    for seed in range(50):
        steady = noisy(0.1, 0.01, seed)
        measurement = measure(lambda step, p, steady=steady: steady(step, p) * (5 if step in (4, 7) else 1))
        assert measurement.choice == "overlap" and len(measurement.gains()) <= MAX_ROUNDS


def test_a_drift_favours_neither():
    """Steps that become 2 % faster each, as while experts balance; overlap as fast as serial."""
    measurement = measure(lambda step, _: 0.98**step)
    assert measurement.choice == "serial"
    low, high = measurement.bounds()
    assert low < 0 < high


def test_equal_policies_stay_serial():
    assert measure(lambda step, policy: 1.0).choice == "serial"
    assert measure(lambda step, policy: 1.0 - MARGIN * (policy == "overlap") * 0.9).choice == "serial"


def test_steps_that_do_not_count_are_measured_again():
    measurement = Measurement()
    for step in range(1, 5):
        measurement.add(step, 1.0)
    for step in range(5, 8):
        assert measurement.next_policy() == "overlap"
        measurement.add(step, 50.0, counts=False)
    assert len(measurement.gains()) == 1


def test_what_was_measured_before_a_restart_counts_and_kernels_warm_up_again():
    whole = measure(noisy(0.2, 0.01, 0))
    part = Measurement(whole.timings[:6])
    assert part.choice is None and part.next_policy() == whole.timings[6].policy
    part.add(7, 100.0)
    assert not part.timings[-1].counts
    assert Measurement(whole.timings).choice == "overlap"
    assert re.search(r"takes 0\.(79|80|81)\d of the time", str(whole))
    assert Timing(*list(whole.timings[0])) == whole.timings[0]
