"""The Triton backend; imports Triton, which is optional, only when something is computed or asked."""

from cpmoe.attention.blocks.triton.backend import TritonBlocks

__all__ = ["TritonBlocks"]
