"""The model: layers, adapters, routers, the loss, optimizer steps on Megatron's schedule."""
