"""Environments that others wrote, as agents that bring their tasks with them; docs/environments-of-others.md.

In: the name of an environment of somebody's package. Out: an object that is an agent, `await environment(task, llm)`,
and has `tasks()` and `held_out()`: rows to learn from, and others to be evaluated on, where a run names no data. Its
class is made when a run is prepared, so making one starts nothing; what it needs is opened by `async with`.
"""

ENVIRONMENTS = {
    "openenv": "rlinf.agents.environments.openenv.OpenEnv",
    "reasoning_gym": "rlinf.agents.environments.reasoning_gym.ReasoningGym",
    "textarena": "rlinf.agents.environments.textarena.TextArena",
    "verifiers": "rlinf.agents.environments.verifiers.Verifiers",
}
"""Short names that `agent.function` takes for a dotted path."""
