"""Imported by the fork server of ``math``: does a little algebra.

So workers are born with the tables that math-verify's parser and sympy build on their first tasks. That takes
half a second, and a worker that replaces a killed one would pay it again.
"""

from __future__ import annotations

import logging

from megatron_fspo.rewards.worker import compare

_EXAMPLES = (
    ("\\frac{1}{2}+\\sqrt{2}", "2^{1/3}"),
    ("[0,1)", "\\{1,2\\}"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
    ("\\sin(2x)", "2\\sin(x)\\cos(x)"),
    ("x^2+2x+1", "(x+1)^2"),
    ("x<1", "(-\\infty,1)\\cup(2,3)"),
    ("y=2x+1", "2x+1"),
    ("5\\text{ cm}", "50\\%"),
)

# It warns that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
for _gold, _found in _EXAMPLES:
    compare(_gold, _found)
