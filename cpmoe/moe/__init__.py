"""Mixture of experts: router, balance, dispatch between ranks, grouped experts, and the layer of them."""
