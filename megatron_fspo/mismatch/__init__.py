"""Sampler against trainer: how far their log-probs of the same tokens differ, why, and what is done about it.

:mod:`.measure` compares, :mod:`.alarm` finds the likeliest cause of too large a difference, and
:mod:`.correction` weights or drops responses by the rule of the ``correction`` section.
"""
