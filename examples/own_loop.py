"""Roles by hand: a loop of your own over a rollout, a judge and a trainer, without a configuration or a run directory.

    python examples/own_loop.py                             # seconds on a CPU
    torchrun --nproc-per-node 2 examples/own_loop.py        # the trainer in a process of its own

A model of a few thousand weights is rewarded for every 7 that it writes. You will see what it writes.
"""

import itertools

import numpy as np

import rlinf
from rlinf import ActorSystem, Judge, Prompt, Rollout, Trainer

MODEL = {
    "model": {
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "tokenizer": {"characters": "0123456789"},
    "seed": 0,  # equal weights to begin with
}


def sevens(response):
    return response.count("7") / 6


async def main(system: ActorSystem):
    rollout = await system.spawn(Rollout, hosts=[0], name="rollout", max_new_tokens=6, **MODEL)
    judge = await system.spawn(Judge, hosts=[0], name="judge", reward=sevens, isolate="never")
    trainer = await system.spawn(Trainer, hosts=[system.hosts - 1], name="trainer", algorithm="rloo", lr=5e-3, **MODEL)

    numbers = itertools.count()
    for step in range(31):
        prompts = [Prompt(next(numbers), np.array([3 + n]), text=str(n)) for n in range(8)]
        answers = rollout.generate(prompts, n=8)  # a Stream: groups appear as they finish
        metrics = await trainer.train(judge.score.map(answers))  # scored and learned from while others are generated
        await rollout.load(trainer.weights())  # a promise: the weights go from one role to the other
        if step % 5 == 0:
            said = await rollout.generate(prompts[:4], n=1).collect()
            texts = "  ".join(f"{group.samples[0].text:8}" for group in said)
            print(f"step {step:2}   reward {metrics['reward/mean']:.2f}   it writes {texts}")


if __name__ == "__main__":
    rlinf.run(main, hosts=1)
