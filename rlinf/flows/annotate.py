"""What a reference policy says of a batch that is there as a whole, by all of its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Sequence
from itertools import chain
from typing import Any

from rlinf.data.sample import Group


async def told(groups: Sequence[Group], reference: Any) -> list[Group]:
    """Groups with the reference's log-probs, in the order of their ids.

    Each rank gets a share that does not depend on when another is done: the last bits of a log-prob depend on what is
    computed beside it, and a run is to repeat bit for bit.

    Args:
        groups: all of the batch.
        reference: the role.
    """
    ranks = len(reference.hosts)
    shares = (groups[rank::ranks] for rank in range(ranks))
    found = await asyncio.gather(
        *(_all(reference[rank].logprobs(list(share))) for rank, share in enumerate(shares) if share)
    )
    return sorted(chain.from_iterable(found), key=lambda group: group.id)


async def _all(groups: AsyncIterable[Group]) -> list[Group]:
    return [group async for group in groups]
