"""SkyRL's own entry point, with FSPO among its policy losses; takes SkyRL's arguments.

python examples/in_skyrl/main.py trainer.algorithm.policy_loss_type=fspo ...
"""

from __future__ import annotations

from skyrl.train.entrypoints.main_base import main

import megatron_fspo.adapters.skyrl  # noqa: F401  registers the loss; SkyRL hands it on to its workers

if __name__ == "__main__":
    main()
