"""The paper's mechanisms, one a file; `sharing/` has the rules that put them together.

Pure functions of tensors and small frozen dataclasses, each with its equation. Uses no other room.
"""
