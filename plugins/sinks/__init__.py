"""Sinks: where telemetry records go."""
