"""OpenSearch passes the tests of all stores, on a real server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from penstock.testing.opensearch import OpenSearch, opensearch_home
from penstock.testing.sinks import SinkKit, Store

pytestmark = pytest.mark.skipif(opensearch_home() is None, reason="make opensearch-jars")
_NAMES = count()


@pytest.fixture(scope="module")
def server() -> Iterator[OpenSearch]:
    with OpenSearch() as running:
        yield running


class TestOpenSearch(SinkKit):
    @pytest.fixture
    def store(self, server: OpenSearch) -> Store:
        return Store(f"opensearch+{server.url}/t{next(_NAMES)}")
