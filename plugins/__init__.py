"""The plugins of bmoe's own repository: ordinary plugins, indexed in registry.toml, with no privileged path."""

if __name__ != "bmoe_plugins":
    # `import plugins` from the repository's root would make a second copy of every module under another name.
    raise ImportError(f"import this package as bmoe_plugins, not as {__name__}; install it with `pip install -e .`")
