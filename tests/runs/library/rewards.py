"""Rewards of the tests, in a module that the processes that score import within milliseconds."""


def right(response, answer):
    return float(response[:1] == answer)


def trl_style(completions, **kwargs):
    return [0.1 * len(completion) for completion in completions]
