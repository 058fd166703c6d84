"""Next-token distributions from the training model itself, with a KV cache across tensor-parallel ranks.

Rows that share a cache stand at the same position, so prompts of different lengths decode together like
this: all rows prefill as many tokens as the shortest prompt has; from there on, a row whose prompt goes on
is fed its next prompt token in place of a sampled one. No padding, no attention mask, exact positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor

# Where Megatron keeps the flag that splits activations over tensor ranks.
_SEQUENCE_PARALLEL_FLAGS = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


class Decoder:
    """Steps a batch of rows through the model.

    Args:
        model: the bare model of this rank; every tensor-parallel rank calls the same methods with the same
            arguments.
        vocab_size: without padding.
    """

    def __init__(self, model: GPTModel, *, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._flags = [
            (module, flag)
            for module in [*model.modules(), model.config]
            for flag in _SEQUENCE_PARALLEL_FLAGS
            if vars(module).get(flag) is True
        ]
        self._context: StaticInferenceContext | None = None

    @contextmanager
    def session(self, *, rows: int, max_tokens: int) -> Iterator[None]:
        """Hold a cache for ``rows`` sequences of up to ``max_tokens`` tokens, prompt included.

        Within it the model is in evaluation mode, and sequence parallel is off: one token cannot be split
        over ranks.
        """
        training = self._model.training
        self._model.eval()
        for module, flag in self._flags:
            setattr(module, flag, False)
        self._context = StaticInferenceContext(max_batch_size=rows, max_sequence_length=max_tokens)
        try:
            with torch.no_grad():
                yield
        finally:
            self._context = None
            for module, flag in self._flags:
                setattr(module, flag, True)
            self._model.train(training)

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to every row.

        Args:
            tokens: one list per row, all of one length.

        Returns:
            logits [rows, vocab_size] of the token that follows, fp32, the same on every rank.
        """
        context = self._context
        assert context is not None, "feed() outside session()"
        device = next(self._model.parameters()).device
        ids = torch.tensor(tokens, device=device)
        start = context.sequence_len_offset
        positions = torch.arange(start, start + ids.shape[1], device=device).expand_as(ids)
        logits: Tensor = self._model(
            ids, positions, None, inference_context=context, runtime_gather_output=True
        )
        context.sequence_len_offset += ids.shape[1]
        context.enable_decode_mode()
        return logits[:, -1, : self._vocab_size].float()

    def keep(self, rows: Sequence[int]) -> None:
        """Drop the cache of all other rows; those kept move up in the given order."""
        context = self._context
        assert context is not None, "keep() outside session()"
        index = torch.tensor(rows, device=next(self._model.parameters()).device)
        for layer, cache in context.key_value_memory_dict.items():
            context.key_value_memory_dict[layer] = tuple(part.index_select(1, index) for part in cache)
        context.max_batch_size = len(rows)
