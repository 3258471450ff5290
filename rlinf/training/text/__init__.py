"""From judged answers to gradients of a language model.

Packed rows, log-prob passes, schedules of micro-batches; how often and with which losses is `algos`' to say.
"""
