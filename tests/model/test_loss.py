"""The chunked cross entropy against torch's, forward and gradient."""

import pytest
import torch
import torch.nn.functional as F

from cpmoe.model.loss import chunked_cross_entropy


def _inputs(tokens: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(13, 8, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 13, (tokens,), generator=generator)
    labels[::3] = -100
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def _reference(hidden, weight, labels):
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    losses = F.cross_entropy(h @ w.t(), labels, ignore_index=-100, reduction="none")
    (3.0 * losses.sum()).backward()
    return losses.detach(), h.grad, w.grad


def _error(a, b):
    return float((a.double() - b).norm() / b.norm())


@pytest.mark.parametrize("chunk", [1, 5, 63, 1000])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_matches_cross_entropy(chunk, dtype, limit):
    hidden, weight, labels = _inputs(63, dtype)
    total, losses = chunked_cross_entropy(hidden, weight, labels, chunk)
    (3.0 * total).backward()
    expected, grad_hidden, grad_weight = _reference(hidden, weight, labels)
    assert not losses.requires_grad
    assert _error(losses, expected) <= limit
    assert _error(total.detach(), expected.sum()) <= limit
    assert _error(hidden.grad, grad_hidden) <= limit
    assert _error(weight.grad, grad_weight) <= limit


def test_bfloat16_is_no_worse_than_the_plain_op():
    hidden, weight, labels = _inputs(63, torch.bfloat16)
    total, _ = chunked_cross_entropy(hidden, weight, labels, 16)
    (3.0 * total).backward()
    _, grad_hidden, grad_weight = _reference(hidden, weight, labels)
    plain_h, plain_w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    (3.0 * F.cross_entropy((plain_h @ plain_w.t()).float(), labels, reduction="sum")).backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    assert _error(hidden.grad, grad_hidden) <= 2 * _error(plain_h.grad, grad_hidden)
    assert _error(weight.grad, grad_weight) <= 2 * _error(plain_w.grad, grad_weight)


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_valid_label_gives_zero_loss_and_zero_gradient(tokens):
    hidden, weight, labels = _inputs(tokens, torch.float64)
    labels.fill_(-100)
    total, _ = chunked_cross_entropy(hidden, weight, labels, 4)
    total.backward()
    assert total == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_evaluation_keeps_no_gradient():
    hidden, weight, labels = _inputs(9, torch.float64)
    with torch.no_grad():
        total, losses = chunked_cross_entropy(hidden, weight, labels, 4)
    assert not total.requires_grad and losses.shape == (9,)
