"""Routing policies: knobs on which experts compute."""
