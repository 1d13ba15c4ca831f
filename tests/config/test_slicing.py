"""How "auto" slices resolve, and which choices are refused."""

import pytest

from cpmoe.config.deepspeed import CoscheduleConfig, CpmoeConfig
from cpmoe.config.errors import Problem
from cpmoe.config.slicing import choose_slicing


def choose(policy: str, slices: str, micro: int, seq_len: int = 64, ep: int = 2) -> str | Problem:
    config = CpmoeConfig(
        context_parallel_size=2,
        expert_parallel_size=ep,
        coschedule=CoscheduleConfig.model_validate({"policy": policy, "slices": slices}),
    )
    return choose_slicing(config, micro, seq_len)


@pytest.mark.parametrize(
    ("policy", "slices", "micro", "seq_len", "chosen"),
    [
        ("serial", "auto", 2, 64, "none"),
        ("overlap", "auto", 2, 64, "batch"),
        ("overlap", "auto", 3, 64, "batch"),
        ("overlap", "auto", 1, 64, "causal"),
        ("overlap", "auto", 1, 8, "causal"),
        ("overlap", "auto", 1, 7, "none"),
        ("auto", "auto", 2, 64, "batch"),
        ("auto", "auto", 1, 64, "causal"),
        ("serial", "causal", 2, 64, "causal"),
        ("overlap", "causal", 4, 8, "causal"),
        ("overlap", "none", 2, 64, "none"),
    ],
)
def test_choice(policy, slices, micro, seq_len, chosen):
    assert choose(policy, slices, micro, seq_len) == chosen


def test_refusals_name_the_place_and_the_legal_choices():
    batch = choose("overlap", "batch", 1)
    assert isinstance(batch, Problem) and batch.path == "cpmoe.coschedule.slices"
    assert "two or more sequences" in str(batch) and "causal" in str(batch)
    causal = choose("overlap", "causal", 1, seq_len=7)
    assert isinstance(causal, Problem) and "2 x 4 chunks" in str(causal) and "7" in str(causal)


def test_without_transfers_of_rows_there_is_nothing_to_hide():
    assert choose("overlap", "auto", 2, ep=1) == "none"
    assert choose("overlap", "batch", 2, ep=1) == "batch"


def test_the_resolved_settings_name_the_choice():
    from cpmoe.config.resolve import resolve
    from cpmoe.config.settings import Settings
    from tests.config.support import RECIPE, changed

    json = {"cpmoe": {"expert_parallel_size": 2, "coschedule": {"policy": "overlap"}}}
    recipe = changed(RECIPE, {"train.micro_batch_size": 2})
    run = resolve(Settings("recipe", recipe), Settings("json", json), 2, environ={})
    assert run.slicing == run.json_tree()["cpmoe"]["coschedule"]["slices"] == "batch"
