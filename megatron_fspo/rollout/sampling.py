"""Samples tokens from logits with reproducible random streams, and determines where a response ends.

Stop strings: a response ends at the first token for which the decoded text of the response so far contains
one of them. The prompt's text does not count. Both engines apply this rule with these functions, so their
results do not depend on how a server handles stop strings.

For each token only the end of the response is decoded. This is sufficient because UTF-8 marks the first byte
of each character: text of tokens that begin inside a character starts with U+FFFD for its remaining bytes,
which no stop string contains, and equals the text of the response from the next character on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fspo.types import Decode, SamplingParams


def uniforms(seed: int, prompt_index: int, number: int, count: int) -> Tensor:
    """Return the random stream of one completion: ``count`` numbers in [0, 1), fp64. It depends on the
    arguments only, not on the batch, the number of ranks, or earlier samples."""
    generator = torch.Generator().manual_seed(_stream_name(seed, prompt_index, number) >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def stream_seed(seed: int, prompt_index: int, number: int) -> int:
    """Return the seed of one completion, in [0, 2³¹), for samplers with their own random generator."""
    return _stream_name(seed, prompt_index, number) >> 33


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, given a completion's :func:`stream_seed`, which is also that of turn 0."""
    return _stream_name(seed, turn, 0) >> 33 if turn else seed


def _stream_name(seed: int, prompt_index: int, number: int) -> int:
    """Hash the identity of a completion to 64 bits."""
    name = hashlib.blake2b(f"{seed}/{prompt_index}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little")


def sample(logits: Tensor, draws: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Sample one token per row by inverting the CDF.

    Args:
        logits: [B, V] fp32.
        draws: [B] in [0, 1).
        temperature: 0 selects the likeliest token, with log-prob 0.
        top_p: keep the likeliest tokens until their total probability reaches top_p, and renormalise.

    Returns:
        tokens [B], and their log-probs [B] in nats under the sampling distribution.
    """
    if temperature == 0:
        return logits.argmax(-1), logits.new_zeros(logits.shape[0])
    log_probs = torch.log_softmax(logits / temperature, dim=-1)
    if top_p < 1:
        ordered, order = log_probs.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        cut = torch.zeros_like(log_probs, dtype=torch.bool).scatter_(-1, order, before >= top_p)
        log_probs = torch.log_softmax(log_probs.masked_fill(cut, float("-inf")), dim=-1)
    cumulative = log_probs.double().exp().cumsum(-1)
    # Rounding may leave the last sum below 1. Scale the draw so that it always selects a token.
    target = draws.to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


_BLOCK = 64  # tokens decoded and searched together
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REST = 3  # a cut character leaves at most 3 bytes, and so at most 3 tokens and 3 U+FFFD


def completes_stop(token_ids: Sequence[int], params: SamplingParams) -> bool:
    """Return True if the last token completes a stop string, given that no earlier one did. ``token_ids`` is
    not empty, and no stop string is empty or contains U+FFFD."""
    if not params.stop:
        return False
    assert params.decode is not None
    return _completes(token_ids, len(token_ids), params.decode, params.stop)


def kept(token_ids: Sequence[int], params: SamplingParams) -> int | None:
    """Return the length of the response when cut after the first token that completes a stop string; None if
    there is none. Arguments as for :func:`completes_stop`."""
    if not params.stop:
        return None
    decode, strings = params.decode, params.stop
    assert decode is not None
    first = 0
    while first < len(token_ids):
        start, _ = _tail(token_ids, first + 1, decode, strings)
        end, text = _block(token_ids, start, first + _BLOCK, decode)
        # With byte fallback, a later invalid byte turns decoded characters into U+FFFD and hides a match.
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
    """Return start and text of an end of the first ``count`` tokens that contains any stop string completed
    by the last of them."""
    longest = max(map(len, strings))
    # A margin: the text may begin with the rest of a character, or lack a space that SentencePiece strips.
    needed = len(decode(token_ids[count - 1 : count])) + longest - 1 + _REST
    size = longest + _REST
    while True:
        start, text = _from_whole(token_ids, max(count - size, 0), count, decode)
        # A token may have several characters, none, or part of one. An incomplete character, and with byte
        # fallback also those before it, decodes to up to one U+FFFD per byte, so four count as one.
        replaced = text.count(_REPLACEMENT)
        if start == 0 or len(text) - replaced + replaced // (_REST + 1) >= needed:
            return start, text
        size *= 2


def _from_whole(token_ids: Sequence[int], first: int, count: int, decode: Decode) -> tuple[int, str]:
    """Return ``first``, moved back to the start of a character cut there, and the text from there on. With
    byte fallback, a whole run of bytes becomes U+FFFD if some of them are invalid."""
    for start in range(first, max(first - _REST, 0) - 1, -1):
        text = decode(token_ids[start:count])
        if not text.startswith(_REPLACEMENT):
            return start, text
    return first, decode(token_ids[first:count])


def _block(token_ids: Sequence[int], start: int, count: int, decode: Decode) -> tuple[int, str]:
    """Return ``count``, moved to the end of a character cut there, and the text from ``start`` to there."""
    for end in range(count, count + _REST + 1):
        text = decode(token_ids[start:end])
        if _REPLACEMENT not in text:
            break
    return min(end, len(token_ids)), text
