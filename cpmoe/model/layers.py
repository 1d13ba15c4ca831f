"""The parts of a decoder block: norm, rotary embedding, context-parallel attention, dense MLP.

Shape letters: B batch, T local tokens, H query heads, G KV heads, D head dim, M model dim, I MLP width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpmoe.attention import phases, ulysses
from cpmoe.attention.dropout import Dropout, head_names
from cpmoe.attention.phases import AttentionState
from cpmoe.attention.plan import AttentionPlan
from cpmoe.attention.scores import Scores
from cpmoe.config.recipe import ModelConfig
from cpmoe.parallel.groups import Groups


class RMSNorm(nn.Module):
    """x / rms(x) · weight over the last dim, in float32 or wider inside (Zhang and Sennrich, 2019)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotary(NamedTuple):
    """Cosines and signed sines of the rotary angles, [B, T, 1, D], shared by all layers of a forward.

    The sine is negative in the first half of D, so that a rotation is x · cos + roll(x, D/2) · sin.
    """

    cos_BT1D: Tensor
    sin_BT1D: Tensor


def rotary_angles(positions_BT: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotary:
    """Angles position · theta^(-2i/D) of RoPE (Su et al., 2021), from positions inside the document.

    The product is taken in float64: in float32 it is off by 0.06 rad at a position of a million.
    Cosines and sines are returned in float32 or, for float64 models, float64.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_BT.device) / head_dim
    angles_BTD = positions_BT[..., None].double() * theta**-exponents
    wide = torch.promote_types(dtype, torch.float32)
    cos_BT1D, sin_BT1D = angles_BTD.cos().to(wide)[:, :, None], angles_BTD.sin().to(wide)[:, :, None]
    return Rotary(torch.cat((cos_BT1D, cos_BT1D), dim=-1), torch.cat((-sin_BT1D, sin_BT1D), dim=-1))


def rotate(x_BTHD: Tensor, rotary: Rotary) -> Tensor:
    """Applies RoPE to the two halves of the head dim (the layout of HF Llama); keeps the dtype."""
    swapped_BTHD = x_BTHD.roll(x_BTHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_BTHD * rotary.cos_BT1D, swapped_BTHD, rotary.sin_BT1D).to(x_BTHD.dtype)


class Attention(nn.Module):
    """Grouped-query attention over a sequence that is split over the `ring` group."""

    def __init__(
        self, config: ModelConfig, layer: int, groups: Groups, strategy: str, backend: str, dkv_dtype: str
    ) -> None:
        super().__init__()
        self.head_dim, self.v_head_dim = config.head_dim, config.v_head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * self.v_head_dim, bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps) if config.use_qk_norm else nn.Identity()
        self.layer = layer
        self.dropout_rate = config.attention_dropout
        self.scores = Scores(self.head_dim**-0.5, config.attn_logit_softcapping or 0.0)
        self.groups = groups
        self.strategy = strategy
        self.backend = backend
        self.dkv_dtype = dkv_dtype

    def project(self, x_BTM: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """x_BTM [B, T, M] → rotated q_BTHD, rotated k_BTGD and v_BTGD."""
        heads = (*x_BTM.shape[:2], -1, self.head_dim)
        q_BTHD = rotate(self.q_norm(self.q_proj(x_BTM).view(heads)), rotary)
        k_BTGD = rotate(self.k_norm(self.k_proj(x_BTM).view(heads)), rotary)
        return q_BTHD, k_BTGD, self.v_proj(x_BTM).view(*heads[:-1], self.v_head_dim)

    # Phases of attention: KV goes round `ring`, its gradient `ring_grad`; heads cross `ulysses`.

    def kv_start(
        self,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        plan: AttentionPlan,
        before: AttentionState | None,
        names_2BT: Tensor | None = None,
    ) -> AttentionState:
        """Launches the first transfer of this slice's KV; `before`: the slice before it, if there is one.

        `names_2BT` are those of the plan's queries, for dropout; without them there is none.
        """
        scores = self.scores
        if names_2BT is not None:
            heads_2H = head_names(self.layer, q_BTHD.shape[2], q_BTHD.device)
            scores = replace(scores, dropout=Dropout(self.dropout_rate, names_2BT, heads_2H))
        return ulysses.start(
            q_BTHD,
            k_BTGD,
            v_BTGD,
            plan,
            self.groups.ring,
            self.groups.ring_grad,
            self.groups.ulysses,
            strategy=self.strategy,
            backend=self.backend,
            scores=scores,
            dkv_dtype=self.dkv_dtype,
            before=before,
        )

    def attend_own(self, state: AttentionState) -> None:
        phases.attend_own(state)

    def kv_wait(self, state: AttentionState) -> None:
        phases.wait(state)

    def attend(self, state: AttentionState) -> Tensor:
        """[B, T, H, D]"""
        return ulysses.attend(state, self.groups.ulysses)

    def output(self, out_BTHD: Tensor) -> Tensor:
        """out_BTHD → [B, T, M]"""
        return self.o_proj(out_BTHD.flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)): the MLP of a dense layer (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x_BTM: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BTM)) * self.up_proj(x_BTM))
