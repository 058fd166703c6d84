"""``megatron-fspo verify``: compare gradients in every parallel layout with one process in float64."""
