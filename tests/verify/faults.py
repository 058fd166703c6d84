"""Every fault that ``verify`` must catch, by name."""

import faults_of_loss  # noqa: F401  (fills FAULTS, as does the next)
import faults_of_model  # noqa: F401
from patching import FAULTS

__all__ = ["FAULTS"]
