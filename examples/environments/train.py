"""A model learns where others keep score: `python train.py tiny|DIRECTORY STEPS [environment …]`."""

import sys

import rlinf

TINY = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ '\n' if m.role == 'user' else eos_token }}{% endfor %}"
OWN = {"lr": 2e-3, "data": {"chat": True, "chat_template": TEMPLATE}}
OWN |= {"tokenizer": {"characters": "".join(map(chr, range(32, 127))) + "\n"}}
REAL = {"rollout.dtype": "bfloat16", "trainer.dtype": "bfloat16"}
SETTINGS = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "evaluation": {"problems": 4}}
SERVER = ".venv-environments/bin/python -m uvicorn server.app:app --app-dir echo --host {host} --port {port}"
THREE = ["letter_counting", "leg_counting", "chain_sum"]
ENVIRONMENTS = {
    "verifiers": {"environment": "marble_v1", "size": 64},  # pip install marble-v1
    "openenv": {"server": SERVER.split(), "turns": 2},  # openenv init echo; 64 sessions in server/app.py
    "reasoning_gym": {"generators": THREE, "instructions": "Answer with a number alone."},
    "textarena": {"games": "GuessTheNumber-v0", "turns": 3},
}
model, SETTINGS["steps"], *functions = sys.argv[1], int(sys.argv[2]), *sys.argv[3:]
for function in functions or ENVIRONMENTS:
    own = {"agent": {"function": function, "args": ENVIRONMENTS[function]}, "run_dir": f"outputs/{function}"}
    rlinf.train(TINY if model == "tiny" else model, **own, **SETTINGS, **(OWN if model == "tiny" else REAL))
