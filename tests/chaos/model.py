"""The model that the soak asks: a small random llama in a folder, and what the whole of it answers."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from app.engine.tokenizer import ChatTokenizer
from tests.support.tiny_models import small_llama
from tests.support.tiny_tokenizer import write_tiny_tokenizer

NUM_LAYERS = 7
MAX_POSITIONS = 256
GAIN = (
    8.0  # random weights are small: only with larger ones does what a token sees change what comes after it
)


def write_model(
    folder: Path, *, hidden_size: int = 64, num_layers: int = NUM_LAYERS, max_positions: int = MAX_POSITIONS
) -> Path:
    """Write a model of seven layers, one of which stays at home; or one of another shape."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_tokenizer(folder)
    with small_llama(max_positions, vocab_size=320, hidden_size=hidden_size, num_layers=num_layers) as model:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".layers." in name and weight.dim() == 2:
                    weight.mul_(GAIN)
        model.config.eos_token_id = 2
        model.generation_config.eos_token_id = 2
        model.save_pretrained(folder)
    return folder


class WholeAnswers:
    """Greedy answers of the uncut model, by stock transformers."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._tokenizer = ChatTokenizer.load(folder)
        self._known: dict[tuple[str, int], str] = {}

    def greedy(self, text: str, num_tokens: int) -> str:
        """The text of a greedy answer to one user turn."""
        key = text, num_tokens
        if key not in self._known:
            ids = torch.tensor([self._tokenizer.render([{"role": "user", "content": text}])])
            with torch.inference_mode():
                out = self._model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
                )
            new = out[0, ids.shape[1] :].tolist()
            answer = self._tokenizer.answer_text(())
            pieces = [answer.push(token_id) for token_id in new if token_id != 2]
            self._known[key] = "".join([*pieces, answer.finish()])
        return self._known[key]


def long_answers(whole: WholeAnswers, count: int, num_tokens: int) -> dict[str, str]:
    """Prompts with their answers, such as do not end early, all different."""
    words = ["hello", "quick", "brown", "fox", "world", "end", "lazy", "dog", "jumps", "over", "river", "sea"]
    found = {f"{a} {b}": whole.greedy(f"{a} {b}", num_tokens) for a in words[:2] for b in words}
    by_text = {text: prompt for prompt, text in found.items()}
    longest = sorted(by_text, key=len, reverse=True)[:count]
    return {by_text[text]: text for text in longest}
