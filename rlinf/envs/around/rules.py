"""How episodes begin and end, and by which seeds they start."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf.data.rng import mix

HELD_OUT = (1 << 31) - (1 << 21)
"""Seeds from here on are kept for evaluation: two million, and one in a thousand of all."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How episodes begin and end, and how much of them is seen."""

    seed: int = 0
    """Of all starts."""
    group_size: int = 1
    """So many neighbouring environments begin their episodes of equal number alike."""
    auto_reset: bool = True
    """After a chunk in which an episode ended, the next one begins; otherwise the environment waits for `reset`."""
    chunks: int | None = None
    """So many chunks follow on a `reset`, and after the last one no episode is begun that nobody would act in; None: it
    is not known."""
    ignore_terminations: bool = False
    """Episodes go on when their task ends, so that all last until their time limit."""
    max_steps: int | None = None
    """Steps after which an episode is cut off; None for the simulator's own limit."""
    frame_stack: int = 1
    """So many last observations are seen at once; see `FrameStack`."""
    held_out: bool = False
    """Begin episodes by seeds that are kept for evaluation: no other environment ever draws one of them."""

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size={self.group_size} must be at least 1")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps={self.max_steps} must be at least 1")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"chunks={self.chunks} must be at least 1")
        if self.frame_stack < 1:
            raise ValueError(f"frame_stack={self.frame_stack} must be at least 1")

    def seed_of(self, epoch: int, env: int, episode: int) -> int:
        """Seed of an episode's start, from 0 to 2^31 - 1, which is what every simulator takes; from `HELD_OUT` on for
        episodes that are held out, and otherwise below.

        Args:
            epoch: that environments were reset with.
            env: environment, counted over all workers and slices.
            episode: its number in the epoch.
        """
        drawn = mix(self.seed, epoch, env // self.group_size, episode) >> 32
        return HELD_OUT + drawn % ((1 << 31) - HELD_OUT) if self.held_out else drawn % HELD_OUT
