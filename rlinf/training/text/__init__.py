"""From judged answers to the gradient of a language model: rows with advantages, micro-batches, passes, commands.

What a reward, an advantage or a loss is belongs in `algos`; the model in `models`; no actor is imported here.
"""
