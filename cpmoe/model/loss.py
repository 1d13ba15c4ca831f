"""Cross entropy from hidden states, in chunks: logits of all tokens never exist at once.

Shape letters: T tokens, M model dim, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cpmoe.attention.sharding import IGNORED_LABEL


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes gradients in forward, while the logits of a chunk exist; backward only scales them."""

    @staticmethod
    def forward(ctx, hidden_TM: Tensor, weight_VM: Tensor, labels_T: Tensor, chunk: int):  # type: ignore[override]
        wide = torch.promote_types(hidden_TM.dtype, torch.float32)
        losses_T = torch.zeros(labels_T.shape, dtype=wide, device=hidden_TM.device)
        needs_grad = any(ctx.needs_input_grad[:2])
        grad_hidden_TM = torch.empty_like(hidden_TM) if needs_grad else None
        grad_weight_VM = torch.zeros_like(weight_VM, dtype=wide) if needs_grad else None
        for start in range(0, labels_T.shape[0], chunk):
            part = slice(start, start + chunk)
            hidden_CM, labels_C = hidden_TM[part], labels_T[part]
            ignored_C = labels_C == IGNORED_LABEL
            target_C1 = labels_C.masked_fill(ignored_C, 0)[:, None]
            logits_CV = (hidden_CM @ weight_VM.t()).to(wide)
            lse_C = torch.logsumexp(logits_CV, dim=-1)
            loss_C = lse_C - logits_CV.gather(1, target_C1)[:, 0]
            losses_T[part] = loss_C.masked_fill_(ignored_C, 0)
            if grad_hidden_TM is None or grad_weight_VM is None:
                continue
            grad_logits_CV = logits_CV.sub_(lse_C[:, None]).exp_()
            grad_logits_CV.scatter_add_(1, target_C1, torch.full_like(lse_C, -1)[:, None])
            grad_logits_CV.masked_fill_(ignored_C[:, None], 0)
            narrow_CV = grad_logits_CV.to(hidden_TM.dtype)
            torch.mm(narrow_CV, weight_VM, out=grad_hidden_TM[part])
            if wide == hidden_TM.dtype:
                grad_weight_VM.addmm_(narrow_CV.t(), hidden_CM)
            else:
                grad_weight_VM += narrow_CV.t() @ hidden_CM
        ctx.grads = (grad_hidden_TM, grad_weight_VM, weight_VM.dtype)
        ctx.mark_non_differentiable(losses_T)
        return losses_T.sum(), losses_T

    @staticmethod
    def backward(ctx, grad_sum: Tensor, _grad_losses: Tensor):  # type: ignore[override]
        grad_hidden_TM, grad_weight_VM, weight_dtype = ctx.grads
        ctx.grads = None
        grad_hidden_TM.mul_(grad_sum)
        grad_weight_VM.mul_(grad_sum)
        return grad_hidden_TM, grad_weight_VM.to(weight_dtype), None, None


def chunked_cross_entropy(
    hidden_TM: Tensor, weight_VM: Tensor, labels_T: Tensor, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Sum of the token cross entropies -log softmax(hidden weightᵀ)[label], in nats.

    hidden_TM and weight_VM share a floating dtype; labels_T int64, -100 is ignored. At most
    `chunk_tokens` rows of logits exist at once, in float32 or wider. Local to the rank. Returns the sum
    (scalar, differentiable once) and the losses [T] (no gradient, 0 where ignored), both float32 or wider.
    """
    return _ChunkedCrossEntropy.apply(hidden_TM, weight_VM, labels_T, chunk_tokens)
