"""Attention over a sequence that is split over ranks: sharding, plan, ring and all-gather strategies."""
