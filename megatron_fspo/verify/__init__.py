"""``megatron-fspo verify``: the gradient of every parallel layout against one process in float64."""
