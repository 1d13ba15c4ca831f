"""Checks shared by the attention strategies.

Shape letters: B batch, T local tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cpmoe.attention.blocks.accumulators import accumulation_dtype
from cpmoe.attention.plan import AttentionPlan

DKV_DTYPES = ("float32", "bfloat16")


def check_inputs(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    plan: AttentionPlan,
    ring: ProcessGroup | None,
    ring_grad: ProcessGroup | None,
) -> None:
    """Raises ValueError where q, k, v do not fit each other, the plan or the ring."""
    if q_BTHD.dim() != 4 or k_BTGD.dim() != 4 or k_BTGD.shape[:3] != v_BTGD.shape[:3]:
        raise ValueError(
            f"q {tuple(q_BTHD.shape)}, k {tuple(k_BTGD.shape)}, v {tuple(v_BTGD.shape)}: must be "
            "[B, T, H, D] and twice [B, T, G, D], alike but for the size D of V"
        )
    rows, length = plan.batch_size, plan.num_queries
    for name, x in (("q", q_BTHD), ("k", k_BTGD)):
        if tuple(x.shape[:2]) != (rows, length):
            raise ValueError(f"{name} {tuple(x.shape)}: the plan is for {rows} rows of {length} tokens")
    (num_heads, head_dim), (num_kv_heads, kv_dim) = q_BTHD.shape[2:], k_BTGD.shape[2:]
    if head_dim != kv_dim or num_heads % num_kv_heads:
        raise ValueError(
            f"{num_heads} query heads of size {head_dim} and {num_kv_heads} KV heads of size {kv_dim}: sizes "
            "must be equal and query heads a multiple of KV heads"
        )
    if not q_BTHD.dtype == k_BTGD.dtype == v_BTGD.dtype:
        raise ValueError(f"q {q_BTHD.dtype}, k {k_BTGD.dtype}, v {v_BTGD.dtype}: must have one dtype")
    for name, group in (("ring", ring), ("ring_grad", ring_grad)):
        size = 1 if group is None else dist.get_world_size(group)
        if size != plan.cp_size:
            raise ValueError(f"group {name} has {size} ranks and the plan is for {plan.cp_size}")


def wire_dtype(dtype: torch.dtype, dkv_dtype: str) -> torch.dtype:
    """What dKV is sent in for inputs of `dtype`: float64 stays. Raises ValueError for an unknown choice."""
    if dkv_dtype not in DKV_DTYPES:
        raise ValueError(f"attention.dkv_dtype = {dkv_dtype!r}: must be one of {', '.join(DKV_DTYPES)}")
    sums = accumulation_dtype(dtype)
    return torch.bfloat16 if sums == torch.float32 and dkv_dtype == "bfloat16" else sums
