"""Trains what a recipe says, the way a DeepSpeed JSON says; started by the `deepspeed` launcher.

deepspeed [--hostfile F] recipes/pretrain.py --recipe R [--deepspeed_config J] [section.key=value ...]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

from cpmoe.config.resolve import RunConfig, load_run
from cpmoe.data.store import PreparedData

GRACE_SECONDS = 10.0
# What gloo says where the process at the other end is gone.
LOST_RANK = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def main() -> int:
    arguments = parse_arguments()
    rank, world_size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world_size is None:
        print(f"start this with the launcher: deepspeed {' '.join(sys.argv)}", file=sys.stderr)
        return 2
    if rank == "0":
        print(f"starting {world_size} processes", flush=True)
    try:
        run = load_run(arguments.recipe, arguments.deepspeed_config, arguments.overrides, int(world_size))
        run, prepared = prepare_data(run)
    except (ValueError, OSError) as error:
        tell(error, int(rank))
        return 2
    return train(run, prepared)


def tell(error: Exception, rank: int) -> None:
    """Prints `error` once: where rank 0 has it as well, no other rank returns from its wait."""
    if rank:
        wait_for_rank_0()
    print(f"rank {rank}: {error}" if rank else error, file=sys.stderr, flush=True)


def wait_for_rank_0() -> None:
    """Lets rank 0 speak first: the launcher ends every rank within a second of the first that leaves."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(GRACE_SECONDS)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", required=True, help="YAML: what is trained")
    parser.add_argument("--deepspeed_config", help="DeepSpeed JSON with a cpmoe block: how it runs")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # the launcher appends it
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="change one setting")
    return parser.parse_intermixed_args()


def prepare_data(run: RunConfig) -> tuple[RunConfig, PreparedData]:
    """Opens the recipe's data, tokenised first where it is not; fills in the vocabulary size."""
    from cpmoe.data.prepare import prepare
    from cpmoe.data.readiness import fit_vocabulary
    from cpmoe.data.store import open_prepared

    prepared = open_prepared(prepare(run.recipe.data))
    vocab_size = prepared.meta.vocab_size
    model = fit_vocabulary(run.recipe.model, vocab_size, f"the tokenizer in {prepared.path}")
    recipe = run.recipe.model_copy(update={"model": model})
    return dataclasses.replace(run, recipe=recipe), prepared


def train(run: RunConfig, prepared: PreparedData) -> int:
    import torch.distributed as dist

    from cpmoe.training.engine import init_distributed
    from cpmoe.training.guard import NonFiniteError
    from cpmoe.training.hang import whereabouts
    from cpmoe.training.trainer import Trainer

    start = time.perf_counter()
    try:
        device = init_distributed(run.recipe.train.hang_timeout)
    except OSError as error:
        tell(error, int(os.environ["RANK"]))
        return 1
    leads = dist.get_rank() == 0
    if leads:
        print(run.batch.describe(), flush=True)
    try:
        trainer = Trainer(run, prepared, device)
        first = trainer.step
        trainer.train()
        if leads:
            report(run, prepared, (first, trainer.step), time.perf_counter() - start)
    except (ValueError, OSError, NonFiniteError) as error:
        tell(error, dist.get_rank())
        return 1
    except RuntimeError as error:
        if not any(words in str(error) for words in LOST_RANK):
            raise
        told = "lost another rank, which was killed or says itself why it ended; the same command continues"
        told += f" from the last checkpoint in {run.recipe.train.out_dir}; it was lost {whereabouts()}"
        tell(RuntimeError(told), dist.get_rank())
        return 1
    dist.destroy_process_group()
    return 0


def report(run: RunConfig, prepared: PreparedData, span: tuple[int, int], seconds: float) -> None:
    """Says how the steps of `span` went, where everything is, and what to try next."""
    from cpmoe.data.baseline import MAX_VOCABULARY, bigram_loss
    from cpmoe.data.packing import HeldoutDataset
    from cpmoe.training.metrics import format_seconds
    from cpmoe.training.run_folder import draw_loss_curve, read_metrics

    folder = Path(run.recipe.train.out_dir)
    _, evaluations = read_metrics(folder)
    baseline = None
    if evaluations and prepared.meta.vocab_size <= MAX_VOCABULARY:
        data, train_config = run.recipe.data, run.recipe.train
        heldout = HeldoutDataset(prepared.documents("heldout"), data.seq_len, train_config.eval_sequences)
        baseline = bigram_loss(prepared.documents("train"), heldout)
    curve = draw_loss_curve(folder, baseline)
    steps, (first, step) = run.recipe.train.steps, span
    if first >= steps:
        print(f"\nalready at step {step} of {steps}: a larger train.steps or a new train.out_dir trains on")
    elif step < steps:
        print(f"\nstopped at step {step} of {steps}; the same command continues with train.out_dir={folder}")
    else:
        print(f"\ndone in {format_seconds(seconds)}")
    if evaluations:
        last = max(evaluations)
        print(f"  held-out loss   {evaluations[last]['loss']:.4f} nats per token at step {last}")
    if baseline is not None:
        print(f"  bigram model    {baseline:.4f} nats per token on the same held-out text")
    print(f"  loss curve      {curve}")
    print(f"  checkpoints     {folder / 'checkpoints'}")
    # The folder of all runs: TensorBoard then shows them by their names, beside each other.
    print(f"  TensorBoard     tensorboard --logdir {folder.parent}")
    print(f"  every number    {folder / 'metrics.jsonl'}", flush=True)
    if run.cpmoe.context_parallel_size > 1 and step >= steps:
        print(
            "try next: another layout computes the same loss. Change context_parallel_size or "
            "expert_parallel_size in the JSON,\n"
            "  or add to the command: cpmoe.context_parallel_size=1 train.out_dir=runs/cp1\n"
            f"  then: python -m cpmoe compare {folder} runs/cp1 --steps 20",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
