"""Tiny models for tests, each written once for a folder and found again by its name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bmoe.synth import Shape, write_model


@dataclass(frozen=True, slots=True)
class TinyModels:
    """Synthetic models in ``folder``, written when they are first asked for.

    In a ``conftest.py``: a fixture of session scope that returns ``TinyModels(tmp_path_factory.mktemp("models"))``.
    """

    folder: Path

    def path(
        self,
        like: str | Shape = "tiny-qwen3moe",
        quant: str | None = None,
        layers: int | None = None,
        locality: float = 0.0,
        seed: int = 0,
    ) -> Path:
        """The model of :func:`bmoe.synth.write_model` with these arguments; treat the file as read-only.

        A shape of one's own is found again by its name.
        """
        name = like if isinstance(like, str) else like.name
        parts = [name, quant or "default", f"{layers or 'all'}-layers", f"locality-{locality:g}", f"seed-{seed}"]
        path = self.folder / ("_".join(parts) + ".gguf")
        if not path.exists():
            write_model(path, like, layers=layers, quant=quant, seed=seed, locality=locality)
        return path
