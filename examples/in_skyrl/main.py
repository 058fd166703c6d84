"""SkyRL's entry point with FSPO registered as a policy loss. Accepts SkyRL's arguments.

python examples/in_skyrl/main.py trainer.algorithm.policy_loss_type=fspo ...
"""

from __future__ import annotations

from skyrl.train.entrypoints.main_base import main

import megatron_fspo.adapters.skyrl  # noqa: F401  registers the loss, which SkyRL passes to its workers

if __name__ == "__main__":
    main()
