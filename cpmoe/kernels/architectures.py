"""Which GPUs kernels are configured for, and whether kernels can run here at all."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal, get_args

import torch

Compiled = Literal["sm_80", "sm_90", "sm_100", "gfx942"]
Architecture = Literal["sm_80", "sm_90", "sm_100", "gfx942", "interpreter"]
COMPILED: tuple[Compiled, ...] = get_args(Compiled)


def architecture_of(device: torch.device) -> Architecture:
    """The configurations that hold on a device: sm_80's, which asks least, on NVIDIA devices without any."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return "gfx942"
    capability = torch.cuda.get_device_capability(device)
    return {(9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get(capability, "sm_80")  # type: ignore[return-value]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU; decided before they are first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def no_kernels(device: torch.device) -> str | None:
    """Why no Triton kernel runs on tensors of this device; None where they do."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != ("cpu" if interpreted() else "cuda"):
        return (
            f"device {device.type} has no Triton kernels (cuda has, and cpu where TRITON_INTERPRET=1 was set)"
        )
    return None
