"""The recipe: what is trained. Four blocks of one YAML file; how it runs is in the DeepSpeed JSON.

Every block is strict (no conversion between types, except that `1e-5`, which YAML 1.1 reads as text, is
a number), frozen, and refuses unknown keys. Field names of the model are those of Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from cpmoe.config.errors import Problem, divisors, join_numbers, raise_if_any
from cpmoe.config.types import (
    Block,
    Count,
    CountOrAuto,
    CountOrZero,
    Decay,
    Fraction,
    NonNegative,
    Number,
    Positive,
    tuple_from_list,
)


class ModelConfig(Block):
    """A decoder of RMSNorm, RoPE, grouped-query attention and SwiGLU, dense or mixture of experts."""

    vocab_size: CountOrAuto = 0
    """Rows of the embedding; 0 or "auto" takes the size of the prepared data's tokenizer."""
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count = Field(default_factory=lambda data: data.get("num_attention_heads"))
    head_dim: Count = Field(default_factory=lambda data: data["hidden_size"] // data["num_attention_heads"])
    v_head_dim: Count = Field(default_factory=lambda data: data.get("head_dim"))
    """Size of the heads of values, and so of the output; that of queries and keys where not given."""
    attn_logit_softcapping: Positive | None = None
    """Attention scores s become c * tanh(s / c), as in Gemma 2."""
    attention_dropout: Decay = 0.0
    """Share of attention probabilities that training drops; the same ones on every layout."""
    sliding_window: Count | None = None
    """Keys that a query of a sliding_attention layer sees, itself included."""
    layer_types: Annotated[
        tuple[Literal["full_attention", "sliding_attention"], ...], BeforeValidator(tuple_from_list)
    ] = Field(
        default_factory=lambda data: (
            data.get("num_hidden_layers", 0)
            * (("sliding_attention" if data.get("sliding_window") else "full_attention"),)
        )
    )
    """What each layer sees; without it all layers slide where there is a sliding_window, else none."""
    num_sink_tokens: CountOrZero = 0
    """First tokens of each document that sliding_attention layers see beyond their window."""
    intermediate_size: CountOrZero = 0
    """Width of the dense layers' SwiGLU; needed where `first_k_dense_replace` is above 0."""
    num_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    norm_topk_prob: bool = True
    first_k_dense_replace: CountOrZero = 0
    """The first k layers are dense."""
    n_shared_experts: CountOrZero = 0
    """Adds one SwiGLU of width n_shared_experts * moe_intermediate_size that every token passes."""
    use_qk_norm: bool = False
    rope_theta: Positive = 10000.0
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: Positive = 0.02
    router_aux_loss_coef: NonNegative = 0.01
    router_z_loss_coef: NonNegative = 0.0

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        problems = []
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if "head_dim" not in self.model_fields_set and self.hidden_size % heads:
            problems.append(
                Problem(
                    "num_attention_heads",
                    f"must divide hidden_size {self.hidden_size} where head_dim is not given",
                    heads,
                    join_numbers(divisors(self.hidden_size)),
                )
            )
        elif self.head_dim % 2:
            problems.append(
                Problem("head_dim", "RoPE rotates pairs: must be even", self.head_dim, "even numbers")
            )
        if heads % kv_heads:
            constraint = f"must divide num_attention_heads {heads}"
            problems.append(
                Problem("num_key_value_heads", constraint, kv_heads, join_numbers(divisors(heads)))
            )
        problems += self._attention_problems()
        if self.num_experts_per_tok > self.num_experts:
            constraint = f"must not exceed num_experts {self.num_experts}"
            legal = f"1 to {self.num_experts}"
            problems.append(Problem("num_experts_per_tok", constraint, self.num_experts_per_tok, legal))
        if self.first_k_dense_replace > self.num_hidden_layers:
            constraint = f"must not exceed num_hidden_layers {self.num_hidden_layers}"
            legal = f"0 to {self.num_hidden_layers}"
            problems.append(Problem("first_k_dense_replace", constraint, self.first_k_dense_replace, legal))
        if self.first_k_dense_replace and not self.intermediate_size:
            constraint = (
                f"first_k_dense_replace = {self.first_k_dense_replace} makes dense layers of this width"
            )
            problems.append(Problem("intermediate_size", constraint, 0, "1 or more"))
        raise_if_any(problems)
        return self

    def _attention_problems(self) -> Iterator[Problem]:
        if len(self.layer_types) != self.num_hidden_layers:
            constraint = f"must name the kind of each of num_hidden_layers {self.num_hidden_layers}"
            yield Problem("layer_types", constraint, self.layer_types, f"{self.num_hidden_layers} names")
        slides = "sliding_attention" in self.layer_types
        if slides and self.sliding_window is None:
            constraint = "has sliding_attention, which needs a sliding_window"
            yield Problem("layer_types", constraint, self.layer_types, "full_attention, or give the window")
        if self.num_sink_tokens and not slides:
            constraint = "no layer has sliding_attention: every layer sees the first tokens anyway"
            yield Problem("num_sink_tokens", constraint, self.num_sink_tokens, "0, or a sliding_window")


class DataConfig(Block):
    """Which text, how it becomes tokens, and how it is packed into sequences."""

    source: str = "python-stdlib"
    """A `datasets` hub name, a local text, jsonl or parquet path, or python-stdlib (needs no network)."""
    tokenizer: Annotated[str, Field(pattern=r"^(bytes|bpe:[1-9]\d*|.+\.json)$")] = Field(
        "bytes", description="bytes, bpe:SIZE (trained on the source), the path of a tokenizer.json"
    )
    path: Annotated[str, Field(min_length=1)] = "data/python-stdlib-bytes"
    """Folder of the prepared, memory-mapped tokens."""
    seq_len: Annotated[int, Field(ge=2)]
    """Tokens per packed sequence, over all context-parallel ranks together."""
    heldout_fraction: Annotated[Number, Field(ge=0, lt=1)] = 0.05
    """Share of documents kept out of training."""
    seed: CountOrZero = 0
    text_column: str = "text"
    max_documents: Count | None = None


class OptimConfig(Block):
    """Optimizer, learning-rate schedule and clipping. Unused fields (momentum of adamw) are ignored."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: Positive
    betas: Annotated[tuple[Decay, Decay], BeforeValidator(tuple_from_list)] = (0.9, 0.95)
    eps: Positive = 1e-8
    weight_decay: NonNegative = 0.1
    momentum: Decay = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: CountOrZero = 0
    min_lr_ratio: Fraction = 0.1
    """The schedule ends at min_lr_ratio * lr."""
    max_grad_norm: NonNegative = 1.0
    """Clips the norm of all gradients, dense and expert; 0 does not clip."""


class TrainConfig(Block):
    """The loop: batch, length, and what is written when. Steps are optimizer steps."""

    steps: Count
    micro_batch_size: CountOrAuto = 1
    """Sequences per data-parallel rank (that is, per ring of CP ranks) and micro-step; "auto" shares
    global_batch_size among the ranks, in one micro-step where the JSON asks for no accumulation. The
    balance loss of a micro-step is then the same on every layout."""
    global_batch_size: CountOrAuto = 0
    """Sequences per optimizer step over all ranks; 0 or "auto" is one micro-batch per data-parallel rank
    times the JSON's gradient_accumulation_steps."""
    seed: int = 0
    out_dir: Annotated[str, Field(min_length=1)]
    eval_every: CountOrZero = 0
    """0 evaluates only at the end."""
    eval_sequences: CountOrZero = 32
    """Held-out sequences per evaluation; 0 does not evaluate."""
    save_every: CountOrZero = 0
    """0 saves only at the end."""
    log_every: Count = 1
    keep_checkpoints: Count = 2
    resume: Annotated[str, Field(min_length=1)] = "auto"
    """auto (the newest checkpoint of out_dir, if any), never, or the path of a checkpoint."""
    recompute: Literal["none", "full"] = "none"
    """full keeps each block's input only and computes the block again in backward."""
    loss_chunk_tokens: Count = 1024
    """Tokens whose logits exist at one time in the cross entropy."""
    hang_timeout: NonNegative = 300.0
    """Seconds without any progress after which a rank says where it stands and ends the run; 0 waits on.
    Writing a checkpoint may take longer."""
    trace_steps: Annotated[tuple[Count, ...], BeforeValidator(tuple_from_list)] = ()
    """Steps of which out_dir/traces gets a Chrome trace and a picture: which rank did what when."""


class Recipe(Block):
    """One training run's definition, independent of the machines it runs on."""

    model: ModelConfig
    data: DataConfig
    optim: OptimConfig
    train: TrainConfig
