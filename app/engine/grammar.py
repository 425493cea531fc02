"""Grammars that an answer is held to, over a model's own tokens: what may come next, and what must.

A grammar is compiled once, by llguidance; each answer walks it by itself (`GrammarWalk`). Where it leaves no choice the
tokens are known before the model has seen the ones before them: they ride along with the next step. Which these are
follows from the tokens before alone, so an answer depends on its seed as any other does. Knows neither models nor HTTP.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from transformers import PreTrainedTokenizerBase

from app.engine.request import RequestError

# Fuel is a measure of work: compiling ends within about a second on one core, a token's mask within about 50 ms.
LIMITS = LLParserLimits(
    initial_lexer_fuel=3_000_000,
    step_lexer_fuel=500_000,
    step_max_items=100_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
MAX_CHARS = 1 << 20  # of one grammar, in which each tool has its schema
MAX_KEPT = 16  # compiled grammars: programs ask with the same few schemas again and again
MAX_REASON = 200  # characters
UNKNOWN_KEYS = "Unimplemented keys: "
PLACE = re.compile(
    r"^at \d+\(\d+\): (failed to compile JSON schema:?\s*)?"
)  # in the rules, which nobody sees
TOO_COMPLEX = ("fuel", "too complex", "too large", "too big", "too many", "limit exceeded")


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A piece of a grammar that can be wrong by itself, and the field that it came from."""

    param: str
    lark: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class GrammarRules:
    """A grammar to compile, in llguidance's form of Lark. `param` is the field that asked for it."""

    param: str
    lark: str = field(repr=False)
    parts: tuple[GrammarPart, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class Ends:
    """How an answer ends: by any of `ids`, by `first` where there is no choice. `vocab_size` is the model's."""

    first: int
    ids: frozenset[int]
    vocab_size: int


class Grammar:
    """A compiled grammar. Shared by any number of answers."""

    def __init__(self, matcher: LLMatcher, ends: Ends, param: str) -> None:
        self.param = param
        self._matcher = matcher
        self._ends = ends

    def walk(self) -> GrammarWalk:
        """Begin an answer."""
        return GrammarWalk(self._matcher.deep_copy(), self._ends, self.param)


class GrammarWalk:
    """Where one answer stands in its grammar. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, ends: Ends, param: str) -> None:
        self._matcher = matcher
        self._ends = ends
        self._param = param
        self._forced: deque[int] | None = None  # None: not begun

    @property
    def is_forced(self) -> bool:
        """Whether the next token leaves no choice."""
        return bool(self._ahead())

    def masked(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of `logits` [vocab] with -inf for what cannot come next; at least one token is left.

        Raises `RequestError` where the grammar becomes too complex to follow.
        """
        forced = self._ahead()
        if forced:
            return _only(logits, forced[0])
        allowed = self._allowed(logits.shape[0])
        return torch.where(torch.from_numpy(allowed), logits.detach().to("cpu", torch.float32), -torch.inf)

    def take(self, token_id: int) -> None:
        """Move on by a token that `masked` allowed."""
        forced = self._ahead()
        if forced:
            assert forced[0] == token_id, "no other token was allowed"
            forced.popleft()
        elif token_id not in self._ends.ids:
            self._matcher.consume_token(token_id)
            self._force(forced)

    def ahead(self, most: int) -> tuple[int, ...]:
        """Return up to `most` of the tokens that must come next, the end of the answer left out."""
        forced = self._ahead()
        known = list(forced)[:-1] if self._reaches_end(forced) else list(forced)
        return tuple(known[: max(0, most)])

    def rest(self) -> tuple[int, ...]:
        """Return all that is left of the answer, its end token included, where it is known; else nothing."""
        forced = self._ahead()
        return tuple(forced) if self._reaches_end(forced) else ()

    def _reaches_end(self, forced: deque[int]) -> bool:
        return bool(forced) and forced[-1] in self._ends.ids

    def _ahead(self) -> deque[int]:
        if self._forced is None:
            self._forced = deque()
            self._force(self._forced)
        return self._forced

    def _force(self, forced: deque[int]) -> None:
        """Find the tokens that must come next."""
        known = self._matcher.compute_ff_tokens()
        if known and max(known) < self._ends.vocab_size:
            self._matcher.consume_tokens(known)
            forced.extend(known)
        self._check()
        if self._matcher.is_stopped():
            forced.append(self._ends.first)

    def _allowed(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of `size` tokens may come next. [size]"""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        allowed = np.zeros(size, dtype=np.bool_)
        known = np.unpackbits(bits, bitorder="little")[:size]
        allowed[: len(known)] = known
        if not allowed.any():
            allowed[self._ends.first] = (
                True  # nothing that the model has can follow: end rather than break the form
            )
        return allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(self._param, "grammar_too_complex", "the schema became too complex to follow")


class GrammarCompiler:
    """Compiles grammars over one model's tokenizer. Safe to use from several threads; slow: use one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._lock = threading.Lock()
        self._over: dict[int, LLTokenizer] = {}  # by size of the vocabulary
        self._kept: OrderedDict[tuple[int, str], LLMatcher] = OrderedDict()

    def compile(self, rules: GrammarRules, vocab_size: int) -> Grammar:
        """Compile a grammar over the model's first `vocab_size` tokens.

        Raises `RequestError` that names the field, and the keyword that is not supported.
        """
        ends = frozenset(token_id for token_id in self._end_ids if token_id < vocab_size)
        if len(rules.lark) > MAX_CHARS:
            text = f"schemas have at most {MAX_CHARS} characters together"
            raise RequestError(rules.param, "grammar_too_complex", text)
        if not ends:
            raise RequestError(
                rules.param, "unsupported_parameter", "the model has no token that ends an answer"
            )
        own = self._tokenizer.eos_token_id
        end_id = own if own in ends else min(ends)
        with self._lock:  # one at a time: a burst of large schemas leaves the other cores alone
            over = self._tokens(vocab_size, end_id, ends, rules.param)
            matcher = self._matcher(rules, over, vocab_size)
        return Grammar(matcher, Ends(end_id, ends, vocab_size), rules.param)

    def is_special(self, token_id: int, vocab_size: int) -> bool:
        """Whether a token is one that grammars name by its id, since no text of theirs ever makes it."""
        ends = sorted(token_id for token_id in self._end_ids if token_id < vocab_size) or [0]
        with self._lock:
            over = self._tokens(vocab_size, ends[0], frozenset(ends), "tools")
        return over.is_special_token(token_id)

    def _matcher(self, rules: GrammarRules, over: LLTokenizer, vocab_size: int) -> LLMatcher:
        key = vocab_size, rules.lark
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        matcher = LLMatcher(over, LLMatcher.grammar_from_lark(rules.lark), log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise _refusal(rules, matcher.get_error(), over)
        _try(matcher, rules.param)
        self._kept[key] = matcher
        if len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return matcher

    def _tokens(self, vocab_size: int, end_id: int, ends: frozenset[int], param: str) -> LLTokenizer:
        if vocab_size not in self._over:
            size = max(vocab_size, *(token_id + 1 for token_id in self._tokenizer.get_vocab().values()))
            ordered = [end_id, *sorted(ends - {end_id})]
            try:
                made = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ordered)  # type: ignore[arg-type]
            except Exception:  # foreign code over foreign files: whatever it does is a refusal
                text = "grammars cannot be laid over this model's tokenizer"
                raise RequestError(param, "unsupported_parameter", text) from None
            self._over[vocab_size] = made
        return self._over[vocab_size]


def _try(matcher: LLMatcher, param: str) -> None:
    """Look for the first token once: what is too complex to begin is refused before anything is computed."""
    tried = matcher.deep_copy()
    tried.consume_tokens(tried.compute_ff_tokens())
    tried.compute_bitmask()
    if tried.is_error():
        raise RequestError(param, "grammar_too_complex", "the schema is too complex")


def _only(logits: torch.Tensor, token_id: int) -> torch.Tensor:
    row = torch.full(logits.shape, -torch.inf)
    row[token_id] = logits[token_id]
    return row


def _refusal(rules: GrammarRules, reason: str, over: LLTokenizer) -> RequestError:
    """Name the part that is wrong, with its own reason."""
    for part in rules.parts:
        if own := LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(part.lark), over, limits=LIMITS):
            return _told(part.param, own)
    return _told(rules.param, reason)


def _told(param: str, reason: str) -> RequestError:
    _, found, keys = reason.partition(UNKNOWN_KEYS)
    if found:
        names = ", ".join(_names_of(keys))
        return RequestError(param, "unsupported_parameter", f"keywords that are not supported: {names}")
    if "regex parse error" in reason:
        text = "a 'pattern' that is no regular expression, or looks around (which is not supported)"
        return RequestError(param, "unsupported_parameter", text)
    if "Resource '" in reason:
        return RequestError(param, "unsupported_parameter", "a '$ref' that leads out of the schema")
    if any(word in reason.lower() for word in TOO_COMPLEX):
        return RequestError(param, "grammar_too_complex", "the schema is too complex")
    first = PLACE.sub("", reason.strip()).partition("\n")[0] or "it cannot be compiled"
    return RequestError(param, "invalid_value", f"the schema cannot be followed: {first[:MAX_REASON]}")


def _names_of(keys: str) -> Sequence[str]:
    """The keywords of a list like `["not", "if"]`."""
    return [name[:40] for name in keys.partition("]")[0].strip(' ["').replace('"', "").split(", ")]
