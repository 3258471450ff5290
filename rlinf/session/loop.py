"""The training loop of a session: steps as the user's program takes them, in place of a flow's.

In: what surrounds a step, from `TextLoop`. Out: the same files as of a configured run. What differs: nobody knows how
many steps there will be unless it was said, problems are optional, and checkpoints keep the program's own state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlinf.config.text import RunConfig
from rlinf.job.prepare import Prepared
from rlinf.job.text import TextLoop
from rlinf.metrics.run_directory import Checkpoint, RunDirectory
from rlinf.runtime.base.errors import UserError
from rlinf.runtime.system.system import ActorSystem


async def taken_by_the_program(step: Any, session: Any = None, **roles: Any) -> dict[str, float]:
    """Stands where a configured run has its flow."""
    raise UserError("session: its steps are taken by session.train, and by nobody else")


def no_problems() -> Any:
    """Stands where a configured run has its problems."""
    return iter(())


class SessionLoop(TextLoop):
    """What surrounds the steps of a session.

    Args:
        system, config, prepared, directory: see `TrainingLoop`.
        steps: how many there will be; None: the program decides.
        state: the program's own, kept by checkpoints as JSON.
    """

    def __init__(
        self,
        system: ActorSystem,
        config: RunConfig,
        prepared: Prepared,
        directory: RunDirectory,
        *,
        steps: int | None,
        state: dict[str, Any],
    ) -> None:
        super().__init__(system, config, prepared, directory)
        self.steps, self.state = steps, state
        self.notes = tuple(each for each in self.notes if not each.startswith(f"{no_problems.__name__}:"))
        self._saved = self._evaluated = 0  # after which step

    def queue(self) -> dict[str, Any]:
        try:
            json.dumps(self.state)
        except (TypeError, ValueError) as error:
            raise UserError(f"session.state cannot be kept by a checkpoint: {error}; put JSON values into it") from None
        return {**super().queue(), "state": self.state}

    async def restore(self, begun: Checkpoint) -> None:
        await super().restore(begun)
        state: Any = begun.queue.get("state", {})
        self.state.update(state)
        self._saved = self._evaluated = begun.step

    async def save(self, position: Mapping[str, Any] | None = None) -> None:
        await super().save(position)
        self._saved = self.done

    def evaluated(self, found: Any) -> dict[str, float]:
        self._evaluated = self.done
        return super().evaluated(found)

    async def ends(self) -> None:
        """Evaluate and save what the last steps came to, as the last step of a configured run does."""
        if self._evaluated < self.done and (found := await self.evaluate()) is not None:
            self.recorder.write(self.done, self.evaluated(found))
        if self._saved < self.done:
            await self.save()
