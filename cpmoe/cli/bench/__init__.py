"""Benchmarks: `python -m cpmoe bench NAME --json F`. Each module has `run(json_path)`, or with options of
its own `add_options(parser)` and `run(json_path, options)`.

Contestants run in turn in one session, so that a noisy machine disturbs both alike, and medians of
paired runs are reported.
"""
