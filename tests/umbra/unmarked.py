"""A plugin that forgot the marker."""


def bmoe_caches() -> list:
    return []
