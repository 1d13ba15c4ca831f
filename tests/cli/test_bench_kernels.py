"""`bench kernels --compile`: no kernel spills, and 16-bit products run on the matrix units."""

import argparse
import json

import pytest
import torch

from cpmoe.attention.blocks.triton.catalog import entries
from cpmoe.cli.bench import kernels
from cpmoe.cli.main import main
from cpmoe.moe.backends.triton import catalog as experts

pytest.importorskip("triton", reason="Triton is not installed")

from cpmoe.kernels.compile import Resources


def test_hopper_and_blackwell_at_common_head_sizes(tmp_path):
    chosen = [
        entry
        for entry in entries()
        if entry.architecture in ("sm_90", "sm_100")
        and entry.dtype == torch.bfloat16
        and entry.size_qk in (64, 128)
        and not entry.softcap
    ]
    assert len(chosen) == 12
    result = kernels.report_compiled(kernels.compile_all(chosen), tmp_path / "f.json")
    assert json.loads((tmp_path / "f.json").read_text()) == result
    assert result["figures"] == {"kernels.spill_bytes_max": 0.0, "kernels.tensor_core_missing": 0.0}


def test_experts_before_hopper():
    """Where `auto` takes them: the kernel with the largest tile, and the one that keeps most."""
    chosen = [
        entry
        for entry in experts.entries()
        if (entry.architecture, entry.dtype, entry.hidden) == ("sm_80", torch.bfloat16, 2048)
        and entry.kernel in ("gate_up", "gate_up_gradient")
    ]
    assert len(chosen) == 2
    result = kernels.report_compiled(kernels.compile_all(chosen), None)
    assert result["figures"] == {"kernels.spill_bytes_max": 0.0, "kernels.tensor_core_missing": 0.0}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_and_configuration():
    result = kernels.run(None, argparse.Namespace(compile=True, device=None))
    assert result["figures"] == {"kernels.spill_bytes_max": 0.0, "kernels.tensor_core_missing": 0.0}


def test_figures_name_the_worst():
    chosen = [e for e in entries() if e.architecture == "sm_90" and e.size_qk == 64]
    compiled = {entry: Resources(100, 1000, 0, "wgmma") for entry in chosen}
    compiled[chosen[0]] = Resources(255, 1000, 8, "mma.sync")
    figures = kernels.report_compiled(compiled, None)["figures"]
    assert figures == {"kernels.spill_bytes_max": 8.0, "kernels.tensor_core_missing": 1.0}


def test_one_of_both_must_be_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "kernels"])
    assert "one of the arguments --compile --device is required" in capsys.readouterr().err
