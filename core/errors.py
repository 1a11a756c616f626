"""The error family: everything bmoe raises on purpose, in four kinds that the command line maps to exit codes."""

from __future__ import annotations


class BmoeError(Exception):
    """Base of every error that bmoe raises on purpose; its text is one line (or one line per problem) for a person.

    ``exit_code`` is what the command line returns for it.
    """

    exit_code = 1


class ProfileError(BmoeError):
    """A profile, a ``--set`` override or a combination of plugins cannot run; carries every problem found.

    Each problem names the file, the TOML path, the value and the remedy.
    """

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class PluginError(BmoeError):
    """A plugin cannot be loaded, takes a name that is taken, or breaks its contract."""

    exit_code = 2


class ModelError(BmoeError):
    """A model file cannot be used: missing, not a gguf, damaged, without experts, of an unknown architecture."""


class LogitsError(ModelError):
    """What the model computed is not a number; the engine generates again afterwards."""


class NativeError(BmoeError):
    """llama.cpp or the system below it refused: a decode failed, memory was not granted, a structure differs."""


class ReadError(NativeError):
    """Expert bytes could not be read; names file, offset, length and errno. The engine generates again afterwards."""
