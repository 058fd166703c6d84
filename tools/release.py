"""Build a release from a tag, check it, and print what an upload would send. Nothing is sent.

    git tag v0.2.0 && python tools/release.py v0.2.0

Needs ``build`` and ``twine``. The tag, ``megatron_fspo.__version__``, ``CITATION.cff`` and the first heading
of ``CHANGELOG.md`` must have the same version. Files come from the tag, not from the working tree.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = {
    "megatron_fspo/__init__.py": r'^__version__ = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "CHANGELOG.md": r"^## (\S+)",
}
"""File → pattern of its version; the first match counts."""


def main() -> int:
    """Build into ``--out``; returns 2 after one line that explains why there is no release."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tag", help="such as v0.2.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        packed = subprocess.run(["git", "-C", ROOT, "archive", args.tag], capture_output=True)
        if packed.returncode:
            return refuse(f"git cannot read {args.tag}: {packed.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(source, filter="data")
        for name, version in versions(source).items():
            if f"v{version}" != args.tag:
                return refuse(f"{name} at {args.tag} has version {version}")
        if args.out.exists() and not (args.out.is_dir() and not any(args.out.iterdir())):
            return refuse(f"{args.out} is not an empty folder")
        if subprocess.run([sys.executable, "-m", "build", "--outdir", args.out, source]).returncode:
            return refuse("the build failed; see its output above")
    files = sorted(args.out.iterdir())
    if subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files]).returncode:
        return refuse(f"twine rejects {args.out}; see its output above")
    print("\nwould upload:")
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        print(f"  {file.name}  {file.stat().st_size:,} bytes  sha256 {digest}")
    print(f"with: {sys.executable} -m twine upload {args.out}/*")
    return 0


def versions(source: Path) -> dict[str, str]:
    """File → its version, or ``none``."""
    named = {}
    for name, pattern in PLACES.items():
        match = re.search(pattern, (source / name).read_text(encoding="utf-8"), re.MULTILINE)
        named[name] = match[1] if match else "none"
    return named


def refuse(why: str) -> int:
    print(f"release: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
