"""Python runs this at its start where the folder is on PYTHONPATH: also on ranks that torchrun starts."""

import fake_gpu

fake_gpu.register()
