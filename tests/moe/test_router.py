"""The router: choice, ties, types, padding."""

from __future__ import annotations

import pytest
import torch

from cpmoe.moe.router import Router, count_rows, stable_topk


def make_router(experts: int = 6, k: int = 2, normalize: bool = True, dtype=torch.float64) -> Router:
    router = Router(5, experts, k, normalize)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
    return router.to(dtype)


def tokens(count: int = 9, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("normalize", [True, False])
def test_probabilities_choice_and_weights(normalize):
    router, x = make_router(normalize=normalize), tokens()
    routing = router(x)
    exps = torch.exp(x @ router.weight.T)
    torch.testing.assert_close(routing.probs_TE, exps / exps.sum(1, keepdim=True), rtol=1e-12, atol=0)
    torch.testing.assert_close(routing.logsumexp_T, torch.log(exps.sum(1)), rtol=1e-12, atol=1e-14)
    for token in range(len(x)):
        best = exps[token].argsort(descending=True)[:2]
        assert torch.equal(routing.indices_TK[token], best)
        chosen = exps[token, best]
        weights = chosen / (chosen if normalize else exps[token]).sum()
        torch.testing.assert_close(routing.weights_TK[token], weights, rtol=1e-12, atol=0)


def test_ties_go_to_the_lowest_index():
    scores = torch.tensor([[1.0, 2, 2, 2, 1, 2], [0, 0, 0, 0, 0, 0], [3, 1, 3, 1, 1, 1]])
    assert stable_topk(scores, 3).tolist() == [[1, 2, 3], [0, 1, 2], [0, 2, 1]]
    many = torch.zeros(50, 128)
    assert torch.equal(stable_topk(many, 8), torch.arange(8).expand(50, 8))


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_computes_in_float32_or_wider(dtype, wide):
    router, x = make_router(dtype=dtype), tokens(dtype=dtype)
    routing = router(x)
    assert routing.probs_TE.dtype == routing.weights_TK.dtype == routing.logsumexp_T.dtype == wide
    exact = (x.double() @ router.weight.double().T).softmax(1)
    tolerance = 1e-6 if wide == torch.float32 else 1e-12
    torch.testing.assert_close(routing.probs_TE.double(), exact, rtol=tolerance, atol=tolerance)


def test_padding_has_no_expert_no_statistics_and_no_gradient():
    router, x = make_router(), tokens().requires_grad_()
    mask = torch.tensor([True, False, True, True, False, True, False, True, True])
    routing = router(x, mask)
    assert torch.all(routing.indices_TK[~mask] == 6)
    alone = router(x[mask])
    for padded, real in zip(routing, alone, strict=True):
        torch.testing.assert_close(padded[mask], real, rtol=1e-12, atol=1e-14)
    for values in (routing.probs_TE, routing.weights_TK, routing.logsumexp_T):
        assert torch.count_nonzero(values[~mask]) == 0
    assert torch.equal(count_rows(routing.indices_TK, 6), count_rows(alone.indices_TK, 6))
    (
        routing.probs_TE.square().sum() + routing.weights_TK.square().sum() + routing.logsumexp_T.sum()
    ).backward()
    assert x.grad is not None and torch.count_nonzero(x.grad[~mask]) == 0
    assert torch.all(x.grad[mask].abs().sum(1) > 0)


def test_counts():
    indices = torch.tensor([[0, 3], [3, 1], [4, 4]])
    assert count_rows(indices, 4).tolist() == [1, 1, 0, 2]
    assert count_rows(indices.new_empty(0, 2), 4).tolist() == [0, 0, 0, 0]
