"""The exactness ledger as a table: families by cuts, the largest difference of any logit, and equal tokens."""

from __future__ import annotations

from bench.report import Report
from tests.support.families import FAMILIES, VOCAB_SIZE, tiny_config, tiny_model, token_ids
from tests.support.ledger import GREEDY, SEEDED, Cut, ModelInParts, play

CASES = (
    (Cut((3,)), 0, GREEDY),
    (Cut((2, 4), last_local=1), 7, SEEDED),
    (Cut((1, 2, 4), first_local=0), 64, GREEDY),
    (Cut((2, 4), first_local=0, has_remote_ends=True), 1, SEEDED),
)
PROMPT_ROWS = 70
NUM_TOKENS = 6


def measure_ledger(report: Report) -> None:
    """Every family of the tests over a few cuts; `tests/test_exactness.py` holds the whole grid."""
    report.section("ledger")
    prompt = token_ids(PROMPT_ROWS)
    for family in FAMILIES:
        model = ModelInParts(tiny_model(tiny_config(family)))
        worst, same = 0.0, True
        for cut, chunk, sampling in CASES:
            whole = play(model.start_whole(), prompt, chunk, sampling, VOCAB_SIZE, NUM_TOKENS)
            parts = play(model.start(cut), prompt, chunk, sampling, VOCAB_SIZE, NUM_TOKENS)
            pairs = zip(whole.logits, parts.logits, strict=True)
            worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
            same = same and whole.token_ids == parts.token_ids
        report.add("ledger", family, {"max difference": worst, "same tokens": same}, "", "0, True")
