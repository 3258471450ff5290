"""Asynchronous training: answers for the next step are generated and judged while this one is learned from.

    python examples/asynchronous.py            # a third of a minute on a CPU

The judge takes its time, as one that asks a server does. You will see the same task learned by two flows that differ in
two lines: steps of the second do not wait for the judge, and no token that it learns is older than the bound.
"""

import asyncio
import statistics

import rlinf

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FLOWS = {"grpo": {}, "grpo_async": {"staleness": {"max": 1}}}


async def slow_judge(response):
    """An async reward: all answers that wait are judged side by side."""
    await asyncio.sleep(0.05)
    return response.count("7") / 6


def learned(flow, settings):
    return rlinf.train(
        MODEL,
        slow_judge,
        [{"prompt": f"{n}:", "answer": ""} for n in range(10)],
        flow=f"rlinf.flows.{flow}",
        tokenizer={"characters": "0123456789:"},
        steps=30,
        prompts_per_step=10,
        group_size=16,
        max_new_tokens=6,
        epochs=2,
        lr=3e-3,
        run_dir=f"outputs/asynchronous/{flow}",
        log_every=1000,
        **settings,
    )


if __name__ == "__main__":
    results = {flow: learned(flow, settings) for flow, settings in FLOWS.items()}
    print("flow          s/step                        reward         oldest token, in versions")
    for flow, result in results.items():
        step, reward = statistics.median(result.history("timing/step")), result.history("reward/mean")
        bar, oldest = "#" * round(80 * step), max(result.history("staleness/max"))
        print(f"{flow:12} {step:6.2f} {bar:24} {reward[0]:.2f} -> {reward[-1]:.2f} {oldest:10.0f}")
