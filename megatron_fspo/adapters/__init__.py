"""FSPO in other trainers, one thin file for each: what they call, and what of theirs it does not go with.

``sequence_loss`` is what they share. Every other file imports the trainer that it is named after, and nothing
imports them: ``import megatron_fspo`` asks for none. All need torch and no Megatron.
"""
