"""Prompts and the tokenizer: what goes into the policy."""

from megatron_fspo.data.prompts import PromptCursor, load_prompts
from megatron_fspo.data.tokenizer import check_vocabulary, load_tokenizer, stop_token_ids

__all__ = ["PromptCursor", "check_vocabulary", "load_prompts", "load_tokenizer", "stop_token_ids"]
