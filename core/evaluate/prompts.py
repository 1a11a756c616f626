"""The text that a question becomes before the model sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bmoe.errors import ModelError

FORMS = ("plain", "chat", "raw")


@dataclass(frozen=True, slots=True)
class Prompts:
    """``ask`` gives the prompt of a question; ``joint`` stands between it and an answer that is scored."""

    ask: Callable[[str], str]
    joint: str


def make_prompts(form: str, chat_template: str | None, model: str) -> Prompts:
    """``plain``: ``Question: …`` and ``Answer:``; ``chat``: one turn in the model's template; ``raw``: as it is.

    Raises :class:`ModelError`, which names ``model``, if a chat template is asked for and absent or broken.
    """
    if form == "plain":
        return Prompts(lambda question: f"Question: {question}\nAnswer:", " ")
    if form == "raw":
        return Prompts(lambda question: question, "")
    if not chat_template:
        raise ModelError(f"{model}: has no chat template; ask with --prompts plain")
    return Prompts(_chat(chat_template, model), "")


def _chat(template: str, model: str) -> Callable[[str], str]:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def ask(question: str) -> str:
        messages = [{"role": "user", "content": question}]
        # the tokenizer puts the token of a beginning in front by itself
        known = {"bos_token": "", "eos_token": "", "add_generation_prompt": True, "raise_exception": refuse}
        try:
            return compiled.render(messages=messages, **known)
        except Exception as error:
            raise ModelError(f"{model}: its chat template fails: {type(error).__name__}: {error}") from error

    try:
        compiled = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    except TemplateError as error:
        raise ModelError(f"{model}: its chat template is none: {error}") from error
    return ask
