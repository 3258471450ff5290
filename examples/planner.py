"""The planner: a few measured steps on this machine, and from them the best placement on devices that you do not have.

    python examples/planner.py            # a quarter of a minute on a CPU

Every run leaves `profile.json`: what each role costs, read off the spans of its ordinary steps. You will see a table of
the best plan of each mode on 2, 8 and 64 devices like this one. All of those seconds are simulated, none is measured.
"""

import rlinf
from rlinf.flows.grpo import grpo
from rlinf.placement.auto import choose
from rlinf.placement.hardware import Devices
from rlinf.placement.profile import load

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def sevens(response):
    return response.count("7") / 16


if __name__ == "__main__":
    result = rlinf.train(
        MODEL,
        sevens,
        [{"prompt": f"{n}:", "answer": ""} for n in range(10)],
        tokenizer={"characters": "0123456789:"},
        steps=12,
        prompts_per_step=16,
        group_size=16,
        max_new_tokens=16,
        epochs=2,
        run_dir="outputs/planner",
        log_every=1000,
    )
    profile = load(result.run_dir / "profile.json")
    for devices in (2, 8, 64):
        chosen = choose(profile, Devices({"gpu": devices}), grpo, extrapolate=True)
        for row in chosen.best_of_modes:
            sizes = ", ".join(f"{name} {len(role.devices) or 'beside'}" for name, role in row.plan.roles.items())
            bar = "#" * round(100 * row.seconds)
            print(f"{devices:3} devices {row.mode:14} {sizes:40} {row.seconds:6.3f} s {bar}")
