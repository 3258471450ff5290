"""A task whose episodes are not all over: what a checkpoint keeps of it, and what goes on from there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlinf.agents.episodes.record import Call
from rlinf.data.sample import Prompt, Sample


@dataclass(frozen=True, slots=True, eq=False)
class OpenTask:
    """A task until all of its episodes are over; `gather` goes on with it in place of the prompt.

    An episode that had begun is run again, from its first line, and what it asks of the model is answered from the
    record as long as it asks what it asked then. So its tools run again.
    """

    prompt: Prompt
    """The task."""
    done: Mapping[int, Sequence[Sample]] = field(default_factory=dict)
    """What came of the episodes that are over, by index, without rewards of a judge."""
    failed: Mapping[int, str] = field(default_factory=dict)
    """Why the others that are over count as not drawn, by index."""
    left: Mapping[int, Sequence[Call]] = field(default_factory=dict)
    """Of those that are not over, what they have asked of the model; nothing where they had not begun."""

    @property
    def tokens(self) -> int:
        """Generated tokens that it holds."""
        samples = (sample for found in self.done.values() for sample in found)
        calls = (call for record in self.left.values() for call in record)
        return sum(sample.learned_tokens for sample in samples) + sum(call.tokens for call in calls)

    @property
    def oldest(self) -> int | None:
        """Version of the weights that made its oldest token; None where it holds none."""
        made = [sample.column("versions") for found in self.done.values() for sample in found]
        calls = (call for record in self.left.values() for call in record)
        made += [known.versions for call in calls if (known := call.answer or call.begun) is not None]
        return min((int(versions.min()) for versions in made if len(versions)), default=None)
