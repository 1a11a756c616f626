"""The benchmark's model files: made once, beside each other in a folder outside the repository."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bmoe.synth import write_model


def model_file(layers: int, folder: str | None, locality: float = 0.0) -> str:
    """A ``qwen3-30b-a3b`` shape with random Q4_K experts; about 0.34 GB per layer and 0.5 GB beside them."""
    directory = Path(folder or Path(tempfile.gettempdir()) / "bmoe-benchmarks")
    directory.mkdir(parents=True, exist_ok=True)
    name = f"qwen3-30b-a3b-{layers}{f'-l{locality:g}' if locality else ''}.gguf"
    path = directory / name
    if not path.exists():
        write_model(path, "qwen3-30b-a3b", layers=layers, locality=locality)
    return str(path)
