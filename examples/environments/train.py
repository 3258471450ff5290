"""A model learns where others keep score: `python train.py tiny|DIRECTORY STEPS SEED [environment …]`."""

import sys

import rlinf

TINY = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
SAYS = "{% for m in messages %}{{ m.content.split('THE RING')[-1][:330] }}{{ eos_token }}{% endfor %}"
OWN = {"tokenizer": {"characters": "".join(map(chr, range(32, 127))) + "\n"}, "data.chat_template": SAYS, "lr": 1e-3}
SERVER = ".venv-environments/bin/python -m uvicorn server.app:app --app-dir echo --host {host} --port {port}"
EASY = {"letter_counting": {"max_words": 5}, "leg_counting": {"min_animals": 1, "max_animals": 1}}
EASY |= {"chain_sum": {"max_terms": 2, "max_digits": 1}}
ENVIRONMENTS = {  # arguments, who plays in a warm-up of how many steps, and tokens of an answer
    "verifiers": ({"environment": "marble_v1", "size": 300, "columns": ["solution"]}, "players.layout", 80, 64),
    "openenv": ({"server": SERVER.split(), "turns": 2}, None, 0, 8),  # openenv init echo; 64 sessions in server/app.py
    "reasoning_gym": ({"generators": EASY, "instructions": "Answer with a number alone."}, None, 150, 4),  # its own
    "textarena": ({"games": "GuessTheNumber-v0", "turns": 6}, "players.bisect", 40, 8),
}
(model, steps, seed), own = sys.argv[1:4], {"prompts_per_step": 16, "data.chat": True, "evaluation.problems": 32}
for name in sys.argv[4:] or ENVIRONMENTS:
    args, player, worked, own["max_new_tokens"] = ENVIRONMENTS[name]
    own |= {"agent": {"function": name, "args": args, "player": player}, "run_dir": f"outputs/{name}-{seed}"}
    own |= {"steps": int(steps), "seed": int(seed), "sft": {"steps": worked, "batch_size": 32}}
    rlinf.train(TINY if model == "tiny" else model, **own, **(OWN if model == "tiny" else {"sft.lr": 5e-5, "lr": 1e-5}))
