"""The fixed texts that a bench continues; part of its method, so they change only together with :data:`VERSION`."""

from __future__ import annotations

VERSION = 1
"""Figures of different versions are not comparable."""

PROMPTS = (
    "The ferry leaves the harbour at seven. A baker, two nurses and a boy with a cello stand at the rail and look back "
    "at the lights of the town. The boy asks the baker whether the island has a concert hall, and the baker laughs and",
    "Question: A tank holds 240 litres. One pump fills it in 40 minutes and another one empties it in 60 minutes. How "
    "long does it take to fill the tank if both pumps run at the same time? Answer: In one minute the first pump",
    "def merge(left, right):\n    result = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n"
    "        if left[i] <= right[j]:\n            result.append(left[i])\n            i += 1\n        else:\n",
    "Granite forms when molten rock cools slowly, deep below the surface. Its crystals have time to grow, and so they "
    "can be seen with the naked eye: pale feldspar, grey quartz, dark mica. Basalt has nearly the opposite history. It",
)
"""A story, a sum, a program and a piece of prose: what a model is routed to differs between them."""
