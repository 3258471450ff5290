"""GR00T N1.5 (arXiv:2503.14734): a vision-language model reads, a diffusion transformer denoises actions.

Networks, the authors' checkpoint, the policy.
"""
