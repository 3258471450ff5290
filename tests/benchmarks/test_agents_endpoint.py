"""The benchmark of the endpoint asks what it says, and counts every call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.agents_endpoint import SESSIONS, directly, over_http


async def test_both_ways_of_asking_take_the_engine_s_time_and_more():
    pytest.importorskip("aiohttp")
    direct, _ = await directly(0.01, 2)
    with ThreadPoolExecutor(1) as pool:
        http, _ = await over_http(0.01, 2, pool)
    for took in (direct, http):
        assert len(took) == 2 * SESSIONS
        assert min(took) >= 0.01
