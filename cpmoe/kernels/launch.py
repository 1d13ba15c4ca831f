"""One kernel call, for running and for compiling ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Options(Protocol):
    @property
    def num_warps(self) -> int: ...
    @property
    def num_stages(self) -> int: ...


@dataclass(frozen=True)
class Launch:
    """`arguments` and `constants` together are the kernel's parameters."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tiles: Options

    def run(self) -> None:
        if 0 not in self.grid:
            self.kernel[self.grid](
                **self.arguments,
                **self.constants,
                num_warps=self.tiles.num_warps,
                num_stages=self.tiles.num_stages,
            )
