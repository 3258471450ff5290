"""An algorithm part of your own: an advantage that goes by rank, for a judge that now and then goes mad.

    python examples/custom_algorithm.py            # a third of a minute on a CPU

An answer is worth the share of 7s in it, but one in twenty is told that it was worth a hundred. You will see two runs
that differ in nothing but the advantage: GRPO's own, and the one below, which is a pure function of tensors.
"""

import random

import rlinf
from rlinf.rewards.base import trusted

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
STEPS = 30
DRAW = random.Random(0)


def by_rank(answers, penalty, reduce):
    """The share of its group that an answer beats less the share that beats it, so between -1 and 1.

    `answers.rewards` and `answers.groups` are [answers]: rewards, and whose answers are to one prompt.
    """
    same = answers.groups[:, None] == answers.groups[None, :]
    more = (answers.rewards[:, None] - answers.rewards[None, :]).sign() * same
    return more.sum(1) / same.sum(1)


@trusted  # neither hangs nor crashes: judged in this process, so that all draws come from one generator, in order
def sevens(response):
    return response.count("7") / 6


@trusted
def mad():
    return 100.0 * (DRAW.random() < 0.05)


def run(name, algorithm):
    result = rlinf.train(
        MODEL,
        [sevens, mad],
        [{"prompt": f"{n}:", "answer": ""} for n in range(10)],
        tokenizer={"characters": "0123456789:"},
        algorithm=algorithm,
        steps=STEPS,
        prompts_per_step=10,
        group_size=16,
        max_new_tokens=6,
        lr=3e-3,
        run_dir=f"outputs/custom_algorithm/{name}",
        log_every=1000,
    )
    return result.history("scores/sevens")


if __name__ == "__main__":
    usual = run("grpo", "grpo")
    ranked = run("by_rank", {"name": "grpo", "advantage": by_rank})  # `loss` may be a function, too
    print("step   share of 7s: GRPO's advantage     by rank")
    for step in range(4, STEPS, 5):
        one, other = usual[step], ranked[step]
        print(f"{step + 1:4}   {one:4.0%} {'#' * round(20 * one):20}   {other:8.0%} {'#' * round(20 * other)}")
