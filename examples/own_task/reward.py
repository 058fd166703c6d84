"""The reward of this task: a right sum, in few steps."""

from typing import Any


def short_sum(prompt: Any, completion: Any, response: str) -> float:
    """1 for the number of the prompt as a sum of as few digits as there can be, less for every digit more.

    A response is groups of three digits: one that is taken off, and two that say what is left.
    ``prompt.answer`` is the row's, ``prompt.fields`` has all of it; ``response`` is text, without the token
    that ends it.
    """
    if completion.finish_reason != "stop" or len(response) % 3 or not response.isdigit():
        return 0.0
    digits = [int(digit) for digit in response[::3]]
    if 0 in digits or sum(digits) != int(prompt.answer):
        return 0.0
    fewest = -(-int(prompt.answer) // 9)
    return fewest / len(digits)
