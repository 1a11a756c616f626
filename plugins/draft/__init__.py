"""Drafters: which tokens may come next."""
