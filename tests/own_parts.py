"""Parts of an algorithm, and rewards, as a user may write them."""

import time

from rlinf.algos import losses


def reinforce(batch, aggregation, weights):
    """The likelihood of answers, weighted by how good they were."""
    drawn_by = batch.need("old_logprobs")
    return losses.cispo(batch.logprobs, drawn_by, batch.need("advantages"), batch.mask, clip_low=1.0, clip_high=9.0)


def overlap(response, answer):
    """The share of the answer's characters that are in the response: something to learn from in a run's first steps."""
    return sum(character in response for character in answer) / len(answer)


def unhurried(response, answer):
    """The same, after a while in which nothing is computed."""
    time.sleep(0.05)
    return overlap(response, answer)
