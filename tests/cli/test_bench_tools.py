"""The tools under the benchmarks: teams that take turns, exact byte counts, the report."""

import json
import os

import pytest
import torch
import torch.distributed as dist

from cpmoe.cli.bench.memory import PeakBytes
from cpmoe.cli.bench.report import conditions, report, spread
from cpmoe.cli.bench.teams import Team, paired_ratio, take_turns


def _sum_of_ranks(rank: int, size: int, offset: int):
    def work():
        total = torch.tensor([rank + offset])
        dist.all_reduce(total)
        return int(total), torch.get_num_threads(), os.environ["WORLD_SIZE"]

    return work


def _fails_on_rank_one(rank: int, size: int):
    def work():
        if rank == 1:
            raise RuntimeError("the fault of rank one")
        return rank

    return work


def test_teams_work_in_turn_and_are_timed():
    with Team(_sum_of_ranks, 2, 1, 10) as team, Team(_sum_of_ranks, 1, 2, 5) as other:
        seconds, results = team.turn()
        assert seconds > 0 and results == [(21, 1, "2")] * 2
        assert other.turn()[1] == [(5, 2, "1")]
        times = take_turns({"a": team, "b": other}, rounds=3, warmup=1)
        assert [len(values) for values in times.values()] == [3, 3]


def test_a_failure_shows_its_traceback():
    with Team(_fails_on_rank_one, 2, 1) as team, pytest.raises(RuntimeError, match="the fault of rank one"):
        team.turn()


def test_ratio_is_the_median_of_pairs():
    assert paired_ratio([1.0, 4.0, 30.0], [2.0, 2.0, 10.0]) == 2.0


def test_peak_bytes_counts_each_storage_once_and_forgets_the_dead():
    known = torch.zeros(1000)
    with PeakBytes([known]) as memory:
        assert known.view(10, 100).t().shape == (100, 10)
        assert memory.peak == 0
        a = torch.ones(100, dtype=torch.float64)
        b = a.view(10, 10).t()
        assert memory.live == 800
        del a, b
        assert memory.live == 0
        c = [torch.ones(25) for _ in range(3)]
        assert memory.live == 300 and memory.peak == 800
        del c


def test_report_writes_what_it_prints(tmp_path, capsys):
    path = tmp_path / "figures.json"
    result = report("title", {"a.b": 1.25}, conditions(rounds=3), [("x", "1")], ("", "n"), path)
    assert json.loads(path.read_text()) == result
    assert result["figures"] == {"a.b": 1.25} and result["conditions"]["rounds"] == 3
    assert result["conditions"]["torch"] == torch.__version__
    assert "a.b = 1.25" in capsys.readouterr().out


def test_spread_is_the_quartiles():
    assert spread([1.0, 2.0, 3.0]) == "1 to 3"
    assert spread([1.0]) == ""
