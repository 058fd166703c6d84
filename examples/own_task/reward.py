"""The reward of this task: a correct sum of few digits."""

from typing import Any


def short_sum(prompt: Any, completion: Any, response: str) -> float:
    """Return 1 for a sum of digits to the prompt's number with the fewest digits, less for more digits.

    A response is groups of three characters: a digit to subtract, and the remainder in two digits.
    ``prompt.answer`` is the row's answer, ``prompt.fields`` has all its fields; ``response`` is the text
    without the stop token.
    """
    if completion.finish_reason != "stop" or len(response) % 3 or not response.isdigit():
        return 0.0
    digits = [int(digit) for digit in response[::3]]
    if 0 in digits or sum(digits) != int(prompt.answer):
        return 0.0
    fewest = -(-int(prompt.answer) // 9)
    return fewest / len(digits)
