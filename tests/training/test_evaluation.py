"""Held-out loss over ranks against the same model on one process, in whole and by position."""

import torch

from tests.distributed import run_distributed
from tests.training.support import tiny_run, write_text


def _evaluate(rank: int, world_size: int, root, cp: int):
    from cpmoe.data.prepare import prepare
    from cpmoe.data.store import open_prepared
    from cpmoe.training.engine import init_distributed
    from cpmoe.training.trainer import Trainer

    own = root / f"rank{rank}"
    own.mkdir(parents=True, exist_ok=True)
    write_text(own)
    degrees = {"cpmoe": {"context_parallel_size": cp, "expert_parallel_size": world_size}}
    run = tiny_run(own, world_size, (f"train.out_dir={root}/run", "train.eval_sequences=5"), degrees)
    trainer = Trainer(run, open_prepared(prepare(run.recipe.data)), init_distributed())
    loss = trainer.evaluate()
    trainer.stream.close()
    tokens = [shard.tokens_BT.numel() for shard in trainer.heldout]
    return loss, trainer.engine.deepspeed.module.training, tokens


def test_every_layout_evaluates_the_same_sequences_once(tmp_path):
    alone, training, _ = run_distributed(_evaluate, 1, tmp_path / "one", 1)[0]
    assert training, "evaluation leaves the model in training mode"
    record = (tmp_path / "one" / "run" / "metrics.jsonl").read_text()
    for world_size, cp in ((2, 2), (2, 1), (4, 2)):
        results = run_distributed(_evaluate, world_size, tmp_path / f"{world_size}{cp}", cp)
        assert len({loss for loss, _, _ in results}) == 1
        assert abs(results[0][0] - alone) <= 1e-6 * alone
        other = (tmp_path / f"{world_size}{cp}" / "run" / "metrics.jsonl").read_text()
        torch.testing.assert_close(_by_position(other), _by_position(record), rtol=1e-6, atol=0)


def _by_position(text: str) -> torch.Tensor:
    import json

    parts = torch.tensor(json.loads(text.splitlines()[-1])["loss_by_position"], dtype=torch.float64)
    assert parts[:, 0].tolist() == [0, 4, 8, 12, 15, 19, 23, 27]
    return parts
