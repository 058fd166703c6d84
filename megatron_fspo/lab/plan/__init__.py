"""``megatron-fspo plan``: memory of every rank, size of checkpoints and time of a step, before a run starts.

Computed from configuration and architecture, without a GPU or a checkpoint. All modules build on
:mod:`.shape`. :mod:`.state` (parameters, gradients, optimizer, checkpoints) is exact, :mod:`.activations`
counts tensors, :mod:`.speed` estimates times, :mod:`.plan` combines them and :mod:`.command` prints the plan.
"""
