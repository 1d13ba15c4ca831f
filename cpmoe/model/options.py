"""How a model computes."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpmoe.config.deepspeed import ExpertsConfig


@dataclass(frozen=True)
class ModelOptions:
    """How the model computes. Nothing but the seed changes what it computes.

    attention_strategy  ring | allgather
    attention_backend   auto | reference | sdpa | triton | triton_tf32
    attention_dkv_dtype float32 | bfloat16: what gradients of keys and values are sent in
    experts             how rows reach their experts, and what multiplies them
    coschedule_policy   serial | overlap: how the phases of two slices are ordered
    recompute           none | full: forget a block's activations and compute them again in backward
    loss_chunk_tokens   rows of logits that exist at once
    seed                of what is drawn in forward: the masks of dropout
    """

    attention_strategy: str = "ring"
    attention_backend: str = "auto"
    attention_dkv_dtype: str = "float32"
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    coschedule_policy: str = "serial"
    recompute: str = "none"
    loss_chunk_tokens: int = 1024
    seed: int = 0
