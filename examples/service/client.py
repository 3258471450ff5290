"""Reinforcement learning against a training service, by the official client of the Tinker API.

    rlinf serve --config configs/serve/tiny.yaml            # prints what follows, with a key
    TINKER_BASE_URL=… TINKER_API_KEY=… python examples/service/client.py

The model is to write as many sevens as it can. This program holds the loop alone: it needs `pip install tinker`, no GPU
and nothing of rlinf.
"""

import os

import tinker

STEPS, GROUP, LONGEST = int(os.environ.get("STEPS", "20")), 16, 8


def reward(text: str) -> float:
    return text.count("7") / LONGEST


def datum(prompt: list[int], answer: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """An answer to learn from: what is read is the prompt, what is learned the answer."""
    ids = [*prompt, *answer.tokens]
    before = [0.0] * (len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": ids[1:],
            "logprobs": [*before, *answer.logprobs],
            "advantages": [*before, *[advantage] * len(answer.tokens)],
        },
    )


def main() -> None:
    service = tinker.ServiceClient()
    (base,) = tinker.RestClient().get_server_capabilities().result().supported_models
    model = service.create_lora_training_client(base_model=base.model_name, rank=8, seed=0).result()
    tokenizer = model.get_tokenizer()
    prompts = [tokenizer.encode(f"{number}?") for number in range(8)]
    params = tinker.SamplingParams(max_tokens=LONGEST, temperature=1.0)
    for step in range(STEPS):
        sampler = model.save_weights_and_get_sampling_client().result()
        asked = [sampler.sample(tinker.ModelInput.from_ints(ids), GROUP, params) for ids in prompts]
        data, total = [], 0.0
        for ids, answers in zip(prompts, (each.result().sequences for each in asked), strict=True):
            rewards = [reward(tokenizer.decode(each.tokens)) for each in answers]
            mean = sum(rewards) / GROUP
            total += mean
            data += [datum(ids, each, r - mean) for each, r in zip(answers, rewards, strict=True) if r != mean]
        if data:
            learned = model.forward_backward(data, "ppo")  # both are sent before either is waited for
            taken = model.optim_step(tinker.AdamParams(learning_rate=5e-3))
            learned.result()
            taken.result()
        print(f"step {step}: reward {total / len(prompts):.3f}, {len(data)} answers to learn from")
    print(model.save_state("sevens").result().path)


if __name__ == "__main__":
    main()
