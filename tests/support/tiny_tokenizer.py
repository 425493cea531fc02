"""A small byte-level tokenizer with a chat template, made from nothing: for tests that need no real model."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ("hello", " world", " the", " quick", " brown", " fox", "STOP", " end")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' and not message.get('tool_call_id') %}"
    "{{ raise_exception('Tool messages need an id') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_tokenizer(folder: Path, *, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a model folder without weights: 256 bytes, a few words, three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    vocab |= {character: index + 3 for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        _add_word(word.replace(" ", "Ġ"), vocab, merges)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in list(vocab)[:3]])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    wrapped.chat_template = template
    wrapped.save_pretrained(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return folder


def _add_word(word: str, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    """Merge a word letter by letter from the left."""
    for end in range(2, len(word) + 1):
        if word[:end] not in vocab:
            vocab[word[:end]] = len(vocab)
            merges.append((word[: end - 1], word[end - 1]))
