"""A DeepSpeed engine around the model, with gradients that are those of one process.

CP x DP is DeepSpeed's data-parallel world. It averages every gradient over these N ranks, dense and
expert, in every ZeRO stage; so the loss, which is a sum over ranks, is multiplied by N and by nothing
else.
"""

from __future__ import annotations

import copy
import datetime
import os
import warnings
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import set_z3_leaf_modules
from torch import nn

from cpmoe.attention.sharding import SequenceShard
from cpmoe.config.resolve import RunConfig
from cpmoe.coschedule.schedule import Schedule
from cpmoe.coschedule.trace import PhaseTrace
from cpmoe.coschedule.verify import verify_ranks
from cpmoe.model.block import DecoderBlock
from cpmoe.model.options import ModelOptions
from cpmoe.model.transformer import (
    CausalLM,
    LossScale,
    ModelOutput,
    init_weights,
    is_expert,
)
from cpmoe.parallel.grid import RankGrid
from cpmoe.parallel.groups import Groups, create_groups
from cpmoe.parallel.progress import progress
from cpmoe.training.hooks import check_private_hooks, skip_shared_memory_op, tag_experts
from cpmoe.training.optimizer import RecipeSchedule, build_optimizer, parameter_groups

# DeepSpeed adds this to the norm before it divides; so does the clipping of stage 0 below.
CLIP_EPS = 1e-6

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def init_distributed(hang_timeout: float = 0.0) -> torch.device:
    """Joins the run that the launcher started and returns this rank's device.

    NCCL on CUDA, gloo on CPU. Rank and address come from the launcher's environment variables. Collectives
    fail by themselves only long after `hang_timeout` seconds. Raises OSError where the run's port is taken.
    """
    skip_shared_memory_op()
    # DeepSpeed's own calls; nothing that the reader of a run could change.
    warnings.filterwarnings("ignore", message=".*(all_gather_into_tensor|reduce_scatter_tensor).*deprecated")
    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        deepspeed.init_distributed(
            dist_backend="nccl" if cuda else "gloo",
            auto_mpi_discovery=False,
            verbose=False,
            timeout=_collective_timeout(hang_timeout),
        )
    except torch.distributed.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise OSError(
            f"port {port} is taken, perhaps by another run: give the launcher another one, "
            f"deepspeed --master_port {int(port) + 1} ..."
        ) from None
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def build_grid(run: RunConfig) -> RankGrid:
    """The rank grid that the JSON's "cpmoe" block describes, over the ranks of the run."""
    return RankGrid(
        world_size=run.batch.world_size,
        context_parallel_size=run.cpmoe.context_parallel_size,
        expert_parallel_size=run.cpmoe.expert_parallel_size,
        rank_order=tuple(run.cpmoe.rank_order),
        ulysses_size=run.cpmoe.attention.ulysses_size,
        ranks_per_node=run.cpmoe.experts.ranks_per_node,
    )


def build_groups(run: RunConfig) -> Groups:
    """Creates the run's process groups; collective."""
    timeout = _collective_timeout(run.recipe.train.hang_timeout)
    return create_groups(build_grid(run), run.cpmoe.communication.options(), timeout)


def _collective_timeout(hang_timeout: float) -> datetime.timedelta:
    """When torch's own, less telling, end of a collective comes: after that of `HangWatch`."""
    return max(datetime.timedelta(minutes=10), datetime.timedelta(seconds=2 * hang_timeout))


def build_model(run: RunConfig, groups: Groups) -> CausalLM:
    """The model of this rank with its initial weights, in float32 on the CPU."""
    recipe = run.recipe
    model = CausalLM(
        recipe.model,
        groups,
        ModelOptions(
            attention_strategy=run.cpmoe.attention.strategy,
            attention_backend=run.cpmoe.attention.backend,
            attention_dkv_dtype=run.cpmoe.attention.dkv_dtype,
            experts=run.cpmoe.experts,
            # Of one slice the schedule is serial in any case.
            coschedule_policy="serial" if run.policy == "serial" else "overlap",
            recompute=recipe.train.recompute,
            loss_chunk_tokens=recipe.train.loss_chunk_tokens,
            seed=recipe.train.seed,
        ),
    )
    init_weights(model, recipe.train.seed)
    return model


class TrainingEngine:
    """A `deepspeed.DeepSpeedEngine` with exact loss scale, gradient norm and clipping.

    One optimizer step is G calls of `micro_step`, then one of `step`. All ranks call both alike.
    """

    def __init__(self, run: RunConfig, model: CausalLM, groups: Groups) -> None:
        check_private_hooks()
        skip_shared_memory_op()
        _verify_schedules(model)
        self.run = run
        self.groups = groups
        self.zero_stage = run.zero_stage
        self.micro_steps_left = self.accumulation = run.batch.gradient_accumulation_steps
        sparse = any(is_expert(name) for name, _ in model.named_parameters())
        split = sparse and groups.grid.expert_parallel_size > 1
        if split:
            tag_experts(model, groups.grid, run.recipe.model.num_experts, run.zero_stage)
        if run.zero_stage == 3:
            set_z3_leaf_modules(model, [DecoderBlock])
        parameters = parameter_groups(model, run.recipe.optim.weight_decay)
        if split and run.zero_stage < 3:
            parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
        # A copy: DeepSpeed writes into it.
        config = copy.deepcopy(run.deepspeed)
        schedule = None
        if "scheduler" not in config:
            schedule = lambda optimizer: RecipeSchedule(  # noqa: E731
                run.recipe.optim, run.recipe.train.steps, optimizer
            )
        self.deepspeed, self.optimizer, _, self.lr_scheduler = deepspeed.initialize(
            model=model,
            optimizer=build_optimizer(run.recipe.optim, parameters),
            lr_scheduler=schedule,
            config=config,
            mpu=None,
            dist_init_required=False,
        )
        if run.zero_stage == 0 and run.dtype == "bfloat16":
            self._forget_first_step()

    @property
    def model(self) -> CausalLM:
        return self.deepspeed.module

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self.deepspeed.get_lr()[0]

    def micro_step(
        self, slices: Sequence[SequenceShard], scale: LossScale, trace: PhaseTrace | None = None
    ) -> ModelOutput:
        """Forward and backward of one micro-batch; gradients are reduced in the last of a step."""
        progress.begin("forward")
        self.model.model.observer = trace
        if trace is not None:
            trace.watch_forward()
        output: ModelOutput = self.deepspeed(slices, scale)
        self.model.model.observer = None
        if trace is not None:
            trace.watch_backward(output.loss)
        progress.begin("backward")
        self.deepspeed.backward(output.loss * self.groups.grid.world_size, scale_wrt_gas=False)
        if trace is not None:
            trace.end()
        self.micro_steps_left -= 1
        if self.micro_steps_left:
            self.deepspeed.step()
        return output._replace(loss=output.loss.detach())

    def step(self) -> float:
        """Clips, updates and clears the gradients; returns their norm before clipping, equal on all ranks."""
        assert self.micro_steps_left == 0, "a step follows all its micro-steps"
        progress.begin("clipping and update")
        self.micro_steps_left = self.accumulation
        if self.zero_stage > 0:
            self.deepspeed.step()
            norm = self.deepspeed.get_global_grad_norm()
            assert norm is not None, "every ZeRO stage computes the norm"
            return float(norm)
        # DeepSpeed's own clipping at stage 0 takes each rank's experts for the whole.
        norm = self._gradient_norm()
        clip = self.run.gradient_clipping
        if clip and norm + CLIP_EPS > clip:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(clip / (norm + CLIP_EPS))
        self.deepspeed.step()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """What this rank holds: parameters, float32 masters, moments, schedule. For the same layout only.

        Tensors are the live ones; save them before the next step.
        """
        engine = self.deepspeed
        base = engine.basic_optimizer
        return {
            "parameters": [_held(p).data for p in self.model.parameters()],
            "masters": [master.data for master in self._masters()],
            "moments": [dict(base.state.get(master, {})) for master in self._masters()],
            "learning_rates": [group["lr"] for group in base.param_groups],
            "schedule": self.lr_scheduler.state_dict(),
            "counters": {name: getattr(engine, name) for name in COUNTERS},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Puts back what `state_dict` of the same layout returned, to the bit.

        Raises ValueError where ZeRO cuts the optimizer's tensors otherwise than it did then.
        """
        base = self.deepspeed.basic_optimizer
        cuts, saved_cuts = (
            [tuple(master.shape) for master in masters] for masters in (self._masters(), state["masters"])
        )
        if cuts != saved_cuts:
            raise ValueError(
                f"train.resume: the optimizer's tensors were saved in shapes {saved_cuts}, now they have "
                f"{cuts}; the JSON's zero_optimization must be as it was (sub_group_size at stage 3)"
            )
        with torch.no_grad():
            for parameter, saved in zip(self.model.parameters(), state["parameters"], strict=True):
                _held(parameter).data.copy_(saved)
            for master, saved in zip(self._masters(), state["masters"], strict=True):
                master.data.copy_(saved)
        for master, moments in zip(self._masters(), state["moments"], strict=True):
            base.state[master] = {
                key: value.to(master.device) if torch.is_tensor(value) else value
                for key, value in moments.items()
            }
        for group, lr in zip(base.param_groups, state["learning_rates"], strict=True):
            group["lr"] = lr
        # A schedule of the recipe sets the rates anew; one of the JSON does not.
        self.lr_scheduler.load_state_dict(state["schedule"])
        for name, value in state["counters"].items():
            setattr(self.deepspeed, name, value)

    def _masters(self) -> list[torch.Tensor]:
        """The tensors that the optimizer updates, in a fixed order: flat partitions under ZeRO."""
        if self.zero_stage == 3:
            return self.optimizer.fp32_partitioned_groups_flat
        return [p for group in self.deepspeed.basic_optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def _forget_first_step(self) -> None:
        """Undoes the step with gradients of 0 that DeepSpeed makes while it builds this stage's optimizer.

        It counts for Adam's bias correction (the first real update would be 0.73 of its size), fills
        momentum with weight decay, and decays the masters once.
        """
        self.deepspeed.basic_optimizer.state.clear()
        for masters, parameters in zip(self.optimizer.fp32_groups, self.optimizer.fp16_groups, strict=True):
            for master, parameter in zip(masters, parameters, strict=True):
                master.copy_(parameter)

    def _gradient_norm(self) -> float:
        """Stage 0: the dense gradients once and the experts of one whole expert group."""
        dense, experts = (
            sum(
                (
                    torch.linalg.vector_norm(p.grad, dtype=torch.float64).square()
                    for p in parameters
                    if p.grad is not None
                ),
                start=torch.zeros((), dtype=torch.float64, device=self.deepspeed.device),
            )
            for parameters in self._split_parameters()
        )
        if self.groups.expert is not None:
            dist.all_reduce(experts, group=self.groups.expert)
        return float((dense + experts).sqrt())

    def _split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        dense: list[nn.Parameter] = []
        experts: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            (experts if is_expert(name) else dense).append(parameter)
        return dense, experts


def _verify_schedules(model: CausalLM) -> None:
    """Raises ScheduleError where ranks would issue their collectives in different orders; collective."""
    mine = [model.model.schedule(num_slices) for num_slices in (1, 2)]
    by_rank: list[list[Schedule]] = [mine] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    for schedules in zip(*by_rank, strict=True):
        verify_ranks(schedules)


def _held(parameter: nn.Parameter) -> torch.Tensor:
    """The part of a parameter that this rank keeps: all of it, or its ZeRO-3 partition."""
    return getattr(parameter, "ds_tensor", parameter)
