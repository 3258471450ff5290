"""A taskset of verifiers for tests: a sum that a tool adds up."""

import verifiers.v1 as vf


class Adding(vf.Toolset[vf.ToolsetConfig, vf.State]):
    """The tool."""

    TOOL_PREFIX = "sums"

    @vf.tool
    async def add(self, left: int, right: int) -> int:
        """Add two numbers."""
        return left + right


class Answer(vf.TaskData):
    """What is right."""

    answer: str


class Sum(vf.Task[Answer, vf.State, vf.TaskConfig]):
    """One sum."""

    @classmethod
    def toolsets(cls, config):
        return [Adding(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        """The last reply has the sum."""
        return float(self.data.answer in (trace.last_reply or ""))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """Ten sums."""

    def load(self):
        for number in range(10):
            yield Sum(Answer(prompt=f"{number} + 30?", answer=str(number + 30)), self.config.task)


__all__ = ["Adding", "Sums"]
if __name__ == "__main__":
    Adding.run()
