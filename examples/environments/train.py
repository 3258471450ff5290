"""A model learns where others keep score: `python train.py tiny|DIRECTORY STEPS [environment …]`."""

import sys

import rlinf

TINY = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'user' else eos_token }}{% endfor %}"
OWN = {"tokenizer": {"characters": "".join(map(chr, range(32, 127))) + "\n"}, "lr": 2e-3, "model.dtype": "float32"}
SERVER = ".venv-environments/bin/python -m uvicorn server.app:app --app-dir echo --host {host} --port {port}"
ENVIRONMENTS = {
    "verifiers": {"environment": "marble_v1", "size": 64},  # pip install marble-v1
    "openenv": {"server": SERVER.split(), "turns": 2},  # openenv init echo
    "reasoning_gym": {"generators": ["letter_counting", "leg_counting", "chain_sum"], "instructions": None},
    "textarena": {"games": "GuessTheNumber-v0", "turns": 3},
}
model, steps, *functions = sys.argv[1:]
settings = {"steps": int(steps), "model.dtype": "bfloat16", "max_new_tokens": 8, "evaluation": {"problems": 4}}
if model == "tiny":
    model, settings = TINY, {**settings, **OWN, "data": {"chat": True, "chat_template": TEMPLATE}}
for function in functions or ENVIRONMENTS:
    agent = {"function": function, "args": ENVIRONMENTS[function]}
    rlinf.train(model, agent=agent, prompts_per_step=4, group_size=4, run_dir=f"outputs/{function}", **settings)
