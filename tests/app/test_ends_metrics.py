"""What the ends computed, as Prometheus reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from app.ends_metrics import EndsMetrics
from app.engine.request import KnownModel, ModelStatus
from slicing.batching import BatchCounts


def scraped(*models: KnownModel) -> str:
    registry, library = CollectorRegistry(), SimpleNamespace(models=lambda: models)
    told: Any = library
    registry.register(EndsMetrics(told))
    return generate_latest(registry).decode()


def test_rows_that_shared_a_batch_are_a_histogram() -> None:
    counts = BatchCounts()
    for works, rows in ((1, 1), (1, 1), (3, 3), (8, 40)):
        counts.add(works, rows, has_piece=False)
    text = scraped(KnownModel("m", ModelStatus("ready", 4), 0, 64, ends=counts))
    assert 'diffuse_ends_batch_rows_bucket{le="1.0",model="m"} 2.0' in text
    assert 'diffuse_ends_batch_rows_bucket{le="3.0",model="m"} 3.0' in text
    assert 'diffuse_ends_batch_rows_bucket{le="63.0",model="m"} 4.0' in text
    assert 'diffuse_ends_batch_rows_count{model="m"} 4.0' in text
    assert 'diffuse_ends_batch_rows_sum{model="m"} 45.0' in text
    assert 'diffuse_ends_works_total{model="m"} 13.0' in text


def test_a_model_whose_ends_are_not_here_tells_nothing() -> None:
    assert 'model="' not in scraped(KnownModel("m", ModelStatus("available", 4), 0, 64))
