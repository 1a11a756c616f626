"""Architectures: data in registry.toml, and what turns the table into rows."""
