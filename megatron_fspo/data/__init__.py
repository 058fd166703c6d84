"""Prompts and the tokenizer: what goes into the policy, and in which order."""

from megatron_fspo.data.cursor import PromptCursor
from megatron_fspo.data.prompts import LoadedSet, load_prompts, load_set, load_sets
from megatron_fspo.data.tasks import gradable
from megatron_fspo.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids

__all__ = [
    "LoadedSet",
    "PromptCursor",
    "check_vocabulary",
    "gradable",
    "load_prompts",
    "load_set",
    "load_sets",
    "load_tokenizer",
    "stop_token_ids",
]
