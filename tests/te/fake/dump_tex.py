"""Write ``tex.json`` anew: names and enums of the compiled extension. Where it is installed, with a GPU:

    python tests/te/fake/dump_tex.py

Then say its version in requirements-te.txt.
"""

import json
from pathlib import Path

import transformer_engine.pytorch  # noqa: F401 - loads the libraries that the extension needs
import transformer_engine_torch as tex


def main() -> None:
    public = {name: getattr(tex, name) for name in dir(tex) if not name.startswith("__")}
    enums = {
        name: {member: int(value) for member, value in kind.__members__.items()}
        for name, kind in public.items()
        if hasattr(kind, "__members__")
    }
    names = [name for name, value in public.items() if callable(value) and name not in enums]
    found = {"enums": enums, "names": names}
    target = Path(__file__).parents[3] / "megatron_fspo/lab/trace/tex.json"
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
