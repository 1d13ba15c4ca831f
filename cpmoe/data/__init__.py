"""From documents to micro-batches: prepare once, then read packed sequences of memory-mapped tokens."""
