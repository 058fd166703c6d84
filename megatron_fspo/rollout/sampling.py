"""Drawing one token per row from logits, with streams that repeat; and where a response ends.

Stop strings: a response ends with the token that completes one of them in its text. The rule is: the shortest
run of first tokens whose decoded text contains a string. The prompt's text does not count. Both engines
follow it by these functions, so what they return is the same, whatever a server makes of strings by itself.

For each token only the end of a response is decoded. That shows what all of it would, because the bytes of
UTF-8 tell where a character begins: the text of tokens that begin inside of one has U+FFFD for the rest of
it, which is part of no stop string, and from the next character on it is the text of the response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_fspo.types import Decode, SamplingParams


def uniforms(seed: int, prompt_index: int, number: int, count: int) -> Tensor:
    """The random stream of one completion: ``count`` numbers in [0, 1), fp64.

    A pure function of its arguments, so a completion does not depend on what else is in the batch, on the
    number of ranks, or on what was sampled before.
    """
    generator = torch.Generator().manual_seed(_stream_name(seed, prompt_index, number) >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def stream_seed(seed: int, prompt_index: int, number: int) -> int:
    """The same stream for a sampler of its own: a seed in [0, 2³¹), where every sampler takes one."""
    return _stream_name(seed, prompt_index, number) >> 33


def turn_seed(seed: int, turn: int) -> int:
    """That of a turn of the completion that :func:`stream_seed` names; the first has the completion's own."""
    return _stream_name(seed, turn, 0) >> 33 if turn else seed


def _stream_name(seed: int, prompt_index: int, number: int) -> int:
    """64 well-mixed bits."""
    name = hashlib.blake2b(f"{seed}/{prompt_index}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little")


def sample(logits: Tensor, draws: Tensor, *, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling.

    Args:
        logits: [B, V] fp32.
        draws: [B] in [0, 1).
        temperature: 0 takes the likeliest token, with log-prob 0.
        top_p: keep the likeliest tokens until their probability reaches top_p, and renormalise.

    Returns:
        tokens [B], and their log-probs [B] under the distribution sampled from, in nats.
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
    # Rounding may leave the last sum below 1: scale the draw, so that it always falls on a token.
    target = draws.to(cumulative)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None])[:, 0]


_BLOCK = 64  # tokens that are looked through together
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_REST = 3  # of a character that is cut in two: bytes, and so tokens and U+FFFD, at most


def completes_stop(token_ids: Sequence[int], params: SamplingParams) -> bool:
    """True if the last token of a response completes a stop string, where no token before it did. There is at
    least one token; no string of ``params`` is empty or has U+FFFD in it."""
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
