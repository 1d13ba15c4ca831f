"""Stops a run at its first non-finite loss or gradient, and names the tensor where it began."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class NonFiniteError(RuntimeError):
    """A loss or gradient is not finite. The message names step, rank and tensor."""


class GradientWatch:
    """Notes, in the order of backward, the sum of each gradient of this rank's micro-steps.

    One read of every gradient, on the device, without a synchronisation until `first_bad` is asked.
    """

    def __init__(self, model: nn.Module) -> None:
        self._sums: list[tuple[str, Tensor]] = []
        for name, parameter in model.named_parameters():
            parameter.register_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def note(grad: Tensor) -> None:
            self._sums.append((name, grad.detach().sum(dtype=torch.float32)))

        return note

    def all_finite(self) -> Tensor:
        """Scalar bool on the device: whether every gradient since `clear` is finite."""
        if not self._sums:
            return torch.ones((), dtype=torch.bool)
        return torch.stack([total for _, total in self._sums]).isfinite().all()

    def first_bad(self) -> str | None:
        """The first parameter in backward's order whose gradient is not finite."""
        return next((name for name, total in self._sums if not total.isfinite()), None)

    def clear(self) -> None:
        self._sums.clear()


def first_bad_in_forward(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """Runs `forward` once more and names the first weight or module output that is not finite.

    Weights of a module are looked at when it is reached. Collective where forward is: all ranks call it.
    """
    found: list[str] = []
    with _observed(model, found), torch.no_grad():
        forward()
    return found[0] if found else None


@contextmanager
def _observed(model: nn.Module, found: list[str]) -> Iterator[None]:
    def inputs_hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any) -> None:
            for weight_name, weight in module.named_parameters(prefix=name):
                if not weight.isfinite().all():
                    found.append(weight_name)

        return look

    def output_hook(name: str) -> Callable[..., None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not all(t.isfinite().all() for t in _floating_tensors(output)):
                found.append(f"output of {name}")

        return look

    handles = []
    for name, module in model.named_modules():
        # Leaves only: a parent's weights and output are bad where a child's are.
        if name and not any(module.children()):
            handles.append(module.register_forward_pre_hook(inputs_hook(name)))
            handles.append(module.register_forward_hook(output_hook(name)))
        elif name:
            handles.append(module.register_forward_hook(output_hook(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _floating_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floating_tensors(item)
