"""Compiles a kernel call ahead, without a GPU, and reads from the binary what it costs.

Run it in a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from cpmoe.kernels.architectures import Architecture
from cpmoe.kernels.launch import Launch

TARGETS: dict[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
}
# Of an argument: its place, and inside a tuple the place there.
ArgumentPath = tuple[int, ...]
Signature = str | tuple
# Newest first: a kernel is named after the best that it has.
MATRIX_INSTRUCTIONS = ("tcgen05.mma", "wgmma", "mma.sync", "v_mfma")


class Resources(NamedTuple):
    """registers per thread; bytes of shared memory per program; bytes per thread spilled to memory."""

    registers: int
    shared: int
    spill: int
    matrix_instruction: str


def compile_launch(launch: Launch, architecture: Architecture) -> Resources:
    """The resources of `launch`, whose tensors may be on the meta device, on `architecture`."""
    signature: dict[str, Signature] = {}
    constants: dict[ArgumentPath, Any] = {}
    attributes: dict[ArgumentPath, list] = {}

    def describe(path: ArgumentPath, value: Any) -> Signature:
        """What the launcher would infer: 1 is a constant, multiples of 16 are known to be."""
        if isinstance(value, tuple):
            return tuple(describe((*path, place), item) for place, item in enumerate(value))
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        if isinstance(value, float):
            return "fp32"
        if value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor) or value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return f"*{TYPES[value.dtype]}" if isinstance(value, Tensor) else "i32"

    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name], constants[(index,)] = "constexpr", launch.constants[name]
        else:
            signature[name] = describe((index,), launch.arguments[name])
    source = ASTSource(launch.kernel, signature, constants, attributes)
    options = {"num_warps": launch.tiles.num_warps, "num_stages": launch.tiles.num_stages}
    compiled = triton.compile(source, target=TARGETS[architecture], options=options)
    assembly = compiled.asm.get("amdgcn") or compiled.asm["ptx"]
    found = next((name for name in MATRIX_INSTRUCTIONS if name in assembly), "none")
    registers, spill = (
        _amd_usage(assembly) if "amdgcn" in compiled.asm else _nvidia_usage(compiled.asm["cubin"])
    )
    return Resources(registers, compiled.metadata.shared, spill, found)


def _amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers of both kinds, and bytes of scratch; scalar registers spill into vector registers."""

    def value(name: str) -> int:
        return int(re.search(rf"\.{name}:\s*(\d+)", assembly)[1])  # type: ignore[index]

    return value("vgpr_count"), max(value("private_segment_fixed_size"), 4 * value("vgpr_spill_count"))


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and the bytes of stack and local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    values = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return int(values["REG"]), int(values["STACK"]) + int(values["LOCAL"])
