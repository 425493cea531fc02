"""What a request for vectors may ask of a model: refused is what would end in a failure far from its cause. Pure."""

from __future__ import annotations

from app.engine.embedding_request import EmbeddingRequest
from app.engine.request import RequestError
from slicing.pooling import VectorRecipe

MAX_TOLD = 20  # numbers of dimensions, in a refusal


def check_request(
    request: EmbeddingRequest, recipe: VectorRecipe, *, max_tokens: int, vocab_size: int
) -> None:
    """Raise RequestError for what cannot be done; texts are `input.0`, `input.1` ..."""
    _check_dimensions(request.dimensions, recipe)
    if not request.texts:
        raise RequestError("input", "invalid_value", "there is no text")
    for number, text in enumerate(request.texts):
        _check_text(text, f"input.{number}", max_tokens, vocab_size)


def _check_dimensions(dimensions: int | None, recipe: VectorRecipe) -> None:
    if dimensions is None or dimensions == recipe.size or dimensions in recipe.cuts:
        return
    if not recipe.cuts:
        text = f"this model was not trained for fewer dimensions than its {recipe.size}"
        raise RequestError("dimensions", "unsupported_parameter", text)
    most, known = max(recipe.cuts), sorted(recipe.cuts | {recipe.size})[:MAX_TOLD]
    told = f"1 to {most}" if len(recipe.cuts) == most else ", ".join(map(str, known))
    raise RequestError("dimensions", "invalid_value", f"this model's vectors can have {told} dimensions")


def _check_text(text: tuple[int, ...], param: str, max_tokens: int, vocab_size: int) -> None:
    if not text:
        raise RequestError(param, "invalid_value", "a text holds no tokens")
    if len(text) > max_tokens:
        message = (
            f"This model's maximum context length is {max_tokens} tokens, "
            f"but the text has {len(text)} tokens. Please reduce the length of the input."
        )
        raise RequestError(param, "context_length_exceeded", message)
    if max(text) >= vocab_size or min(text) < 0:
        raise RequestError(param, "invalid_value", "a text holds a token that the model does not know")
