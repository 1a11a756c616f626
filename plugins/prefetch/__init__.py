"""Prefetchers: which experts will be needed."""
