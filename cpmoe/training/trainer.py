"""The training loop: data to shards, micro-steps to a step, and what is watched and saved on the way."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cpmoe.attention.sharding import IGNORED_LABEL, SequenceShard
from cpmoe.attention.slicing import shard_slices
from cpmoe.checkpoint.local import find_checkpoints, load_checkpoint, save_checkpoint, step_of
from cpmoe.config.resolve import RunConfig
from cpmoe.coschedule.trace import PhaseTrace
from cpmoe.data.loader import BatchStream, SequenceBatch, heldout_batches
from cpmoe.data.packing import HeldoutDataset, PackedDataset
from cpmoe.data.store import PreparedData
from cpmoe.model.flops import flops_per_token
from cpmoe.model.masks import attention_masks
from cpmoe.model.transformer import LossScale, ModelOutput
from cpmoe.moe.balance import max_over_mean_load
from cpmoe.parallel.agreement import fail_together
from cpmoe.parallel.comm_clock import comm_clock
from cpmoe.parallel.progress import progress
from cpmoe.training.console import say
from cpmoe.training.engine import TrainingEngine, build_groups, build_model
from cpmoe.training.evaluation import evaluate
from cpmoe.training.guard import GradientWatch, NonFiniteError, first_bad_in_forward
from cpmoe.training.hang import HangWatch
from cpmoe.training.metrics import MetricsWriter, StepMetrics, device_memory, peak_flops
from cpmoe.training.policy import StepPolicies
from cpmoe.training.run_folder import claim_folder, write_run_files
from cpmoe.training.stop import StopRequest
from cpmoe.training.tracing import gather_trace, start_trace, write_trace


class Trainer:
    """One training run of this rank. All ranks construct it and call `train` together."""

    def __init__(self, run: RunConfig, prepared: PreparedData, device: torch.device) -> None:
        self.run = run
        self.device = device
        self.recipe = run.recipe
        self.folder = Path(run.recipe.train.out_dir)
        self.groups = build_groups(run)
        self.rank = self.groups.rank
        with fail_together(ValueError):
            self.lock = claim_folder(self.folder) if self.rank == 0 else None
        self.engine = TrainingEngine(run, build_model(run, self.groups), self.groups)
        self.watch = GradientWatch(self.engine.model)
        self._build_data(prepared)
        self.step = 0
        self.tokens_seen = 0
        self.stop_request: StopRequest | None = None
        self.stopping = False  # agreed on by all ranks
        self.resume()
        self.policies = StepPolicies(run, self.groups, self.folder, device)
        with fail_together(ValueError):
            self.writer = self._build_writer()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def layout(self) -> dict[str, Any]:
        """What a checkpoint shares with the run that loads it."""
        grid = self.groups.grid
        return {
            "world_size": grid.world_size,
            "context_parallel_size": grid.context_parallel_size,
            "expert_parallel_size": grid.expert_parallel_size,
            "rank_order": list(grid.rank_order),
            "zero_stage": self.run.zero_stage,
            "dtype": self.run.dtype,
            "optimizer": self.recipe.optim.name,
            "model": self.recipe.model.model_dump(mode="json"),
        }

    def train(self) -> None:
        """Runs to the last step, or to the end of the step in which SIGTERM or SIGINT arrives.

        Evaluates and saves as the recipe says, and at the end. Raises NonFiniteError before a
        non-finite loss or gradient can reach the weights.
        """
        config = self.recipe.train
        self.stop_request = StopRequest(speaks=self.rank == 0)
        if self.writer is not None and self.step < config.steps:
            self.writer.explain()
        with HangWatch(config.hang_timeout, self.folder, self.rank):
            while self.step < config.steps and not self.stopping:
                self._one_step()
                last = self.step == config.steps
                if config.eval_sequences and (last or _due(self.step, config.eval_every)):
                    self.evaluate()
                if last or self.stopping or _due(self.step, config.save_every):
                    self.save()
            progress.begin("")
        self.stream.close()
        if self.writer is not None:
            self.writer.close()
        if self.lock is not None:
            self.lock.release()

    def evaluate(self) -> float:
        """The held-out loss in nats per token; collective."""
        progress.begin("evaluation")
        loss, by_position = evaluate(self.engine, self.heldout, self.recipe.data.seq_len, self.groups)
        if self.writer is not None:
            self.writer.evaluation(self.step, loss, by_position)
        return loss

    def save(self) -> None:
        """Writes a checkpoint of this step; collective."""
        progress.begin("")  # a disk may be slow
        state = {
            "engine": self.engine.state_dict(),
            "data": self.stream.state_dict(),
            "step": self.step,
            "tokens_seen": self.tokens_seen,
            "rng": torch.get_rng_state(),
        }
        folder = save_checkpoint(
            self.checkpoints, self.step, state, self.layout, self.recipe.train.keep_checkpoints
        )
        if self.rank == 0:
            say(f"step {self.step}/{self.recipe.train.steps}  checkpoint {folder}")

    def resume(self) -> None:
        """Continues from the checkpoint that `train.resume` names, if there is one; collective.

        Raises ValueError where it does not fit this run, and where `train.out_dir` holds checkpoints of
        later steps: a run that counts from before them would be taken for their continuation.
        """
        folder = self._checkpoint_to_load()
        with fail_together(ValueError):
            if folder is not None:
                state = load_checkpoint(folder, self.layout)
                self.engine.load_state_dict(state["engine"])
                self.stream.load_state_dict(state["data"])
                self.step = state["step"]
                self.tokens_seen = state["tokens_seen"]
                torch.set_rng_state(state["rng"])
            self._refuse_later_checkpoints()
        if folder is not None and self.rank == 0:
            say(f"continues from {folder} at step {self.step}")

    def _checkpoint_to_load(self) -> Path | None:
        wanted = self.recipe.train.resume
        if wanted != "auto":
            return None if wanted == "never" else Path(wanted)
        # One rank looks: with a folder that not all of them see, some would start anew.
        found = find_checkpoints(self.checkpoints) if self.rank == 0 else []
        newest: list[Path | None] = [found[-1] if found else None]
        dist.broadcast_object_list(newest, src=0)
        return newest[0]

    def _refuse_later_checkpoints(self) -> None:
        later = [path.name for path in find_checkpoints(self.checkpoints) if step_of(path) > self.step]
        if later:
            raise ValueError(
                f"train.resume = {self.recipe.train.resume!r}: starts at step {self.step}, and train.out_dir "
                f"= {str(self.folder)!r} holds checkpoints of later steps ({', '.join(later)}); choose "
                "another train.out_dir, or move them away"
            )

    def _build_data(self, prepared: PreparedData) -> None:
        data, batch = self.recipe.data, self.run.batch
        grid = self.groups.grid
        dp_rank = grid.data_rank(self.rank)
        self.stream = BatchStream(
            PackedDataset(prepared.documents("train"), data.seq_len, data.seed),
            dp_rank,
            grid.data_parallel_size,
            batch.micro_batch_size,
            batch.gradient_accumulation_steps,
        )
        self.heldout: list[SequenceShard] = []
        if self.recipe.train.eval_sequences:
            heldout = HeldoutDataset(
                prepared.documents("heldout"), data.seq_len, self.recipe.train.eval_sequences
            )
            batches = heldout_batches(heldout, dp_rank, grid.data_parallel_size, batch.micro_batch_size)
            self.heldout = [self._shards(b, "none")[0] for b in batches]

    def _build_writer(self) -> MetricsWriter | None:
        if self.rank != 0:
            return None
        # Not before: a run that is refused leaves the record of the one that trained here.
        write_run_files(self.folder, self.run)
        monitor = self.engine.deepspeed.monitor
        if not self.run.deepspeed.get("wall_clock_breakdown"):
            # Else the engine adds the learning rate by its own count of samples; ours are written still.
            monitor.enabled = False
        return MetricsWriter(
            self.folder,
            monitor,
            self.groups.grid.world_size,
            self.recipe.train.steps,
            peak_flops(self.device),
        )

    def _shards(self, batch: SequenceBatch, slicing: str) -> tuple[SequenceShard, ...]:
        grid = self.groups.grid
        shards = shard_slices(
            *batch[:4],
            grid.context_parallel_size,
            grid.context_rank(self.rank),
            self.run.cpmoe.attention.layout,
            slicing,
            attention_masks(self.recipe.model),
            grid.ulysses_size,
            batch.sequences_B,
        )
        return shards if self.device.type == "cpu" else tuple(map(self._moved, shards))

    def _moved(self, shard: SequenceShard) -> SequenceShard:
        moved: dict[str, Any] = {
            field.name: value.to(self.device, non_blocking=True)
            for field in dataclasses.fields(shard)
            if isinstance(value := getattr(shard, field.name), torch.Tensor)
        }
        return dataclasses.replace(shard, **moved)

    def _one_step(self) -> None:
        progress.step = self.step + 1
        progress.begin("data")
        comm_clock.take()
        start = time.perf_counter()
        batches = self.stream.next_step()
        is_traced = self.step + 1 in self.recipe.train.trace_steps
        with self.policies.step(self.step + 1, counts=not is_traced) as (policy, slicing):
            micro_batches = [self._shards(batch, slicing) for batch in batches]
            data_seconds = time.perf_counter() - start
            scale = self._loss_scale(micro_batches)
            lr = self.engine.lr
            trace = start_trace(self.device) if is_traced else None
            outputs = [self.engine.micro_step(slices, scale, trace) for slices in micro_batches]
            sums = self._reduce(outputs, scale)
            self._check_finite(sums, micro_batches, scale)
            grad_norm = self.engine.step()
        progress.begin("metrics")
        self.watch.clear()
        self.step += 1
        self.tokens_seen += scale.num_tokens
        self.stopping = sums["stop"] > 0
        comm_exposed_seconds = comm_clock.take()
        seconds = time.perf_counter() - start
        if trace is not None:
            self._write_trace(trace, f"step {self.step}, policy {policy}, slices {slicing}")
        if self.writer is None:
            return
        counts_LE = torch.stack([output.counts_LE for output in outputs]).sum(0)
        num_layers = max(counts_LE.shape[0], 1)
        memory, memory_total = device_memory(self.device)
        flops = flops_per_token(self.recipe.model, self.recipe.data.seq_len) * scale.num_tokens
        metrics = StepMetrics(
            step=self.step,
            loss=sums["cross_entropy"] / max(scale.num_label_tokens, 1),
            aux_loss=sums["aux_loss"] / scale.num_micro_steps / num_layers,
            z_loss=sums["z_loss"] / max(scale.num_tokens, 1) / num_layers,
            grad_norm=grad_norm,
            lr=lr,
            tokens=scale.num_tokens,
            tokens_seen=self.tokens_seen,
            seconds=seconds,
            data_seconds=data_seconds,
            comm_exposed_seconds=comm_exposed_seconds,
            memory=memory,
            memory_total=memory_total,
            load_max_over_mean=tuple(max_over_mean_load(counts_LE).tolist()),
            first_sparse_layer=self.recipe.model.first_k_dense_replace,
            # Dispatch is dropless; the number is logged because users look for it.
            dropped_tokens=0,
            flops_per_second=flops / seconds,
        )
        every = self.recipe.train.log_every
        self.writer.step(metrics, show=self.step % every == 0 or self.step in (1, self.recipe.train.steps))

    def _write_trace(self, trace: PhaseTrace, title: str) -> None:
        ranks = gather_trace(trace)
        if self.writer is not None:
            self.writer.trace(self.step, write_trace(self.folder, self.step, ranks, title))

    def _loss_scale(self, micro_batches: list[tuple[SequenceShard, ...]]) -> LossScale:
        """Label and token counts of the step over all ranks."""
        shards = [shard for slices in micro_batches for shard in slices]
        progress.begin("counts of labels and tokens")
        labelled = [(s.labels_BT != IGNORED_LABEL).sum() for s in shards]
        real = [(s.documents_BT >= 0).sum() for s in shards]
        counts = torch.stack([torch.stack(labelled).sum(), torch.stack(real).sum()])
        if self.groups.world is not None:
            dist.all_reduce(counts, group=self.groups.world)
        labels, tokens = counts.tolist()
        return LossScale(labels, tokens, len(micro_batches))

    def _reduce(self, outputs: list[ModelOutput], scale: LossScale) -> dict[str, float]:
        """Sums over micro-steps and ranks, and how many ranks saw a bad gradient or were asked to stop."""
        progress.begin("sums of losses")
        names = ("cross_entropy", "aux_loss", "z_loss")
        rows = [sum(getattr(o, name).double() for o in outputs) for name in names]
        rows.append((~self.watch.all_finite()).to(rows[0]))
        asked = self.stop_request is not None and self.stop_request.given()
        rows.append(torch.full_like(rows[0], asked))
        sums = torch.stack(rows)
        if self.groups.world is not None:
            dist.all_reduce(sums, group=self.groups.world)
        return dict(zip((*names, "bad_gradients", "stop"), sums.tolist(), strict=True))

    def _check_finite(
        self, sums: dict[str, float], micro_batches: list[tuple[SequenceShard, ...]], scale: LossScale
    ) -> None:
        finite_loss = all(math.isfinite(sums[name]) for name in ("cross_entropy", "aux_loss", "z_loss"))
        if finite_loss and not sums["bad_gradients"]:
            return
        if finite_loss:
            what, name = "gradient", self.watch.first_bad()
        else:
            what = "loss"
            name = self._first_bad_in_forward(micro_batches, scale)
        names: list[str | None] = [None] * self.groups.grid.world_size
        dist.all_gather_object(names, name)
        where = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names) if name)
        raise NonFiniteError(
            f"step {self.step + 1}: the {what} is not finite; first bad tensor on {where or 'no rank'}. "
            "The weights were not updated and no checkpoint was written or changed"
        )

    def _first_bad_in_forward(
        self, micro_batches: list[tuple[SequenceShard, ...]], scale: LossScale
    ) -> str | None:
        def forward() -> None:
            for slices in micro_batches:
                self.engine.deepspeed(slices, scale)

        return first_bad_in_forward(self.engine.model, forward)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
