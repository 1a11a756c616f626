"""Traces of a run, one row per routing, read or piece of computing: written beside a generation, read for one page.

Nothing of this changes what is computed or read: a traced run has the logits of an untraced one, byte for byte.
"""
