"""Keys that DeepSpeed 0.19.8 reads and cpmoe refuses, each with the reason.

A key may stay in a file while it is switched off: null, one of the values listed as harmless, or a block
that says "enabled": false or holds nothing but such values. It is dropped then, since DeepSpeed's default
says the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cpmoe.config.errors import Problem, show


class Refusal(NamedTuple):
    reason: str
    harmless: tuple[Any, ...] = (False,)


_UNMEASURED = "not measured with expert groups, where a wrong reduction goes unnoticed"
_MESH = (
    "DeepSpeed would leave gradients unreduced over these ranks; CP x DP is its data-parallel world. "
    "Use cpmoe.context_parallel_size"
)
_OWN_LOADER = "cpmoe loads the data itself, since the ranks of one ring read the same sequences"
_OWN_CHECKPOINT = "cpmoe writes its own checkpoints; use train.save_every and train.keep_checkpoints"
_REMOVED = "removed from DeepSpeed 0.19.8, which raises on it"

REFUSED: dict[str, Refusal] = {
    "fp16": Refusal("float16 is not supported, use bf16"),
    "bfloat16": Refusal("an old name of bf16, use that"),
    "torch_autocast": Refusal("not supported: use bf16, which keeps float32 master weights"),
    "bf16.bf16_master_weights_and_grads": Refusal(_UNMEASURED),
    "bf16.bf16_optimizer_states": Refusal(_UNMEASURED),
    "data_types.param_dtype": Refusal("the precision follows bf16.enabled"),
    "data_types.buffer_dtype": Refusal("the precision follows bf16.enabled"),
    "comms_logger": Refusal(
        "it synchronises the device after each collective, which destroys the overlap of communication "
        "and computation, and so measures another program"
    ),
    "sequence_parallel_size": Refusal(_MESH, (1,)),
    "data_parallel_size": Refusal(_MESH),
    "tensor_parallel": Refusal("tensor parallelism is not supported; use cpmoe.context_parallel_size"),
    "expert_parallel": Refusal("DeepSpeed's AutoEP is not used; use cpmoe.expert_parallel_size"),
    "use_data_before_expert_parallelism": Refusal("cpmoe builds its own groups; use cpmoe.rank_order"),
    "seq_parallel_communication_data_type": Refusal("the ring sends gradients of KV in float32"),
    "pipeline": Refusal("pipeline parallelism is not supported"),
    "gradient_allreduce_op": Refusal("the loss is scaled for a mean over all ranks", ("mean",)),
    "prescale_gradients": Refusal(_UNMEASURED),
    "gradient_predivide_factor": Refusal(_UNMEASURED, (1,)),
    "managed_gradient_accumulation": Refusal(
        "the loop counts micro-steps with DeepSpeed's own accumulation", (True,)
    ),
    "optimizer.legacy_fusion": Refusal("cpmoe builds the optimizer itself"),
    "disable_allgather": Refusal("DeepSpeed reads it and does nothing with it"),
    "vocabulary_size": Refusal("DeepSpeed only warns by it; use model.vocab_size"),
    "dataloader_drop_last": Refusal(_OWN_LOADER),
    "data_efficiency": Refusal(_OWN_LOADER),
    "checkpoint": Refusal(_OWN_CHECKPOINT),
    "datastates_ckpt": Refusal(_OWN_CHECKPOINT),
    "aio": Refusal("offload to NVMe is not measured; offload to cpu"),
    "autotuning": Refusal("it restarts the script with other batch sizes, which the recipe fixes"),
    "hybrid_engine": Refusal("it is for generation during reinforcement learning"),
    "compile": Refusal("DeepSpeed's compiler does not know cpmoe's groups"),
    "weight_quantization": Refusal("it is for inference"),
    "activation_checkpointing": Refusal("cpmoe recomputes blocks itself; use train.recompute"),
    "zero_allow_untested_optimizer": Refusal("cpmoe builds the optimizer and sets this itself", (True,)),
    "zero_force_ds_cpu_optimizer": Refusal("cpmoe builds the optimizer and sets this itself"),
    "zero_optimization.zero_hpz_partition_size": Refusal(_UNMEASURED, (0, 1)),
    "zero_optimization.zero_quantized_weights": Refusal(_UNMEASURED),
    "zero_optimization.zero_quantized_nontrainable_weights": Refusal(_UNMEASURED),
    "zero_optimization.zero_quantized_gradients": Refusal(_UNMEASURED),
    "zero_optimization.zenflow": Refusal(_UNMEASURED),
    "zero_optimization.round_robin_gradients": Refusal(_UNMEASURED),
    "zero_optimization.compute_grad_norm": Refusal("the norm clips gradients and is logged", (True,)),
    "zero_optimization.legacy_stage1": Refusal(_REMOVED),
    "zero_optimization.elastic_checkpoint": Refusal(_OWN_CHECKPOINT),
    "zero_optimization.pipeline_loading_checkpoint": Refusal(_OWN_CHECKPOINT),
    "zero_optimization.cpu_offload": Refusal("an old name of offload_optimizer, use that"),
    "zero_optimization.cpu_offload_param": Refusal("an old name of offload_param, use that"),
    "zero_optimization.cpu_offload_use_pin_memory": Refusal("an old name of offload_optimizer.pin_memory"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": Refusal(_OWN_CHECKPOINT),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Refusal(_OWN_CHECKPOINT),
    "zero_optimization.save_muon_momentum_buffer_in_memory": Refusal("optim.name is adamw or sgd"),
    "zero_optimization.offload_optimizer.nvme_path": Refusal("offload to NVMe is not measured"),
    "zero_optimization.offload_optimizer.pipeline_read": Refusal("offload to NVMe is not measured"),
    "zero_optimization.offload_optimizer.pipeline_write": Refusal("offload to NVMe is not measured"),
    "zero_optimization.offload_optimizer.fast_init": Refusal("offload to NVMe is not measured"),
    "zero_optimization.offload_optimizer.ratio": Refusal(_UNMEASURED, (1,)),
    "zero_optimization.offload_optimizer.super_offload": Refusal(_UNMEASURED),
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": Refusal("it belongs to super_offload"),
    "zero_optimization.offload_param.nvme_path": Refusal("offload to NVMe is not measured"),
    "zero_optimization.mics_shard_size": Refusal(_REMOVED),
    "zero_optimization.mics_hierarchical_params_gather": Refusal(_REMOVED),
    "zero_optimization.zeropp_loco_param": Refusal(_REMOVED),
    "moe": Refusal("DeepSpeed's own MoE options are not used; use cpmoe.expert_parallel_size"),
    "mesh_param": Refusal(_MESH),
    **{
        key: Refusal(_REMOVED)
        for key in (
            "nebula",
            "compression_training",
            "amp",
            "quantize_training",
            "sparse_gradients",
            "eigenvalue",
            "sparse_attention",
            "elasticity",
            "graph_harvesting",
            "curriculum_learning",
            "progressive_layer_drop",
        )
    },
}


def take_refused(tree: dict) -> tuple[dict, list[Problem]]:
    """`tree` without the refused keys, and a problem for each of them that is not switched off."""
    problems: list[Problem] = []
    return _without(tree, "", problems), problems


def _without(tree: dict, prefix: str, problems: list[Problem]) -> dict:
    kept = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        refusal = REFUSED.get(path)
        if refusal is None:
            kept[key] = _without(value, f"{path}.", problems) if isinstance(value, dict) else value
        elif not _is_off(value, refusal):
            off = ", ".join(show(item) for item in refusal.harmless)
            if isinstance(value, dict) and "enabled" in value:
                path, value = f"{path}.enabled", value["enabled"]
            problems.append(Problem(path, refusal.reason, value, f"{off}, or leave it out"))
    return kept


def _is_off(value: Any, refusal: Refusal) -> bool:
    if isinstance(value, dict):
        return value.get("enabled") is False or all(_is_off(item, refusal) for item in value.values())
    return value is None or value in refusal.harmless
