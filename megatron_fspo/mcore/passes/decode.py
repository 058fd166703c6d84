"""Next-token distributions from the training model, with a KV cache, in the training layout.

All slots of a cache are at the same position. To decode prompts of different lengths together, all slots
prefill as many tokens as the shortest prompt has; from then on, a slot with prompt tokens left is fed the
next one instead of a sampled token. So there is no padding and no attention mask, and positions are exact.

All ranks of a model replica step together: tensor-parallel ranks compute their heads, pipeline stages run one
after the other, and each context-parallel rank computes whole sequences. With expert parallelism
data-parallel ranks step together, too, as a sequence may need experts of any rank. Meant for small models,
tests and the demo.

Layers run as in training, with their core attention replaced by one that has a cache. Megatron's inference
context for any device would rotate all keys again for every token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention

from megatron_fspo.mcore.model.gated_delta import CachedDelta, GatedDeltaNet
from megatron_fspo.mcore.model.packed_attention import attend, layer_window
from megatron_fspo.parallel.groups import ParallelGroups, any_rank, broadcast_first

# Attributes in which Megatron keeps the flag for sequence parallelism.
_SEQUENCE_PARALLEL_FLAGS = ("sequence_parallel", "scatter_to_sequence_parallel", "reduce_scatter_embeddings")


class _CachedAttention(Module):
    """Core attention of a session, for any kind of layers: each token attends to itself and all before it."""

    cache: list[Tensor]
    """[b, g, max_tokens, d]: rotated keys, and values, whose size may differ."""

    def __init__(
        self, max_tokens: int, scale: float | None, window: int | None, sinks: Tensor | None
    ) -> None:
        super().__init__()
        self._max_tokens, self._length = max_tokens, 0
        self._scale, self._window, self._sinks = scale, window or max_tokens, sinks

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attend: query [s, b, h, d], key [s, b, g, d], value [s, b, g, v] → [s, b, h·v]."""
        tokens, slots, groups, size = key.shape
        start, self._length = self._length, self._length + tokens
        if start == 0:
            self.cache = [x.new_empty(slots, groups, self._max_tokens, x.shape[-1]) for x in (key, value)]
        for cached, new in zip(self.cache, (key, value), strict=True):
            cached[:, :, start : self._length] = new.permute(1, 2, 0, 3)
        # The first tokens see one another, each later one the window.
        assert start == 0 or tokens == 1
        first = -self._window if start else 0
        keys, values = (cached[:, :, : self._length][:, :, first:] for cached in self.cache)
        if start and self._sinks is None:
            # Treat heads that share a key as queries of one head, so that keys need not be repeated.
            query = query.reshape(slots, groups, -1, size)
            out = scaled_dot_product_attention(query, keys, values, scale=self._scale)
            return out.reshape(1, slots, -1)
        mask = None
        if tokens > self._window or self._sinks is not None:
            seen = torch.ones(tokens, keys.shape[2], dtype=torch.bool, device=keys.device)
            mask = seen if start else seen.tril().triu(1 - self._window)
        out = attend(query.permute(1, 2, 0, 3), keys, values, mask, self._scale, self._sinks)
        return out.permute(2, 0, 1, 3).flatten(2)

    def keep(self, slots: Sequence[int]) -> None:
        """Set the cache to these of its slots, in this order; only slots that move are copied."""
        for index, before in enumerate(self.cache):
            cached, moved = before, [place for place, slot in enumerate(slots) if slot != place]
            if len(slots) > len(before):
                cached, moved = before.new_empty(len(slots), *before.shape[1:]), list(range(len(slots)))
            if moved:
                cached[moved, :, : self._length] = before[[slots[p] for p in moved], :, : self._length]
            self.cache[index] = cached[: len(slots)]


class _Rotary(Module):
    """RoPE angles of the fed tokens, for whole sequences also on context-parallel ranks. With YaRN, latent
    attention has a factor, too."""

    def __init__(self, angles: Module, max_tokens: int) -> None:
        super().__init__()
        self._angles: Tensor | tuple[Tensor, float] = angles(max_tokens, packed_seq=True)
        self.positions = slice(0)

    def get_rotary_seq_len(self, *_: Any) -> int:
        return 0  # forward() ignores it

    def forward(self, *_: Any, **__: Any) -> Tensor | tuple[Tensor, float]:
        if isinstance(self._angles, tuple):
            return self._angles[0][self.positions], self._angles[1]
        return self._angles[self.positions]


class Decoder:
    """Decodes a batch of sequences token by token. Every rank of a replica calls the same methods with the
    same arguments. ``chunks`` are this rank's, unwrapped; ``vocab_size`` is without padding."""

    def __init__(self, chunks: Sequence[GPTModel], groups: ParallelGroups, *, vocab_size: int) -> None:
        self._chunks = list(chunks)
        self._pipeline = groups.pp
        self._sharers = (groups.tp, groups.cp, groups.pp)
        self.leads = groups.is_replica_leader
        self._shares_experts = groups.ep.size() > 1
        self._vocab_size = vocab_size
        self._length = 0
        self._rotary: list[_Rotary] = []

    @contextmanager
    def session(self, *, slots: int, max_tokens: int) -> Iterator[None]:
        """Hold a cache for ``slots`` sequences of up to ``max_tokens`` tokens, prompt included. Inside, the
        model is in evaluation mode, without sequence and context parallelism: one token cannot be split."""
        training = self._chunks[0].training
        for chunk in self._chunks:
            chunk.eval()
        settings = list(_settings(self._chunks, max_tokens))
        self._rotary = [value for _, _, value in settings if isinstance(value, _Rotary)]
        outside = [getattr(owner, name) for owner, name, _ in settings]
        for setting in settings:
            setattr(*setting)
        # Only the last position predicts a new token.
        heads = [chunk.output_layer for chunk in self._chunks if chunk.post_process]
        hooks = [head.register_forward_pre_hook(lambda _, args: (args[0][-1:], *args[1:])) for head in heads]
        self._length = 0
        try:
            with torch.no_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for (owner, name, _), value in zip(settings, outside, strict=True):
                setattr(owner, name, value)
            for chunk in self._chunks:
                chunk.train(training)

    def feed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append equally many tokens to every slot; return the logits of the next token [slots, vocab_size],
        fp32, the same on every rank. Collective."""
        self._one_has_tokens(True)
        return self._step(tokens)

    def finish(self) -> None:
        """Compute this rank's experts for other ranks until all call this. Collective; not in a session."""
        while self._one_has_tokens(False):
            with self.session(slots=1, max_tokens=1):
                self._step([[0]])

    def _one_has_tokens(self, mine: bool) -> bool:
        """Return True if this rank has tokens or, with expert parallelism, if any rank has."""
        if not self._shares_experts:
            return mine
        return any_rank(mine, device=next(self._chunks[0].parameters()).device)

    def _step(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        parameter = next(self._chunks[0].parameters())
        ids = torch.tensor(tokens, device=parameter.device)
        start, self._length = self._length, self._length + ids.shape[1]
        positions = torch.arange(start, self._length, device=ids.device).expand_as(ids)
        for rotary in self._rotary:
            rotary.positions = slice(start, self._length)

        stages, mine = self._pipeline.size(), self._pipeline.rank()
        ranks = dist.get_process_group_ranks(self._pipeline)
        last = stages * len(self._chunks) - 1
        # [s, b, H], passed from stage to stage; with virtual stages, several times around the pipeline.
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
            out = chunk(ids, positions, None, runtime_gather_output=True)
            if stage == last:
                logits = out[:, -1, : self._vocab_size].float()
            else:
                dist.send(out.contiguous(), dst=ranks[(stage + 1) % stages], group=self._pipeline)
        if stages > 1:
            logits = logits.contiguous()
            dist.broadcast(logits, src=ranks[-1], group=self._pipeline)
        return logits

    def keep(self, slots: Sequence[int]) -> None:
        """Set the cache to these of its slots, in this order; a slot may occur several times."""
        for chunk in self._chunks:
            for layer in chunk.decoder.layers:
                layer.self_attention.core_attention.keep(slots)

    def settle(self, values: Tensor) -> Tensor:
        """Return the first rank's values on all ranks of a replica, so that all choose the same tokens."""
        return broadcast_first(values, *self._sharers)


def _settings(chunks: Sequence[GPTModel], max_tokens: int) -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, attribute, value) of each attribute that a session replaces."""
    modules: list[Module] = [module for chunk in chunks for module in chunk.modules()]
    if chunks[0].config.fp8:
        # FP8 needs more than a few tokens, and its copies of the weights date from the schedule's last pass.
        yield chunks[0].config, "fp8", None
    for owner in (*modules, chunks[0].config):
        for flag in _SEQUENCE_PARALLEL_FLAGS:
            if vars(owner).get(flag) is True:
                yield owner, flag, False
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            if isinstance(net := layer.self_attention, GatedDeltaNet):
                yield net, "core_attention", CachedDelta(net.core_attention.linear)
                continue
            scale = getattr(layer.self_attention, "softmax_scale", chunk.config.softmax_scale)
            window = layer_window(chunk.config, layer.layer_number)
            sinks = getattr(layer.self_attention.core_attention, "softmax_offset", None)
            cached = _CachedAttention(max_tokens, scale, window, sinks)
            yield layer.self_attention, "core_attention", cached
        # Latent attention has angles of its own in every layer.
        latent = chunk.config.multi_latent_attention
        for owner in [layer.self_attention for layer in chunk.decoder.layers] if latent else [chunk]:
            yield owner, "rotary_pos_emb", _Rotary(owner.rotary_pos_emb, max_tokens)
