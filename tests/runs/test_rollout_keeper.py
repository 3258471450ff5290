"""What a checkpoint keeps of half answers."""

import numpy as np

from rlinf.data.sample import Prompt
from rlinf.engines.base import PartialGroup, Request, Sampling
from rlinf.runs.roles import RolloutKeeper


def test_answers_that_came_as_part_of_their_group_are_not_made_again():
    prompt = Prompt(3, np.array([1, 2]))
    done = {index: Request(index, prompt.token_ids, Sampling(4)).ended("stop") for index in range(4)}
    left = {2: Request(2, prompt.token_ids, Sampling(4))}
    keeper = RolloutKeeper(lambda: None)

    def rest(*groups, received):
        kept = keeper.rest(tuple(PartialGroup(prompt, dict(done), dict(left)) for done, left in groups), received)
        return [(sorted(group.done), sorted(group.left)) for group in kept]

    first, later = {index: done[index] for index in (0, 1)}, {3: done[3]}
    assert rest((first, {}), (later, left), received=set()) == [([0, 1], []), ([3], [2])]
    assert rest((first, {}), (later, left), received={0, 1}) == [([3], [2])]
    assert rest(({**first, **later}, left), received={0, 1}) == [([3], [2])]  # split since the rollout was asked
