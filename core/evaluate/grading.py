"""Which number a worked solution ends in: one rule, for a model's reply and for a data set's own answer alike.

The rule is code and no option, so that figures can be compared. It is that of GSM8K (``#### 18``), with a second part
for models that write no such line.
"""

from __future__ import annotations

import re
from decimal import Decimal

NEXT_QUESTION = "\nQuestion:"
"""Where a model that was not told to stop begins a problem of its own; a reply ends before it."""

_NUMBER = re.compile(r"(?P<sign>(?<![\w.)])-)?[$€£]?(?P<digits>\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?P<part>\.\d+)?", re.ASCII)


def final_number(text: str) -> Decimal | None:
    """The last number on the line after the last ``####``; if there is none, the last number in ``text``; else None.

    Commas between thousands, signs of currency and units are stripped. A minus counts where it stands at the number and
    not behind a word, another number or a bracket: 10-4 ends in 4.
    """
    text = text.replace("\N{MINUS SIGN}", "-")
    _, marked, tail = text.rpartition("####")
    found = _last(tail.split("\n", 1)[0]) if marked else None
    return found if found is not None else _last(text)


def reply_of(text: str) -> str:
    """A generated text without the next question, should the model have asked itself one."""
    return text.split(NEXT_QUESTION, 1)[0]


def _last(text: str) -> Decimal | None:
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    found = numbers[-1]
    return Decimal((found["sign"] or "") + found["digits"].replace(",", "") + (found["part"] or ""))
