"""Rewards of your own: two, with weights; one of them hangs now and then, as code that judges code does.

    python examples/custom_reward.py            # a quarter of a minute on a CPU

The model is to write a number of three digits that is divisible by the one it is given, and whose digits differ. You
will see both rewards rise, and how many answers a reward hung on: those are counted, and not scored 0.
"""

import time

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def divisible(response, answer):
    """A reward takes what it names: the response, the answer, and any column of the data."""
    if response.startswith("99"):
        time.sleep(3600)  # it runs in a process of its own, which is ended after `timeout` seconds and replaced
    return float(response.isdigit() and int(response) % int(answer) == 0)


def different(response):
    return len({*response} & {*"0123456789"}) / 3


def told(step, metrics):
    """A callback, called after each step."""
    if step % 10 == 0:
        first, second = metrics["scores/divisible"], metrics["scores/different"]
        hung = metrics["outcomes/timeout"] * metrics["samples"]
        bar = "#" * round(20 * first)
        print(f"step {step:3}   divisible {first:5.1%} {bar:20}   different {second:5.1%}   hung {hung:.0f}")


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        [(divisible, 1.0), (different, 2.0)],
        [{"prompt": f"{n}:", "answer": str(n)} for n in range(2, 10)],
        tokenizer={"characters": "0123456789:"},
        reward={"timeout": 0.5},
        callbacks=[told],
        steps=40,
        prompts_per_step=8,
        group_size=32,
        epochs=2,
        max_new_tokens=3,
        lr=3e-3,
        run_dir="outputs/custom_reward",
        log_every=1000,
    )
    print(result)
