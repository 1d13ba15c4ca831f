"""Balance losses: the same for any split of the tokens; plausible wrong versions of them are not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpmoe.moe.balance import max_over_mean_load, max_violation, router_z_loss, switch_aux_loss
from cpmoe.moe.router import Router, count_rows
from tests.distributed import run_distributed
from tests.moe import reference

EXPERTS, K, HIDDEN, TOKENS = 4, 2, 6, 24


def skewed_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Early tokens like one expert, late ones another and more strongly; the last quarter is padding."""
    generator = torch.Generator().manual_seed(0)
    x = 0.3 * torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    place = torch.arange(TOKENS)
    x[place, place * EXPERTS // TOKENS] += 1.0 + 6.0 * place / TOKENS
    return x, place < TOKENS * 3 // 4


def make_router() -> Router:
    router = Router(HIDDEN, EXPERTS, K, True).double()
    with torch.no_grad():
        router.weight.copy_(torch.eye(EXPERTS, HIDDEN))
    return router


def sharded_losses(rank: int, world: int, wrong: str | None) -> dict[str, torch.Tensor]:
    """This rank's share of aux and z-loss, and the router's gradient of each, for contiguous shards."""
    router = make_router()
    x, mask = (value.chunk(world)[rank] for value in skewed_tokens())
    routing = router(x, mask)
    counts = count_rows(routing.indices_TK, EXPERTS)
    num_tokens = int(mask.sum())
    if world > 1 and wrong is None:
        dist.all_reduce(counts)
        num_tokens = int(counts.sum()) // K
    aux = switch_aux_loss(routing.probs_TE.sum(0), counts, K)
    z = router_z_loss(routing.logsumexp_T.square().sum(), num_tokens)
    if wrong == "mean of local means":
        aux, z = aux / world, z / world
    shares: dict[str, torch.Tensor] = {}
    for name, loss in (("aux", aux), ("z", z)):
        (grad,) = torch.autograd.grad(loss, router.weight, retain_graph=True)
        shares |= {name: loss.detach(), f"{name}_grad": grad}
    return shares


def total(world: int, wrong: str | None = None) -> dict[str, torch.Tensor]:
    shares = [sharded_losses(0, 1, wrong)] if world == 1 else run_distributed(sharded_losses, world, wrong)
    return {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}


def whole() -> dict[str, torch.Tensor]:
    x, mask = skewed_tokens()
    weight = make_router().weight.detach().requires_grad_()
    empty = torch.zeros(EXPERTS, 1, HIDDEN, dtype=torch.float64)
    weights = {"router": weight, "gate": empty, "up": empty, "down": empty.transpose(1, 2)}
    _, probs, logsumexp, counts = reference.moe(x[mask], weights, K)
    losses = {"aux": reference.aux_loss(probs, counts, K), "z": logsumexp.square().mean()}
    grads = {
        f"{name}_grad": torch.autograd.grad(loss, weight, retain_graph=True)[0]
        for name, loss in losses.items()
    }
    return {name: loss.detach() for name, loss in losses.items()} | grads


@pytest.mark.parametrize("world", [1, 2, 4])
def test_losses_and_router_gradients_do_not_depend_on_the_split(world):
    sharded = total(world)
    for name, value in whole().items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("world", [2, 4])
def test_a_mean_of_local_means_is_another_loss(world):
    wrong, right = total(world, "mean of local means"), whole()
    for name, value in right.items():
        error = float((wrong[name] - value).norm() / value.norm())
        assert error > 0.1, (name, error)


def test_perfect_balance_has_aux_loss_one():
    probs_sum, counts = torch.full((EXPERTS,), 3.0), torch.full((EXPERTS,), 6)
    assert switch_aux_loss(probs_sum, counts, num_experts_per_tok=2) == 1.0


def test_all_on_one_expert_has_aux_loss_of_the_number_of_experts():
    probs_sum, counts = torch.tensor([12.0, 0, 0, 0]), torch.tensor([12, 0, 0, 0])
    assert switch_aux_loss(probs_sum, counts, num_experts_per_tok=1) == 4.0


def test_leading_dimensions_are_layers():
    probs_sum = torch.rand(3, EXPERTS, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([[4, 2, 1, 1], [2, 2, 2, 2], [0, 0, 0, 8]])
    losses = switch_aux_loss(probs_sum, counts, 2)
    assert losses.shape == (3,)
    for layer in range(3):
        torch.testing.assert_close(losses[layer], switch_aux_loss(probs_sum[layer], counts[layer], 2))


def test_nothing_routed_gives_zero():
    zero = torch.zeros(EXPERTS)
    assert switch_aux_loss(zero, zero.long(), 2) == 0
    assert router_z_loss(torch.tensor(0.0), 0) == 0
    assert max_over_mean_load(zero.long()) == 0 and max_violation(zero.long()) == 0


def test_load_statistics():
    counts = torch.tensor([[4, 2, 1, 1], [3, 3, 3, 3], [8, 0, 0, 0]])
    assert max_over_mean_load(counts).tolist() == [2.0, 1.0, 4.0]
    assert max_violation(counts).tolist() == [1.0, 0.0, 3.0]
