"""A model learns where others keep score: `python train.py tiny|DIRECTORY STEPS [environment …]`."""

import sys

import rlinf

TINY = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'user' else eos_token }}{% endfor %}"
CHARACTERS = {"characters": "".join(map(chr, range(32, 127))) + "\n"}
PYTHON = ".venv-environments/bin/python"  # of `make environments`, with `pip install marble-v1` and `openenv init echo`
SERVER = f"{PYTHON} -m uvicorn server.app:app --app-dir echo --host {{host}} --port {{port}}"
ENVIRONMENTS = {
    "verifiers": {"environment": "marble_v1", "size": 64},
    "openenv": {"server": SERVER.split(), "turns": 2},
    "reasoning_gym": {"generators": ["letter_counting", "leg_counting", "chain_sum"], "instructions": None},
    "textarena": {"games": "GuessTheNumber-v0", "turns": 3},
}
model, steps, *functions = sys.argv[1:]
tiny = {"tokenizer": CHARACTERS, "lr": 2e-3, "data": {"chat": True, "chat_template": TEMPLATE}}
settings = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 8,
    "evaluation": {"problems": 4},
    "steps": int(steps),
}
settings |= tiny if model == "tiny" else {"model.dtype": "bfloat16"}
for function in functions or ENVIRONMENTS:
    agent = {"function": function, "args": ENVIRONMENTS[function]}
    rlinf.train(TINY if model == "tiny" else model, agent=agent, run_dir=f"outputs/{function}", **settings)
