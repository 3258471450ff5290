"""GRPO in one call: a tiny new model learns to sort three digits, from nothing but "this share of places is right".

    python examples/grpo.py            # half a minute on a CPU; nothing is downloaded

You will see the reward of sampled answers rise, and what the model said before and after it had learned.
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
    {"prompt": "".join(digits) + ">", "answer": "".join(sorted(digits))}
    for digits in itertools.permutations("123456", 3)
]


def places(response, answer):
    """A reward: the share of digits that stand where they should."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / len(answer)


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        places,
        PROBLEMS[12:],
        evaluation=PROBLEMS[:12],  # never learned from
        tokenizer={"characters": "123456>"},
        algorithm="grpo",
        steps=60,
        prompts_per_step=32,
        group_size=8,  # answers to a problem; each is compared with the others
        epochs=2,
        max_new_tokens=3,
        lr=3e-3,
        run_dir="outputs/grpo",
        log_every=20,
        metrics={"live": "never"},
    )
    print(result)
    for before, after in zip(result.before.groups[:6], result.after.groups[:6], strict=True):
        prompt, (was,), (now,) = before.prompt, before.samples, after.samples
        print(f"  {prompt.text} said {was.text!r} before, {now.text!r} now, wanted {prompt.answer}")
