"""Stop strings: a response ends with the token that completes one of them in its text. No I/O.

The rule is: the shortest run of first tokens whose decoded text contains a string. The prompt's text does not
count. Both engines follow it by these functions, so what they return is the same, whatever a server makes of
strings by itself.

For each token only the end of a response is decoded. That shows what all of it would, because the bytes of
UTF-8 tell where a character begins: the text of tokens that begin inside of one has U+FFFD for the rest of
it, which is part of no stop string, and from the next character on it is the text of the response.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_fspo.types import Decode, SamplingParams

_BLOCK = 64  # tokens that are looked through together
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REST = 3  # of a character that is cut in two: bytes, and so tokens and U+FFFD, at most


def completes_stop(token_ids: Sequence[int], params: SamplingParams) -> bool:
    """Return True if the last token of a response completes a stop string, where no token before it did.

    Args:
        token_ids: the response so far; at least one.
        params: have the strings, none of them empty or with U+FFFD in it.
    """
    if not params.stop:
        return False
    assert params.decode is not None
    return _completes(token_ids, len(token_ids), params.decode, params.stop)


def kept(token_ids: Sequence[int], params: SamplingParams) -> int | None:
    """The number of tokens that are left when a response ends with the first that completes a stop string;
    None if none does. Arguments as of :func:`completes_stop`."""
    if not params.stop:
        return None
    decode, strings = params.decode, params.stop
    assert decode is not None
    first = 0
    while first < len(token_ids):
        start, _ = _tail(token_ids, first + 1, decode, strings)
        end, text = _block(token_ids, start, first + _BLOCK, decode)
        # Decoders that fall back to bytes take characters back when a byte that is none follows.
        if _REPLACEMENT in text or _contains(text, strings):
            for count in range(first + 1, end + 1):
                if _completes(token_ids, count, decode, strings):
                    return count
        first = end
    return None


def _completes(token_ids: Sequence[int], count: int, decode: Decode, strings: Sequence[str]) -> bool:
    _, text = _tail(token_ids, count, decode, strings)
    return _contains(text, strings)


def _contains(text: str, strings: Sequence[str]) -> bool:
    return any(string in text for string in strings)


def _tail(token_ids: Sequence[int], count: int, decode: Decode, strings: Sequence[str]) -> tuple[int, str]:
    """The last of ``count`` tokens that have all of a string which the last one completes: from which on, and
    their text."""
    longest = max(map(len, strings))
    # Some more: at the front may be the rest of a character, or miss a space, which SentencePiece takes off.
    needed = len(decode(token_ids[count - 1 : count])) + longest - 1 + _REST
    size = longest + _REST
    while True:
        start, text = _from_whole(token_ids, max(count - size, 0), count, decode)
        # Most tokens have more than one character; some have none, or a part of one. Of a character whose end
        # is still to come, and of what stands before it, each byte may count as one.
        replaced = text.count(_REPLACEMENT)
        if start == 0 or len(text) - replaced + replaced // (_REST + 1) >= needed:
            return start, text
        size *= 2


def _from_whole(token_ids: Sequence[int], first: int, count: int, decode: Decode) -> tuple[int, str]:
    """``first``, or where the character begins that is cut in two there; and the text from there on.

    Decoders that fall back to bytes replace all that stand together if some are not a character.
    """
    for start in range(first, max(first - _REST, 0) - 1, -1):
        text = decode(token_ids[start:count])
        if not text.startswith(_REPLACEMENT):
            return start, text
    return first, decode(token_ids[first:count])


def _block(token_ids: Sequence[int], start: int, count: int, decode: Decode) -> tuple[int, str]:
    """``count``, or where the character ends that is cut in two there; and the text from ``start`` on."""
    for end in range(count, count + _REST + 1):
        text = decode(token_ids[start:end])
        if _REPLACEMENT not in text:
            break
    return min(end, len(token_ids)), text
