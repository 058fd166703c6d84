"""A training run whose pass of old log-probs takes the FP8 copies of the weights that are there already."""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from megatron.core.transformer.module import MegatronModule

from megatron_fspo.cli import main
from megatron_fspo.mcore.model.policy import Model


def run() -> int:
    real = Model.score

    def stale(*args: Any) -> Any:
        with mock.patch.object(MegatronModule, "set_is_first_microbatch", lambda self: None):
            return real(*args)

    with mock.patch.object(Model, "score", stale):
        return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(run())
