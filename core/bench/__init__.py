"""Which setting is faster, and is that real: sides measured in turn, and what may be concluded from it.

``sides → schedule → child (worker) → trial → figures, compare → result``: every measurement is a process of its own,
alone on the machine, so that no side takes memory from another and each has the start that a user has.
"""
