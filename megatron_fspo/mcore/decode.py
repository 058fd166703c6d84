"""Next-token distributions from the training model itself, with a KV cache, in the layout of the training.

Rows that share a cache stand at the same position, so prompts of different lengths decode together like
this: all rows prefill as many tokens as the shortest prompt has; from there on, a row whose prompt goes on
is fed its next prompt token in place of a sampled one. No padding, no attention mask, exact positions.

All ranks of one model copy step together: tensor ranks each with their heads, pipeline stages one after the
other, context-parallel ranks each the whole row. Under expert parallel data-parallel ranks do, too: a row may
need the experts of any. Made for small models, tests and the demo.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Module

from megatron_fspo.mcore.layers import SDPACoreAttention
from megatron_fspo.parallel.groups import ParallelGroups, any_rank, of_first_rank

# Where Megatron keeps the flag that splits activations over tensor ranks.
_SEQUENCE_PARALLEL_FLAGS = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


class Decoder:
    """Steps a batch of rows through the model.

    Args:
        chunks: the bare model chunks of this rank; every rank of a model copy calls the same methods with
            the same arguments.
        groups: the run's.
        vocab_size: without padding.
    """

    def __init__(self, chunks: Sequence[GPTModel], groups: ParallelGroups, *, vocab_size: int) -> None:
        self._chunks = list(chunks)
        self._pipeline = groups.pp
        self._sharers = (groups.tp, groups.cp, groups.pp)
        self._shares_experts = groups.ep.size() > 1
        self._vocab_size = vocab_size
        self._settings = list(_settings(self._chunks))
        self._context: StaticInferenceContext | None = None

    @contextmanager
    def session(self, *, rows: int, max_tokens: int) -> Iterator[None]:
        """Hold a cache for ``rows`` sequences of up to ``max_tokens`` tokens, prompt included.

        Within it the model is in evaluation mode, and sequence and context parallel are off: one token
        cannot be split over ranks.
        """
        training = self._chunks[0].training
        for chunk in self._chunks:
            chunk.eval()
        for owner, name, _, within in self._settings:
            setattr(owner, name, within)
        self._context = StaticInferenceContext(max_batch_size=rows, max_sequence_length=max_tokens)
        try:
            with torch.no_grad():
                yield
        finally:
            self._context = None
            for owner, name, outside, _ in self._settings:
                setattr(owner, name, outside)
            for chunk in self._chunks:
                chunk.train(training)

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to every row.

        Args:
            tokens: one list per row, all of one length.

        Returns:
            logits [rows, vocab_size] of the token that follows, fp32, the same on every rank.
        """
        self._one_has_tokens(True)
        return self._step(tokens)

    def finish(self) -> None:
        """Lend the experts of this rank to others until all have come here. Collective; not in a session."""
        while self._one_has_tokens(False):
            with self.session(rows=1, max_tokens=1):
                self._step([[0]])

    def _one_has_tokens(self, mine: bool) -> bool:
        """Return True if there is a step to take: on any rank, where ranks share experts."""
        if not self._shares_experts:
            return mine
        return any_rank(mine, device=next(self._chunks[0].parameters()).device)

    def _step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        context = self._context
        assert context is not None, "feed() outside session()"
        parameter = next(self._chunks[0].parameters())
        ids = torch.tensor(tokens, device=parameter.device)
        start = context.sequence_len_offset
        positions = torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)

        stages, mine = self._pipeline.size(), self._pipeline.rank()
        ranks = dist.get_process_group_ranks(self._pipeline)
        last = stages * len(self._chunks) - 1
        # [s, b, H] on its way from stage to stage; virtual stages go around the pipeline several times.
        hidden = ids.new_empty(
            (ids.shape[1], ids.shape[0], self._chunks[0].config.hidden_size), dtype=parameter.dtype
        )
        logits = ids.new_empty((len(tokens), self._vocab_size), dtype=torch.float32)
        for stage in range(last + 1):
            if stage % stages != mine:
                continue
            chunk = self._chunks[stage // stages]
            if stage > 0:
                dist.recv(hidden, src=ranks[(stage - 1) % stages], group=self._pipeline)
                chunk.set_input_tensor(hidden)
            out = chunk(ids, positions, None, inference_context=context, runtime_gather_output=True)
            if stage == last:
                logits = out[:, -1, : self._vocab_size].float()
            else:
                dist.send(out.contiguous(), dst=ranks[(stage + 1) % stages], group=self._pipeline)
        if stages > 1:
            logits = logits.contiguous()
            dist.broadcast(logits, src=ranks[-1], group=self._pipeline)
        context.sequence_len_offset += ids.shape[1]
        context.enable_decode_mode()
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        """Make these the rows of the cache, in the given order; a row that comes twice is copied."""
        context = self._context
        assert context is not None, "keep() outside session()"
        index = torch.tensor(rows, device=next(self._chunks[0].parameters()).device)
        for layer, cache in context.key_value_memory_dict.items():
            context.key_value_memory_dict[layer] = tuple(part.index_select(1, index) for part in cache)
        context.max_batch_size = len(rows)

    def settle(self, values: Tensor) -> Tensor:
        """One rank's values on all ranks of the model copy: of whatever decides which tokens come next."""
        return of_first_rank(values, *self._sharers)


def _settings(chunks: Sequence[GPTModel]) -> Iterator[tuple[Any, str, Any, Any]]:
    """(object, attribute, value outside a session, value within) of what a session turns off."""
    modules: list[Module] = [module for chunk in chunks for module in chunk.modules()]
    if chunks[0].config.fp8:
        # A few tokens are no multiple of what FP8 takes, and its copies of the weights are those of the last
        # pass of the schedule.
        yield chunks[0].config, "fp8", chunks[0].config.fp8, None
    for owner in (*modules, chunks[0].config):
        for flag in _SEQUENCE_PARALLEL_FLAGS:
            if vars(owner).get(flag) is True:
                yield owner, flag, True, False
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            # Transformer Engine's makes a plan on the GPU for every length, one per token, and splits
            # rows over context-parallel ranks.
            whole = layer.self_attention
            if not isinstance(whole.core_attention, SDPACoreAttention):
                settings = whole.config, whole.layer_number, whole.attn_mask_type, "self"
                ours = SDPACoreAttention(*settings, pg_collection=whole.pg_collection)  # has no weights
                yield whole, "core_attention", whole.core_attention, ours
        # Without a group it gives every position, not those of this context-parallel rank.
        yield chunk.rotary_pos_emb, "cp_group", chunk.rotary_pos_emb.cp_group, None
