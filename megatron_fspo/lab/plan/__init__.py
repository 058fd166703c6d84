"""The needs of a run before it is started: memory of every rank, bytes of a checkpoint, time of a step.

Arithmetic from a configuration and an architecture: no GPU, no job, no checkpoint, no Megatron. :mod:`.shape`
is what all of it follows from. :mod:`.state` (parameters, gradients, optimizer, checkpoints) is exact,
:mod:`.activations` counts tensors, :mod:`.speed` estimates times, :mod:`.plan` puts a run together and
:mod:`.command` prints it, with single changes that make it fit.
"""
