"""Schedule values at their corners, and which tensors decay."""

import math

import pytest
import torch

from cpmoe.config.recipe import OptimConfig
from cpmoe.training.optimizer import RecipeSchedule, build_optimizer, lr_factor, parameter_groups

STEPS = 11


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("constant", 1.0, 1.0), ("linear", 0.55, 0.1), ("cosine", 0.55, 0.1)]
)
def test_schedule_corners(schedule, middle, end):
    config = OptimConfig(lr=1.0, schedule=schedule, min_lr_ratio=0.1)
    assert lr_factor(config, STEPS, 0) == 1.0
    assert math.isclose(lr_factor(config, STEPS, 5), middle)
    assert math.isclose(lr_factor(config, STEPS, STEPS - 1), end)
    assert math.isclose(lr_factor(config, STEPS, 1000), end)


def test_warmup_reaches_the_full_rate_at_its_last_step():
    config = OptimConfig(lr=1.0, schedule="linear", warmup_steps=4, min_lr_ratio=0.0)
    assert [lr_factor(config, STEPS, step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert lr_factor(config, STEPS, STEPS - 1) == 0.0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_matrices_decay_and_vectors_do_not(name):
    model = torch.nn.Linear(3, 2)
    config = OptimConfig(name=name, lr=0.5, weight_decay=0.1, momentum=0.9)
    optimizer = build_optimizer(config, parameter_groups(model, config.weight_decay))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model.bias, before["bias"])
    torch.testing.assert_close(model.weight.detach(), before["weight"] * (1 - 0.5 * 0.1))


def test_schedule_drives_every_group():
    model = torch.nn.Linear(3, 2)
    config = OptimConfig(name="sgd", lr=2.0, schedule="linear", min_lr_ratio=0.0)
    optimizer = build_optimizer(config, parameter_groups(model, 0.1))
    schedule = RecipeSchedule(config, 3, optimizer)
    rates = []
    for _ in range(3):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    assert rates == [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]


def test_a_longer_run_continues_on_its_own_schedule():
    config = OptimConfig(name="sgd", lr=2.0, schedule="linear", min_lr_ratio=0.0)
    short, long = (
        RecipeSchedule(config, steps, build_optimizer(config, parameter_groups(torch.nn.Linear(3, 2), 0.1)))
        for steps in (3, 5)
    )
    for _ in range(2):
        short.optimizer.step()
        short.step()
    assert short.get_last_lr() == [0.0, 0.0]
    long.load_state_dict(short.state_dict())
    assert [group["lr"] for group in long.optimizer.param_groups] == long.get_last_lr() == [1.0, 1.0]
