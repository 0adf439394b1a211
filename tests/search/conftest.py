"""Fixtures of the tests of search."""

import pytest

from pfml.evaluation import embed


@pytest.fixture
def embedded(monkeypatch):
    """How many images pass through the backbone, shard by shard."""
    counts = []

    def counting(embedder, source, **options):
        counts.append(len(source))
        return embed(embedder, source, **options)

    monkeypatch.setattr("pfml.search.embedding.embed", counting)
    return counts
