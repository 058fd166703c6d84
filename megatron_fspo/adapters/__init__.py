"""FSPO in other trainers, one small file per trainer: the function that it calls, and checks of its settings.

``sequence_loss`` is shared. Every other file imports the trainer that it is named after; ``import
megatron_fspo`` imports none of them. They need torch, but not Megatron.
"""
