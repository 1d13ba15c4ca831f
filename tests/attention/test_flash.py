"""The flash-attn backend over plans; its two functions, which need a GPU, are replaced by their definition.

What is tested is what we do around them: packing, masks, merging, the global logsumexp in backward.

Shape letters: R packed rows, H query heads, G KV heads, D head dim.
"""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch

from cpmoe.attention import phases, ring
from cpmoe.attention.blocks.flash import FlashBlocks
from cpmoe.attention.mask import CAUSAL, Mask
from cpmoe.attention.plan import build_plan
from cpmoe.attention.scores import Scores
from tests.attention.cases import Case, documents, expected, inputs, relative_error


def _scores(q_RHD, k_RGD, scale, causal, before, after, softcap):
    """Masked scores [H, R, U], masks aligned at the last query and key as flash-attn does."""
    k_RHD = k_RGD.repeat_interleave(q_RHD.shape[1] // k_RGD.shape[1], dim=1)
    place = torch.arange(len(q_RHD))[:, None] + len(k_RGD) - len(q_RHD) - torch.arange(len(k_RGD))
    hidden = (place < 0) & causal
    hidden |= (place > before) & (before >= 0)
    hidden |= (-place > after) & (after >= 0)
    scores = torch.einsum("rhd,uhd->hru", q_RHD, k_RHD).mul(scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(hidden, -torch.inf)


def _documents(starts_q, starts_k):
    bounds = [x.tolist() for x in (starts_q, starts_k)]
    assert all(x.dtype == torch.int32 for x in (starts_q, starts_k))
    return [(slice(*q), slice(*k)) for q, k in zip(*map(pairwise, bounds), strict=True)]


def _forward(
    q, k, v, starts_q, starts_k, longest_q, longest_k, dropout, scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0,
):  # fmt: skip
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    for rows, keys in _documents(starts_q, starts_k):
        assert rows.stop - rows.start <= longest_q and keys.stop - keys.start <= longest_k
        scores = _scores(q[rows], k[keys], scale, causal, window_size_left, window_size_right, softcap)
        values = v[keys].repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        out[rows] = torch.einsum("hru,uhd->rhd", scores.softmax(-1), values)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, None, None


def _backward(
    dout, q, k, v, out, lse, dq, dk, dv, starts_q, starts_k, longest_q, longest_k, dropout, scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
):  # fmt: skip
    assert deterministic and lse.is_contiguous()
    group = q.shape[1] // k.shape[1]
    for x in (dq, dk, dv):
        x.fill_(torch.nan)
    for rows, keys in _documents(starts_q, starts_k):
        scores = _scores(q[rows], k[keys], scale, causal, window_size_left, window_size_right, softcap)
        probs = (scores - lse[:, rows, None]).exp()
        k_RHD, v_RHD = (x[keys].repeat_interleave(group, dim=1) for x in (k, v))
        delta = (dout[rows] * out[rows]).sum(-1).T[..., None]
        dscores = probs * (torch.einsum("rhd,uhd->hru", dout[rows], v_RHD) - delta) * scale
        if softcap:
            dscores *= 1 - (scores.masked_fill(probs == 0, 0) / softcap).square()
        dq[rows] = torch.einsum("hru,uhd->rhd", dscores, k_RHD)
        dk[keys] = torch.einsum("hru,rhd->uhd", dscores, q[rows]).unflatten(1, (-1, group)).sum(2)
        dv[keys] = torch.einsum("hru,rhd->uhd", probs, dout[rows]).unflatten(1, (-1, group)).sum(2)


@pytest.fixture
def flash_attn(monkeypatch):
    interface = ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_varlen_forward = _forward
    interface._flash_attn_varlen_backward = _backward
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    monkeypatch.setattr(phases, "select_backend", lambda *_: FlashBlocks())


@pytest.mark.parametrize(
    ("mask", "softcap"),
    [
        (CAUSAL, 0.0),
        (Mask(window=(5, None), num_sinks=2), 0.5),
        (Mask(causal=False), 0.0),
        (Mask(causal=False, window=(3, 6)), 0.0),
    ],
    ids=str,
)
def test_rectangles_of_a_kind_are_one_call(flash_attn, mask, softcap):
    case = Case("flash", ((17, 1, 22, -3), (43,), (20, 23)), mask=mask, softcap=softcap)
    scores = Scores(case.head_dim**-0.5, softcap)
    (q, k, v), grad_out = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = ring.ring_attention(
        *leaves, build_plan(documents(case), 1, 0, mask=mask), None, None, scores=scores
    )
    grads = torch.autograd.grad(out, leaves, grad_out)
    for ours, exact in zip((out.detach(), *grads), expected(case), strict=True):
        assert relative_error(ours, exact) <= 1e-12


def test_what_is_missing_is_named():
    q = torch.zeros(1, 4, 2, 64)
    assert "the package flash-attn is not installed" in (
        FlashBlocks().unsupported(q, q, q, Scores(1.0)) or ""
    )
