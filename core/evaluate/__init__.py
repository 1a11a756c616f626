"""What a model is worth under a profile: perplexity, multiple choice, exact match, distance from the resident run.

``dataset → prompts → tasks → scorer → replies → run``: items are scored one after another by single-token decodes over
one conversation, because a wide batch would not show what a knob costs that depends on the cache.
"""
