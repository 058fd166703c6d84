"""This machine: device, patches for the CPU, Transformer Engine, sizes that fit, start of a job."""
