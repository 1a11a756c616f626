"""What the trained model is worth: perplexity by source, arithmetic, drafts accepted, and how it routes."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from .baselines import Trigram, uniform, unigram
from .corpus import Document, read_documents
from .llama import Session
from .model import Model
from .tokens import BOUNDARY, read_vocabulary

_ANSWER = re.compile(r"The answer is (-?\d+)\.")


def sample(heldout: Path, per_source: int) -> list[Document]:
    """Return the first documents of each source, `per_source` at most."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for document in read_documents(heldout):
        taken[document.source] += 1
        if taken[document.source] <= per_source:
            chosen.append(document)
    return chosen


def perplexities(session: Session, documents: Iterable[Document]) -> dict[str, tuple[float, int]]:
    """Return (sum of -log p, tokens) by source, every document on its own after the boundary."""
    sums: dict[str, tuple[float, int]] = {}
    for document in documents:
        ids = session.tokenise(BOUNDARY + document.text)
        session.clear()
        logits = session.logits(ids[:-1]).astype(np.float64)
        top = logits.max(-1)
        losses = top + np.log(np.exp(logits - top[:, None]).sum(-1)) - logits[np.arange(len(logits)), ids[1:]]
        before, count = sums.get(document.source, (0.0, 0))
        sums[document.source] = before + float(losses.sum()), count + len(losses)
    return sums


def baselines(train: Path, vocabulary: Path, documents: Sequence[Document]) -> dict[str, float]:
    """Return the perplexities of uniform, unigram and trigram on the same documents."""
    tokens = np.load(train)["tokens"]
    tokenizer = read_vocabulary(vocabulary)
    size = tokenizer.get_vocab_size()
    encoded = [
        np.array(tokenizer.encode(BOUNDARY + d.text, add_special_tokens=False).ids, np.uint16) for d in documents
    ]
    after = np.concatenate([e[1:] for e in encoded])
    trigram = Trigram(tokens, size)
    result = {"uniform": uniform(size), "unigram": unigram(tokens, after, size), "trigram": trigram.perplexity(encoded)}
    for source in sorted({d.source for d in documents}):
        mine = [e for e, d in zip(encoded, documents, strict=True) if d.source == source]
        result[f"trigram {source}"] = trigram.perplexity(mine)
    return result


def generate(session: Session, prompt: str, limit: int, depth: int = 0) -> tuple[list[int], list[list[bool]]]:
    """Decode greedily; with `depth`, draft that far and verify. Return tokens and, per draft, which were right.

    In each inner list the entries after the first wrong one say nothing and are left out.
    """
    ids = session.tokenise(prompt)
    stops = set(session.tokenise("<|end|>" + BOUNDARY))
    session.clear()
    logits = session.logits(ids)
    states = session.hidden(len(ids)) if depth else np.zeros((0, session.width), np.float32)
    if depth:
        session.draft(ids, np.concatenate([np.zeros_like(states[:1]), states[:-1]]))
    out, verdicts = [int(logits[-1].argmax())], list[list[bool]]()
    place, before = len(ids), states[-1:]
    while len(out) < limit and out[-1] not in stops:
        drafts = _drafts(session, out[-1], before, place, depth)
        said = session.logits([out[-1], *drafts], place).argmax(-1)
        right = 0
        while right < depth and drafts[right] == said[right]:
            right += 1
        if depth:
            verdicts.append([True] * right + [False] * (right < depth))
            states = session.hidden(depth + 1)
            session.forget(place + 1 + right, place + 1)
            if right:  # the head's keys of accepted drafts, from the trunk's states instead of its own
                session.draft(drafts[:right], states[:right], place + 1)
            before = states[right : right + 1]
        place += right + 1
        for token in [*drafts[:right], int(said[right])]:
            if out[-1] not in stops:
                out.append(token)
    return out, verdicts


def _drafts(session: Session, last: int, state: npt.NDArray[np.float32], place: int, depth: int) -> list[int]:
    """Return the head's greedy drafts of the tokens after `last`, which stands at `place`."""
    drafts: list[int] = []
    for d in range(depth):
        logits, state = session.draft([drafts[-1] if drafts else last], state, place + d)
        drafts.append(int(logits[0].argmax()))
    return drafts


def acceptance(session: Session, documents: Iterable[Document], limit: int = 64, depth: int = 3) -> list[float]:
    """Return, by depth, the share of drafts that were right where all before them were.

    A chat is prompted with its first question, another text with its first third.
    """
    tried, right = [0] * depth, [0] * depth
    for document in documents:
        _, verdicts = generate(session, prompt_of(document), limit, depth)
        for verdict in verdicts:
            for d, good in enumerate(verdict):
                tried[d] += 1
                right[d] += good
    return [r / max(t, 1) for r, t in zip(right, tried, strict=True)]


def prompt_of(document: Document) -> str:
    """Return where generation starts in a document."""
    marker = "<|assistant|>\n"
    if marker in document.text:
        return BOUNDARY + document.text[: document.text.index(marker) + len(marker)]
    words = document.text.split(" ")
    return BOUNDARY + " ".join(words[: max(2, len(words) // 3)])


def arithmetic(session: Session, documents: Iterable[Document]) -> tuple[int, int]:
    """Return (right, asked): an answer is right where the first "The answer is N." names the solution's number."""
    problems = [d for d in documents if d.source == "arithmetic"]
    right = 0
    for document in problems:
        out, _ = generate(session, prompt_of(document), 60)
        said, true = _ANSWER.search(session.text(out)), _ANSWER.search(document.text)
        right += bool(said and true and said[1] == true[1])
    return right, len(problems)


@torch.no_grad()
def routing(model: Model, vocabulary: Path, documents: Iterable[Document]) -> dict[str, Any]:
    """Return, by routed layer of the trunk and the head: each expert's share over its even one, and the overlap.

    Overlap is the mean of |chosen now and a token before| / used; chance is what the usage alone would give.
    """
    tokenizer = read_vocabulary(vocabulary)
    layers = model.expert_layers()
    used, n = model.shape.used, model.shape.experts
    counts = np.zeros((len(layers), n), np.int64)
    same, pairs = np.zeros(len(layers)), 0
    for document in documents:
        ids = tokenizer.encode(BOUNDARY + document.text, add_special_tokens=False).ids[: model.shape.context]
        tokens = torch.tensor([ids])
        model.draft(tokens, model.trunk(tokens), 1)
        for i, layer in enumerate(layers):
            assert layer.chosen is not None
            chosen = np.zeros((len(ids), n), bool)
            np.put_along_axis(chosen, layer.chosen.numpy(), True, 1)
            counts[i] += chosen.sum(0)
            same[i] += (chosen[1:] & chosen[:-1]).sum() / used
        pairs += len(ids) - 1
    share = counts / counts.sum(1, keepdims=True)
    return {
        "usage": (share * n).round(3).tolist(),
        "overlap": (same / pairs).round(4).tolist(),
        "chance": (used * (share**2).sum(1)).round(4).tolist(),
        "uniform chance": used / n,
    }


def write_sets(documents: Iterable[Document], folder: Path) -> None:
    """Write the texts to heldout-text.jsonl and the arithmetic problems to arithmetic.jsonl, one object a line."""
    with (folder / "heldout-text.jsonl").open("w") as texts, (folder / "arithmetic.jsonl").open("w") as problems:
        for document in documents:
            if document.source == "arithmetic":
                answer = _ANSWER.search(document.text)
                assert answer is not None
                line = {"question": document.key, "answer": int(answer[1])}
                problems.write(json.dumps(line) + "\n")
            else:
                texts.write(json.dumps({"source": document.source, "text": document.text}) + "\n")
