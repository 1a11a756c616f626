"""Whether llama.cpp computes what the trainer computes: logits of trunk and head, and the tokens of held-out text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .corpus import read_documents
from .llama import Session
from .model import Model
from .tokens import BOUNDARY, read_vocabulary


@dataclass(frozen=True)
class Parity:
    """Largest deviations of a logit, by draft depth for the head; documents that were tokenised unlike."""

    trunk: float
    drafts: tuple[float, ...]
    documents: int
    unlike: int


@torch.no_grad()
def compare(model: Model, gguf: Path, vocabulary: Path, heldout: Path, *, documents: int = 8, depth: int = 3) -> Parity:
    """Compare the float32 file with the model on the first documents of each source, and all texts' tokens."""
    session = Session(gguf, mtp=True, context=model.shape.context)
    tokenizer = read_vocabulary(vocabulary)
    trunk, drafts = 0.0, [0.0] * depth
    seen: dict[str, int] = {}
    total = unlike = 0
    for document in read_documents(heldout):
        ids = tokenizer.encode(BOUNDARY + document.text, add_special_tokens=False).ids
        total += 1
        unlike += session.tokenise(BOUNDARY + document.text) != ids
        seen[document.source] = seen.get(document.source, 0) + 1
        if seen[document.source] > documents or len(ids) <= depth:
            continue
        deviations = _document(model, session, ids, depth)
        trunk = max(trunk, deviations[0])
        drafts = [max(a, b) for a, b in zip(drafts, deviations[1:], strict=True)]
    session.close()
    return Parity(trunk, tuple(drafts), total, unlike)


def _document(model: Model, session: Session, ids: list[int], depth: int) -> list[float]:
    """Return the deviations of the trunk and of drafts 1..depth; the chain is followed from the last position."""
    tokens = torch.tensor([ids])
    hidden = model.trunk(tokens)
    session.clear()
    logits = session.logits(ids)
    deviations = [float(np.abs(logits - model.logits(hidden)[0].numpy()).max())]
    states = session.hidden(len(ids))
    expected = [model.logits(s)[0].numpy() for s in model.draft(tokens, hidden, depth)]
    first = len(ids) - depth  # the last draft then stands at the last position
    before = np.concatenate([np.zeros((1, session.width), np.float32), states[:first]])
    drafted, state = session.draft(ids[: first + 1], before)
    deviations.append(float(np.abs(drafted - expected[0][: first + 1]).max()))
    for d in range(1, depth):
        drafted, state = session.draft([ids[first + d]], state[-1:], first + d)
        deviations.append(float(np.abs(drafted[0] - expected[d][first + d]).max()))
    return deviations
