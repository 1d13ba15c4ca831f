"""A DeepSpeed whose private parts changed is refused at start-up, each with its sentence."""

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import pytest
from deepspeed.moe import utils as moe_utils
from deepspeed.utils import groups

from cpmoe.training import hooks


def test_the_pinned_version_passes():
    hooks.check_private_hooks()


@pytest.mark.parametrize(
    ("owner", "name", "value", "message"),
    [
        (deepspeed, "__version__", "0.20.0", "its version is 0.20.0"),
        (groups, "_EXPERT_PARALLEL_GROUP", None, "utils.groups._EXPERT_PARALLEL_GROUP is no dict"),
        (moe_utils, "is_moe_param", lambda p: False, "no longer marks an expert parameter"),
        (hooks.inspect, "getsource", lambda module: "", "no longer reads ds_zero_partition_process_group"),
    ],
)
def test_each_change_is_named(monkeypatch, owner, name, value, message):
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(RuntimeError, match=f"{message}.*Install deepspeed==0.19.8"):
        hooks.check_private_hooks()
