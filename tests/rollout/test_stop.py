"""Where stop strings end a response, against the rule itself, for tokenizers like those of real models."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron_fspo.rollout.sampling import completes_stop, kept
from megatron_fspo.types import Decode, SamplingParams

SENTENCES = [
    "The answer is 42.\n\nQuestion: why? </answer> <think> so, e.g., naïve café </think>\n",
    "日本語の文章。答えは四十二です。\n\n質問:なぜ?한국어도 조금 있습니다.",
    "🎉🎉 fine 👩‍👩‍👧‍👦 emoji — dashes … ½ ∑ℓ√L ≤ 1e-6\r\n\t\tpass\n",
    "def f(x):\n    return x ** 2  # </code>\n\n\nassert f(3) == 9",
]
MISSING = 2000
"""An id without a token: rows of a model's vocabulary that are padding."""


@cache
def byte_level() -> Tokenizer:
    """As of Qwen and Llama 3: trained on so little that many characters are several tokens, and that parts of
    two characters make one."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        SENTENCES * 3,
        trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False),
    )
    core.add_special_tokens(["<|im_end|>", "</answer>"])
    return core


@cache
def sentence_pieces() -> Tokenizer:
    """As of Llama 2: a space before words, taken off the front of a text; bytes for what has no piece."""
    words = "▁ ▁The ▁answer answer a e s n r w : . </ > ▁</ 日 ▁▁".split(" ")
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(words)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return core


def decode_with(core: Tokenizer) -> Decode:
    return lambda ids: core.decode(list(ids), skip_special_tokens=False)


def ids_of(text: str) -> list[int]:
    return list(byte_level().encode(text).ids)


def asked(decode: Decode, *strings: str) -> SamplingParams:
    return SamplingParams(max_tokens=1, stop=strings, decode=decode)


def naive(ids: Sequence[int], params: SamplingParams) -> int | None:
    """The rule."""
    assert params.decode is not None
    for count in range(1, len(ids) + 1):
        text = params.decode(ids[:count])
        if any(string in text for string in params.stop):
            return count
    return None


def streamed(ids: Sequence[int], params: SamplingParams) -> int | None:
    """As an engine that samples finds it."""
    return next((count for count in range(1, len(ids) + 1) if completes_stop(ids[:count], params)), None)


@st.composite
def byte_level_cases(draw: st.DrawFn) -> tuple[list[int], tuple[str, ...]]:
    core = byte_level()
    some = st.lists(st.integers(0, core.get_vocab_size() - 1) | st.just(MISSING), max_size=40)
    text = st.sampled_from(SENTENCES).map(lambda text: core.encode(text).ids)
    emoji = st.text(alphabet="🎉👩日é…a\n", max_size=30).map(lambda text: core.encode(text).ids)
    gap = st.integers(0, 150).map(lambda count: [MISSING] * count)
    ids = [token for part in draw(st.lists(some | text | emoji | gap, max_size=6)) for token in part]
    return ids, draw(strings_of(decode_with(core)(ids)))


@st.composite
def sentence_piece_cases(draw: st.DrawFn) -> tuple[list[int], tuple[str, ...]]:
    """Whole characters only: wrong bytes take all that stand beside them along."""
    core = sentence_pieces()
    bytes_of = st.text(alphabet="🎉日é\nx: ", max_size=20).map(lambda text: list(text.encode()))
    pieces = st.lists(st.integers(256, core.get_vocab_size() - 1), max_size=20)
    ids = [token for part in draw(st.lists(bytes_of | pieces, max_size=8)) for token in part]
    return ids, draw(strings_of(decode_with(core)(ids)))


@st.composite
def strings_of(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Some that are in the text, and some that are in none."""
    found = draw(st.lists(st.text(alphabet="ab\n</>é🎉", min_size=1, max_size=4), max_size=2))
    for _ in range(draw(st.integers(0 if found else 1, 2))):
        start = draw(st.integers(0, len(text)))
        found.append(text[start : start + draw(st.sampled_from([1, 2, 3, 8, 40]))])
    return tuple(string for string in found if string and "\ufffd" not in string) or ("\n\n",)


def check_the_rule(core: Tokenizer, case: tuple[list[int], tuple[str, ...]]) -> None:
    ids, strings = case
    params = asked(decode_with(core), *strings)
    assert kept(ids, params) == streamed(ids, params) == naive(ids, params)


@given(byte_level_cases())
@example((ids_of("x") + [MISSING] * 10 + ids_of("</answer>"), ("x<",)))
@example(([MISSING] * 70 + ids_of("x</answ") + [MISSING] * 90 + ids_of("er>"), ("x</answer>",)))
def test_byte_level_tokens(case: tuple[list[int], tuple[str, ...]]) -> None:
    check_the_rule(byte_level(), case)


@given(sentence_piece_cases())
@example((list("🎉🎉🎉🎉🎉🎉\n\n".encode()), ("\n\n",)))
@example(
    ([*"x:日日日é🎉日🎉x:\n\né🎉é🎉éx".encode(), 258, 257, *"🎉x\n\nx:é🎉🎉日\né".encode()], ("é🎉🎉日\né",))
)
def test_pieces_with_bytes_for_the_rest(case: tuple[list[int], tuple[str, ...]]) -> None:
    check_the_rule(sentence_pieces(), case)


@given(st.lists(st.sampled_from([*b"\n\nab", *"🎉é".encode(), 257, 262]), max_size=150), st.data())
def test_wrong_bytes_are_the_same_to_both_engines(ids: list[int], data: st.DataObject) -> None:
    """With wrong bytes beside them, whether characters are there depends on where decoding begins."""
    string = st.text(alphabet="\nab", min_size=1, max_size=3)
    params = asked(decode_with(sentence_pieces()), *data.draw(st.lists(string, min_size=1, max_size=2)))
    assert kept(ids, params) == streamed(ids, params)


def test_no_strings_end_nothing() -> None:
    params = SamplingParams(max_tokens=1)
    assert kept([1, 2], params) is None
    assert not completes_stop([1, 2], params)
    with pytest.raises(ValueError, match="stop needs decode"):
        SamplingParams(max_tokens=1, stop=("x",))


@pytest.mark.parametrize("text", ["plain", "garbage"])
def test_only_ends_are_decoded(text: str) -> None:
    """The work for a token does not grow with the response."""
    core, decoded = byte_level(), 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return str(core.decode(list(ids), skip_special_tokens=False))

    line = "the answer is naïve: ⅓ " if text == "plain" else "🎉⅓日👩é⅓"
    ids = core.encode(line * 400).ids
    if text == "garbage":
        random.Random(0).shuffle(ids)
    params = asked(decode, "</answer>", "\n\n\n")
    assert kept(ids, params) is None
    assert decoded < (3 if text == "plain" else 300) * len(ids)
    decoded, last = 0, 300
    for count in range(len(ids) - last, len(ids)):
        assert not completes_stop(ids[:count], params)
    assert decoded < 300 * last
