"""PPO with a critic: a second model learns what each half-written answer will earn, and the policy learns from that.

    python examples/ppo_with_critic.py            # a quarter of a minute on a CPU

A task, `4:25>`, says what it is worth, 4, and what to write backwards, 25. You will see how much the critic foresees of
the differences between returns (0%: no more than a constant would), and the reward.
"""

import itertools

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROBLEMS = [
    {"prompt": f"{worth}:{a}{b}>", "answer": f"{b}{a}", "worth": worth}
    for worth, a, b in itertools.product(range(1, 6), range(1, 6), range(1, 6))
]


def earned(response, answer, worth):
    """Each digit in its place earns half of what the task is worth."""
    return worth * sum(a == b for a, b in zip(response, answer, strict=False)) / 2


def told(step, metrics):
    """A callback, called after each step."""
    if step % 10 == 0:
        foreseen, reward = metrics["critic/explained_variance"], metrics["reward/mean"] / 3
        print(f"step {step:3}   foreseen {foreseen:4.0%} {bar(foreseen):20}   reward {reward:4.0%} {bar(reward)}")


def bar(share):
    return "#" * round(20 * max(0.0, share))


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        earned,
        PROBLEMS,
        tokenizer={"characters": "12345:>"},
        algorithm="ppo",  # clipped loss; advantages by GAE over tokens, whitened
        callbacks=[told],
        steps=60,
        prompts_per_step=40,
        group_size=4,
        epochs=2,
        max_new_tokens=2,
        lr=3e-3,
        critic={"lr": 3e-3, "head_start": 2},  # steps in which the critic learns alone
        run_dir="outputs/ppo_with_critic",
        log_every=1000,
    )
    print(result)
