"""Importance scorers: how much each token of a prompt matters, for routing policies."""
