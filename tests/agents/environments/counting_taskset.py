"""A taskset of verifiers for tests: how many sevens an answer of two characters has."""

import verifiers.v1 as vf


class Counting(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One number to answer."""

    @vf.reward
    async def sevens(self, trace) -> float:
        """Share of sevens among the first two characters."""
        return (trace.last_reply or "")[:2].count("7") / 2

    @vf.metric
    async def length(self, trace) -> float:
        """Characters."""
        return float(len(trace.last_reply or ""))


class Numbers(vf.Taskset[Counting, vf.TasksetConfig]):
    """The numbers from 0 to 99."""

    def load(self):
        for number in range(100):
            yield Counting(vf.TaskData(prompt=f"{number}?"), self.config.task)


__all__ = ["Numbers"]
