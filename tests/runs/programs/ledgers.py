"""Flows, agents and rewards that do other things with samples than train each once."""


async def never(step, rollout, judge):
    groups = await judge.score.map(rollout.generate(step.prompts, n=step.group_size)).collect()
    return {"groups": len(groups)}


async def twice(step, rollout, judge, trainer):
    groups = await judge.score.map(rollout.generate(step.prompts, n=step.group_size)).collect()
    await trainer.train(groups)
    return await trainer.train(groups)


async def in_halves(step, rollout, judge, trainer):
    groups = await judge.score.map(rollout.generate(step.prompts, n=step.group_size)).collect()
    await trainer.train(groups[::2])
    return await trainer.train(groups[1::2])


async def half(step, rollout, judge, trainer):
    groups = await judge.score.map(rollout.generate(step.prompts, n=step.group_size)).collect()
    return await trainer.train(groups[::2])


async def failing(task, llm):
    """Every third attempt raises."""
    reply = await llm.generate(task.text, max_new_tokens=4)
    if len(reply.text) % 3 == 0:
        raise RuntimeError("so it goes")
    return float(len(reply.text))


async def coarse(task, llm):
    """Most attempts are worth the same."""
    reply = await llm.generate(task.text, max_new_tokens=4)
    return float(len(reply.text) % 5 == 0)


def picky(response, answer):
    """Likes answers of an odd length, and those of evaluations, which an untrained model makes as long as it may."""
    if len(response) % 2 == 0 and len(response) < 4:
        raise RuntimeError("so it goes")
    return float(len(response))
