"""A script as users write it: rewards in the main program, one of which no other process can be sent."""

import sys
import threading

import rlinf

ALPHABET = {"characters": "0123456789>"}
MODEL = {
    "model_type": "qwen2", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
ROWS = [{"prompt": f"{first}{second}>", "answer": str(first)} for first in range(10) for second in range(10)]
LOCK = threading.Lock()


def right(response, answer):
    return float(response[:1] == answer)


def locked():
    guard = threading.Lock()  # a closure over this cannot be pickled

    def short(response):
        with guard:
            return 1.0 / (1 + len(response))

    return short


result = rlinf.train(
    MODEL, [right, (locked() if sys.argv[2] == "locked" else lambda response: 1.0 / (1 + len(response)), 0.5)], ROWS,
    tokenizer=ALPHABET, run_dir=sys.argv[1], steps=2, prompts_per_step=4, group_size=4, max_new_tokens=3, trace=False,
)  # fmt: skip
if result is None:
    print("served")
else:
    print(result)
    print(sorted(name for name in result.metrics[-1] if name.startswith("scores/")))
