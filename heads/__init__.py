"""What is learned: draft heads, their blocks and their losses."""

from draft_heads.heads.checkpoint import load_head

__all__ = ["load_head"]
