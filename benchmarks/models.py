"""The benchmarks' model files, made once beside each other in a folder outside the repository, and their arguments."""

from __future__ import annotations

import argparse
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


def parser_of(description: str | None, tokens: int) -> argparse.ArgumentParser:
    """The arguments of a benchmark that measures decoding or prompts, ``tokens`` a run by default."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 layers and fewer rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures, as a .png or .svg file")
    parser.add_argument("--model", help="a gguf to use instead of a made one")
    parser.add_argument("--folder", help="where made models are kept (default: a temporary folder)")
    parser.add_argument("--pairs", type=int, help="rounds")
    parser.add_argument("--tokens", type=int, default=tokens, help="tokens per run")
    parser.add_argument("--threads", type=int, default=1, help="compute threads, on a machine that does nothing else")
    return parser
