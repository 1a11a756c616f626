"""How models are made, by architecture, and the shapes that have a name."""

from __future__ import annotations

from collections.abc import Mapping

from bmoe.synth.recipe import Architecture, Recipe
from bmoe.synth.recipes import (
    arcee,
    arctic,
    bailing,
    bailing3,
    cohere,
    dbrx,
    deepseek,
    diffusion,
    dots,
    dots3,
    ernie,
    exaone,
    gemma,
    glm,
    granite,
    grok,
    grove,
    hunyuan,
    hybrid,
    kimi,
    laguna,
    llama,
    maple,
    mellum,
    mimo,
    minimax,
    mistral,
    nomic,
    olmo,
    openai,
    phi,
    qwen,
    step,
)
from bmoe.synth.shapes import REAL, Shape

ARCHITECTURES: Mapping[str, Architecture] = {
    entry.arch: entry
    for family in (
        qwen,
        openai,
        glm,
        llama,
        granite,
        grok,
        dbrx,
        arctic,
        olmo,
        phi,
        laguna,
        mellum,
        diffusion,
        arcee,
        dots,
        ernie,
        exaone,
        grove,
        hunyuan,
        bailing,
        cohere,
        gemma,
        hybrid,
        maple,
        mimo,
        minimax,
        step,
        deepseek,
        kimi,
        mistral,
        nomic,
        bailing3,
        dots3,
    )
    for entry in family.ARCHITECTURES
}

SHAPES: Mapping[str, Shape] = {
    shape.name: shape for shape in (*(entry.tiny for entry in ARCHITECTURES.values()), *REAL)
}


def recipe_of(shape: Shape, quant: str | None = None) -> Recipe:
    """Metadata and tensors of a model with these dimensions; experts as ``quant``, by default the shape's."""
    recipe = Recipe(shape, quant or shape.quant)
    ARCHITECTURES[shape.arch].fill(recipe)
    return recipe
