"""What a caller is told where nodes can never hold so much as an answer needs. Pure: numbers to words."""

from __future__ import annotations

from app.engine.request import GenerationRequest, RequestError


def no_room(room: int, request: GenerationRequest, needed: int) -> RequestError:
    """Name the numbers. `room` is what nodes can hold at most, `needed` what was asked of them: positions.

    Where an encoder read the prompt, positions are those of the answer alone: what it made of the prompt lies beside
    them.
    """
    memory_rows = 0 if request.encoded is None else request.encoded.memory_rows
    if memory_rows:
        text = (
            f"This model's maximum context length is {room} tokens of an answer here: so many its nodes have room for "
            f"beside the {memory_rows} rows that its encoder made of the prompt, but {needed} are needed. "
            "Please reduce max_tokens or the length of the prompt."
        )
        return RequestError("max_tokens", "context_length_exceeded", text)
    text = (
        f"This model's maximum context length is {room} tokens here, which is what its nodes have room for, "
        f"but the prompt is too long: the messages have {len(request.prompt_ids)} tokens and {needed} are needed "
        "with the answer. Please reduce the length of the messages or max_tokens."
    )
    return RequestError("messages", "context_length_exceeded", text)
