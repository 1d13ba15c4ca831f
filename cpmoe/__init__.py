"""Sparse mixture-of-experts training on long contexts under DeepSpeed.

Attention is context-parallel (KV blocks travel a ring), experts are spread by all-to-all, and every
layout computes one and the same loss. See README.md.
"""

__version__ = "0.1.0"
