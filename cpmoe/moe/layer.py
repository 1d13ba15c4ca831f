"""The mixture-of-experts layer: phases that a scheduler can interleave, and `forward` that runs them.

Shape letters: B batch, T local tokens, M model dim, E global experts, K top-k, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpmoe.config.deepspeed import ExpertsConfig
from cpmoe.config.recipe import ModelConfig
from cpmoe.moe.allgather import AllGather
from cpmoe.moe.alltoall import AllToAll
from cpmoe.moe.dedup import Dedup
from cpmoe.moe.experts import Experts
from cpmoe.moe.replay import RoutingReplay
from cpmoe.moe.rounds import Budget
from cpmoe.moe.router import Router, count_rows
from cpmoe.moe.transit import Choices, Dispatcher, Transit
from cpmoe.parallel.groups import Groups


class MoEStats(NamedTuple):
    """Sums over this rank's real tokens, for the losses and the log; the caller sums them over ranks.

    probs_sum_E  float32 (float64 in a float64 model) [E], with gradient: router probabilities
    zsum         scalar of the same type, with gradient: squared logsumexp of the router's logits
    counts_E     int64 [E], no gradient: rows routed to each global expert
    """

    probs_sum_E: Tensor
    zsum: Tensor
    counts_E: Tensor


@dataclass
class MoEState:
    """One call of a layer (of one slice) between its phases."""

    x_TM: Tensor
    shape: torch.Size
    stats: MoEStats
    transit: Transit
    shared_TM: Tensor | None = None


class SharedExpert(nn.Module):
    """The SwiGLU that every token passes (DeepSeek-MoE; Dai et al., 2024)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x_TM: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_TM)) * self.up_proj(x_TM))


def _dispatcher(options: ExpertsConfig, groups: Groups, num_experts: int) -> Dispatcher:
    dispatcher = in_rounds = _unbounded(options, groups, num_experts)
    if options.max_rows_per_rank is None:
        return dispatcher
    if isinstance(dispatcher, AllGather):
        # Every rank's tokens would travel again in every round.
        in_rounds = AllToAll(groups, num_experts)
    grid = groups.grid
    return Budget(
        dispatcher, in_rounds, grid.expert_parallel_size, grid.expert_nodes, options.max_rows_per_rank
    )


def _unbounded(options: ExpertsConfig, groups: Groups, num_experts: int) -> Dispatcher:
    if options.dispatcher == "alltoall" or groups.expert is None:
        return AllToAll(groups, num_experts)
    if options.dispatcher == "allgather":
        return AllGather(groups, num_experts)
    return Dedup(groups, num_experts)


class MoELayer(nn.Module):
    """Top-k mixture of experts, experts split over `groups.expert`.

    Rank r holds the experts expert_rank(r) · E/EP to (expert_rank(r) + 1) · E/EP - 1. Rows travel on
    `groups.expert`, counts on `groups.meta`; all ranks of both call the layer together, also with no
    token at all. The balance losses are not computed here: see `MoEStats` and balance.py.

    Raises ValueError where the expert-parallel degree does not divide the experts, and for the backend as
    `Experts` does.
    """

    def __init__(self, config: ModelConfig, groups: Groups, options: ExpertsConfig | None = None) -> None:
        super().__init__()
        options = options or ExpertsConfig()
        degree = groups.grid.expert_parallel_size
        if config.num_experts % degree:
            raise ValueError(
                f"cpmoe.expert_parallel_size = {degree}: must divide model.num_experts {config.num_experts}"
            )
        local = config.num_experts // degree
        self.router = Router(
            config.hidden_size, config.num_experts, config.num_experts_per_tok, config.norm_topk_prob
        )
        self.experts = Experts(
            local,
            groups.grid.expert_rank(groups.rank) * local,
            config.hidden_size,
            config.moe_intermediate_size,
            config.initializer_range,
            options.backend,
        )
        self.shared_expert = (
            SharedExpert(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )
        self.num_experts = config.num_experts
        self.dispatcher = _dispatcher(options, groups, config.num_experts)

    def forward(
        self, x_BTM: Tensor, mask_BT: Tensor | None = None, replay: RoutingReplay | None = None
    ) -> tuple[Tensor, MoEStats]:
        """x_BTM [B, T, M]; mask_BT bool [B, T] is False at padding, which is not routed (None: none)."""
        state = self.route(x_BTM, mask_BT, replay)
        for phase in (
            self.dispatch_start,
            self.run_shared_expert,
            self.dispatch_wait,
            self.run_experts,
            self.combine_start,
            self.combine_wait,
        ):
            phase(state)
        return self.finish(state), state.stats

    def route(self, x_BTM: Tensor, mask_BT: Tensor | None, replay: RoutingReplay | None) -> MoEState:
        """Chooses experts, and starts telling the ranks of `groups.meta` how many rows come.

        A replayed call knows that already. `forward` documents the arguments.
        """
        x_TM = x_BTM.flatten(0, 1)
        routing = self.router(x_TM, None if mask_BT is None else mask_BT.flatten(), replay)
        stats = MoEStats(
            probs_sum_E=routing.probs_TE.sum(0),
            zsum=routing.logsumexp_T.square().sum(),
            counts_E=count_rows(routing.indices_TK, self.num_experts),
        )
        choices = Choices(routing.indices_TK, routing.weights_TK, stats.counts_E)
        transit = self.dispatcher.begin(x_TM, choices, replay)
        return MoEState(x_TM, x_BTM.shape, stats, transit)

    def dispatch_start(self, state: MoEState) -> None:
        """Launches the tokens on their way to the experts."""
        state.transit.dispatch_start()

    def run_shared_expert(self, state: MoEState) -> None:
        """The shared expert, if there is one: needs nothing of other ranks, so it hides a transfer."""
        if self.shared_expert is not None:
            state.shared_TM = self.shared_expert(state.x_TM)

    def dispatch_wait(self, state: MoEState) -> None:
        """Waits for the rows of this rank's experts."""
        state.transit.dispatch_wait()

    def run_experts(self, state: MoEState) -> None:
        """The experts of this rank on the rows that came."""
        state.transit.run_experts(self.experts)

    def combine_start(self, state: MoEState) -> None:
        """Launches what the experts computed on its way back."""
        state.transit.combine_start()

    def combine_wait(self, state: MoEState) -> None:
        """Waits for what belongs to this rank's tokens."""
        state.transit.combine_wait()

    def finish(self, state: MoEState) -> Tensor:
        """Each token's weighted sum over its experts, and the shared expert: [B, T, M]."""
        y_TM = state.transit.finish()
        if state.shared_TM is not None:
            y_TM = y_TM + state.shared_TM
        return y_TM.view(state.shape)
