"""Grouped products of our own; imports Triton, which is optional, only when something is computed."""

from cpmoe.moe.backends.triton.backend import TritonExperts

__all__ = ["TritonExperts"]
