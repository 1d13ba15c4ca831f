"""Checkpoints on disk: whole or not at all, refused on another layout or when damaged."""

import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cpmoe.checkpoint.local import find_checkpoints, load_checkpoint, save_checkpoint
from tests.distributed import run_distributed

LAYOUT = {"world_size": 2, "expert_parallel_size": 2, "model": {"hidden_size": 16, "num_experts": 4}}


def _state(rank: int, step: int):
    return {"rank": rank, "weights": torch.full((3,), 10.0 * rank + step)}


def _save(rank: int, world_size: int, root: Path, steps: list[int], keep: int):
    for step in steps:
        save_checkpoint(root, step, _state(rank, step), LAYOUT, keep)
    return [path.name for path in find_checkpoints(root)]


def _load(rank: int, world_size: int, folder: Path, layout: dict):
    try:
        return load_checkpoint(folder, layout)
    except ValueError as error:
        return str(error)


def test_each_rank_gets_back_what_it_saved_and_old_ones_go(tmp_path):
    names = run_distributed(_save, 2, tmp_path, [1, 2, 10], 2)
    assert names == [["step_00000002", "step_00000010"]] * 2
    for rank, state in enumerate(run_distributed(_load, 2, tmp_path / "step_00000010", LAYOUT)):
        assert state["rank"] == rank
        assert torch.equal(state["weights"], _state(rank, 10)["weights"])


def test_refusals_name_the_difference(tmp_path):
    run_distributed(_save, 2, tmp_path, [1], 2)
    folder = tmp_path / "step_00000001"
    other = {**LAYOUT, "expert_parallel_size": 1}
    for message in run_distributed(_load, 2, folder, other):
        assert "another layout" in message and "only. expert_parallel_size: saved 2, now 1. Start" in message
    other = {**LAYOUT, "model": {"hidden_size": 32, "num_experts": 4}}
    for message in run_distributed(_load, 2, folder, other):
        assert "only. model.hidden_size: saved 16, now 32. Start" in message
    data = bytearray((folder / "rank_00001.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "rank_00001.pt").write_bytes(data)
    good, bad = run_distributed(_load, 2, folder, LAYOUT)
    assert good["rank"] == 0
    assert "rank_00001.pt is missing or damaged" in bad
    (folder / "manifest.json").unlink()
    assert "no checkpoint" in run_distributed(_load, 1, folder, LAYOUT)[0]


class _Unwritable:
    """A value that fails to be written, as on a full disk."""

    def __reduce__(self):
        raise OSError(28, "No space left on device")


def _fail_on_one_rank(rank: int, world_size: int, root: Path):
    save_checkpoint(root, 1, _state(rank, 1), LAYOUT, 2)
    state = {"bad": _Unwritable()} if rank == 1 else _state(rank, 2)
    try:
        save_checkpoint(root, 2, state, LAYOUT, 2)
    except OSError as error:
        dist.barrier()
        return str(error), sorted(path.name for path in root.iterdir())
    raise AssertionError("the checkpoint was written")


def test_a_failed_write_leaves_the_last_checkpoint_and_tells_every_rank(tmp_path):
    for message, names in run_distributed(_fail_on_one_rank, 2, tmp_path):
        assert "step 2" in message and "rank 1: [Errno 28] No space left on device" in message
        assert names == ["step_00000001"]


def _fill_the_disk_of_one_rank(rank: int, world_size: int, root: Path):
    """Rank 1 may write 100 kB only: torch then meets an error in the middle of a tensor."""
    save_checkpoint(root, 1, _state(rank, 1), LAYOUT, 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        save_checkpoint(root, 2, {"weights": torch.zeros(1_000_000)}, LAYOUT, 2)
    except OSError as error:
        dist.barrier()
        return str(error), sorted(path.name for path in root.iterdir())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    raise AssertionError("the checkpoint was written")


def test_a_disk_that_fills_within_a_tensor_is_told_by_every_rank(tmp_path):
    for message, names in run_distributed(_fill_the_disk_of_one_rank, 2, tmp_path):
        assert "step 2" in message and "rank 1: [Errno 27] File too large" in message
        assert names == ["step_00000001"]


def _save_where_none_can_be(rank: int, world_size: int, root: Path):
    with pytest.raises(OSError, match=r"rank 0: .*Not a directory") as caught:
        save_checkpoint(root, 1, _state(rank, 1), LAYOUT, 2)
    return str(caught.value)


def test_a_folder_that_can_not_be_made_is_told_by_every_rank(tmp_path):
    (tmp_path / "file").touch()
    messages = run_distributed(_save_where_none_can_be, 2, tmp_path / "file" / "checkpoints")
    assert len(set(messages)) == 1


def test_a_later_checkpoint_neither_counts_nor_goes(tmp_path):
    run_distributed(_save, 1, tmp_path, [500], 1)
    names = run_distributed(_save, 1, tmp_path, [100, 200], 1)
    assert names == [["step_00000200", "step_00000500"]]


def test_the_same_step_again_replaces_what_was_there(tmp_path):
    (tmp_path / "step_00000003").mkdir()
    (tmp_path / "step_00000003" / "other").touch()
    (tmp_path / ".writing_step_00000002").mkdir()
    run_distributed(_save, 1, tmp_path, [3, 3], 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
    assert {p.name for p in (tmp_path / "step_00000003").iterdir()} == {"manifest.json", "rank_00000.pt"}


def test_a_manifest_that_was_cut_short_is_told(tmp_path):
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ValueError, match=r"manifest\.json is damaged: .* Remove this folder"):
        load_checkpoint(tmp_path, LAYOUT)


def test_a_folder_that_was_never_renamed_is_not_found(tmp_path):
    (tmp_path / ".writing_step_00000007").mkdir()
    (tmp_path / "step_00000006").mkdir()
    assert find_checkpoints(tmp_path) == []


@pytest.mark.parametrize("text", ["{}", '{"format": "other-9"}'])
def test_another_format_is_refused(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=r"format .*, must be 'cpmoe-local-1'"):
        load_checkpoint(tmp_path, LAYOUT)
