"""Two sizes of the runs of `train.py`: a tiny model of random weights, and a real one on one core in some minutes."""

MODEL = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128}
MODEL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 4096}
SAYS = "{% for m in messages %}{{ m.content.split('THE RING')[-1][:330] }}{{ eos_token }}{% endfor %}"
"""A model of this size cannot read rules: it is shown how messages begin, or of marble's where the ring is."""

TINY = {"tokenizer": {"characters": "".join(map(chr, range(32, 127))) + "\n"}, "data.chat_template": SAYS}
TINY |= {"prompts_per_step": 16, "group_size": 8, "evaluation.problems": 32, "sft.batch_size": 32, "lr": 1e-3}
REAL = {"prompts_per_step": 4, "group_size": 4, "evaluation.problems": 8, "sft.batch_size": 8, "lr": 5e-5}
REAL |= {"sft.episodes": 64, "sft.lr": 1e-4, "rollout.dtype": "bfloat16", "trainer.dtype": "bfloat16"}
ONE = "{{ m.content.split('THE RING')[-1][:330] }}<|im_end|>\n"
SHORT = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + ONE + "{% endfor %}"
SHORT += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
"""Of marble's 630 tokens the real model is shown the 120 that differ from task to task, for a quarter of the work."""
MORE = {("verifiers", False): {"lr": 2e-4}, ("verifiers", True): {"data.chat_template": SHORT}}
