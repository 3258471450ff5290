"""A small vision-language-action policy, and the parts that larger ones share.

Networks and token mappings only.
"""
