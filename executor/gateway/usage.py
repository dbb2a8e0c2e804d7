"""What engines say of a request's tokens: only numbers that can be so are taken."""

from __future__ import annotations

from typing import TypeGuard

MOST_TOKENS = 2**31  # of one request; a minute's sums then stay far below 64 bits


def is_count(value: object) -> TypeGuard[int]:
    """Whether it is a number of tokens."""
    return isinstance(value, int) and 0 <= value < MOST_TOKENS
