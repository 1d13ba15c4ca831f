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
            ignored_C1 = (labels_T[part] == IGNORED_LABEL)[:, None]
            target_C1 = labels_T[part, None].masked_fill(ignored_C1, 0)
            # Zeroed here, an ignored row adds nothing to the weight's gradient: no pass over its logits.
            hidden_CM = hidden_TM[part].masked_fill(ignored_C1, 0)
            log_probs_CV = torch.log_softmax(hidden_CM @ weight_VM.t(), dim=-1, dtype=wide)
            losses_T[part] = -log_probs_CV.gather(1, target_C1).masked_fill_(ignored_C1, 0)[:, 0]
            if grad_hidden_TM is None or grad_weight_VM is None:
                continue
            grad_logits_CV = log_probs_CV.exp_()
            grad_logits_CV.scatter_add_(1, target_C1, -torch.ones_like(target_C1, dtype=wide))
            narrow_CV = grad_logits_CV.to(hidden_TM.dtype)
            torch.mm(narrow_CV, weight_VM, out=grad_hidden_TM[part])
            grad_hidden_TM[part].masked_fill_(ignored_C1, 0)
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
