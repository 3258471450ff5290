"""An environment of verifiers for tests: three attempts at a task, ranked against each other, and a judge that is not
learned from."""

import verifiers.v1 as vf


class RankingConfig(vf.EnvConfig):
    """Who takes part."""

    agent: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()


class Ranking(vf.Env[RankingConfig]):
    """Attempts that are compared."""

    async def setup(self, agents):
        """The judge is somebody else."""
        agents.judge.trainable = False

    async def run(self, task, agents):
        """Have all of them answer."""
        for agent in (agents.agent, agents.judge, agents.agent, agents.agent):
            await agent.run(task)

    async def finalize(self, task, episode):
        """Reward each attempt by the share of the others that it beats, half as much as its own answer."""
        attempts = [trace for trace in episode.traces if trace.agent.trainable]
        before = [trace.reward for trace in attempts]
        for trace, reward in zip(attempts, before, strict=True):
            beaten = sum(other < reward for other in before) / (len(before) - 1)
            trace.record_reward("rank", beaten, weight=0.5)


__all__ = ["Ranking"]
