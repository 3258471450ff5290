"""The single answers that one rank of a rollout has under way, by the names that their callers gave them.

Flows in: requests of `answer`. Flows out: completions; how far the others are. Who wakes whom: the engine wakes the
caller of each.
"""

from __future__ import annotations

from dataclasses import replace

from rlinf.engines.base import Completion, Engine, PartialAnswer, Request


class SingleAnswers:
    """Answers to single requests.

    Args:
        engine: answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._names: dict[int, str] = {}  # of requests under way, by id

    async def answer(self, request: Request, name: str | None) -> Completion:
        """Answer a request.

        Args:
            request: what is asked. An engine that cannot go on with its partial answer makes all of it.
            name: by which `partial` tells how far it is; None: it does not.

        Raises:
            ValueError, Exception: as `Engine.answer`.
        """
        if request.partial is not None and not self._engine.hands_over:
            request = replace(request, partial=None)
        if name is None:
            return await self._engine.answer(request)
        self._names[request.id] = name
        try:
            return await self._engine.answer(request)
        finally:
            del self._names[request.id]

    async def partial(self) -> dict[str, PartialAnswer]:
        """How far answers are, by name; those without a token are left out."""
        found: dict[str, PartialAnswer] = {}
        # One that ends while the engine is asked is not in what the engine says. Asking once more for those that were
        # not gives its completion the time to leave before this reply does.
        for _ in range(2):
            missing = {id: name for id, name in self._names.items() if name not in found}
            for request in await self._engine.partial(missing) if missing else ():
                if request.partial is not None:
                    found[missing[request.id]] = request.partial
        return found
