"""`python -m scripts.train_reference`: corpus, training, export and measurements, each a command of its own.

    corpus    fetch the packages, write the documents, train the vocabulary, write the tokens
    train     train, or go on from the checkpoint
    export    write the float32 gguf and its quantised files
    parity    compare llama.cpp on the float32 gguf with PyTorch
    measure   perplexities, baselines, arithmetic, acceptance and routing, as JSON; usage.svg
    sets      write the small held-out files that a model is judged by

Everything is kept below --work, so that a run can be resumed.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

QUANTISED = ("Q8_0", "Q4_K_M")


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(prog="train_reference", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=("corpus", "train", "export", "parity", "measure", "sets"))
    parser.add_argument("--work", type=Path, default=Path("build/train"), help="folder of everything written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=62.0, help="length of the training, resumed parts included")
    parser.add_argument("--steps", type=int, default=0, help="length in steps instead: a run that can be repeated")
    parser.add_argument("--threads", type=int, default=2, help="processes that train, threads that measure")
    parser.add_argument("--compile", action="store_true", help="compile the elementwise parts (needs a C++ compiler)")
    parser.add_argument("--documents", type=int, default=100, help="held-out documents per source to measure on")
    parser.add_argument("--gguf", type=Path, help="file to measure (default: the float32 one)")
    parser.add_argument("--name", default="bmoe-ref")
    arguments = parser.parse_args()
    COMMANDS[arguments.command](arguments)


def corpus(arguments: argparse.Namespace) -> None:
    """Write documents, vocabulary and tokens."""
    from .corpus import read_documents, write_corpus
    from .tokens import train_vocabulary, write_tokens

    train, heldout = write_corpus(arguments.work, arguments.seed)
    tokenizer = train_vocabulary((d.text for d in read_documents(train)), vocabulary(arguments))
    for path in (train, heldout):
        print(path.name, write_tokens(tokenizer, path, path.with_suffix(".npz")), "tokens")


def train(arguments: argparse.Namespace) -> None:
    """Train to the end of the time, or of the steps."""
    from .model import Shape
    from .train import Recipe, run

    recipe = Recipe(seed=arguments.seed, minutes=arguments.minutes, steps=arguments.steps)
    data = arguments.work / "train.npz"
    print(run(data, arguments.work, recipe, Shape(), workers=arguments.threads, compiled=arguments.compile))


def export(arguments: argparse.Namespace) -> None:
    """Write the files of the model."""
    from .export import export as write
    from .export import quantise
    from .train import trained

    full = float32(arguments)
    write(trained(arguments.work / "checkpoint.pt"), vocabulary(arguments), full, name=arguments.name)
    for kind in QUANTISED:
        target = arguments.work / f"{arguments.name}-{kind}.gguf"
        quantise(full, target, kind, arguments.threads)
        print(target, target.stat().st_size)


def parity(arguments: argparse.Namespace) -> None:
    """Print the deviations from PyTorch."""
    from .parity import compare
    from .train import trained

    model = trained(arguments.work / "checkpoint.pt")
    heldout = arguments.work / "heldout.jsonl"
    found = compare(model, float32(arguments), vocabulary(arguments), heldout, documents=min(arguments.documents, 8))
    print(json.dumps(asdict(found)))


def measure(arguments: argparse.Namespace) -> None:
    """Print what the model is worth."""
    from . import measure as measures
    from .llama import Session
    from .plot import usage_svg
    from .train import trained

    documents = measures.sample(arguments.work / "heldout.jsonl", arguments.documents)
    path = arguments.gguf or float32(arguments)
    session = Session(path, mtp=True, threads=arguments.threads)
    sums = measures.perplexities(session, documents)
    result: dict[str, Any] = {"file": path.name, "bytes": path.stat().st_size}
    result["perplexity"] = {s: round(math.exp(total / n), 3) for s, (total, n) in sums.items()}
    totals = [sum(column) for column in zip(*sums.values(), strict=True)]
    result["perplexity"]["all"] = round(math.exp(totals[0] / totals[1]), 3)
    result["tokens"] = totals[1]
    result["arithmetic"] = measures.arithmetic(session, documents)
    prompts = measures.sample(arguments.work / "heldout.jsonl", max(1, arguments.documents // 5))
    result["acceptance"] = {
        source: measures.acceptance(session, [d for d in prompts if d.source == source])
        for source in sorted({d.source for d in prompts})
    }
    result["acceptance"]["all"] = measures.acceptance(session, prompts)
    session.close()
    if arguments.gguf is None:
        result["baselines"] = measures.baselines(arguments.work / "train.npz", vocabulary(arguments), documents)
        model = trained(arguments.work / "checkpoint.pt")
        result["routing"] = routing = measures.routing(model, vocabulary(arguments), documents)
        names = [f"block {model.shape.dense + i}" for i in range(len(routing["usage"]) - 1)]
        (arguments.work / "usage.svg").write_text(usage_svg(routing["usage"], [*names, "MTP head"]))
    print(json.dumps(result, indent=1))


def sets(arguments: argparse.Namespace) -> None:
    """Write heldout.txt.jsonl (texts) and arithmetic.jsonl (questions and answers), small enough for git."""
    from .measure import sample, write_sets

    write_sets(sample(arguments.work / "heldout.jsonl", arguments.documents), arguments.work)


def vocabulary(arguments: argparse.Namespace) -> Path:
    """Return where the vocabulary is."""
    path: Path = arguments.work / "tokenizer.json"
    return path


def float32(arguments: argparse.Namespace) -> Path:
    """Return where the float32 file is."""
    path: Path = arguments.work / f"{arguments.name}-F32.gguf"
    return path


COMMANDS = {"corpus": corpus, "train": train, "export": export, "parity": parity, "measure": measure, "sets": sets}

if __name__ == "__main__":
    main()
