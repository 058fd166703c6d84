"""What a wheel has: the package with its data, and the examples as a part of it."""

from setuptools import find_packages, setup

EXAMPLES = ("own_task", "make_sum", "make_sum/checkpoint", "smollm2", "qwen3_8b")
DATA = ["py.typed", "lab/*/*.html", "lab/*/*.css", "lab/trace/cuda.c", "lab/trace/tex.json"]
FOLDERS = {f"megatron_fspo.examples.{name.replace('/', '.')}": f"examples/{name}" for name in EXAMPLES}

setup(
    packages=[*find_packages(include=["megatron_fspo*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={"megatron_fspo": DATA} | {name: ["*"] for name in FOLDERS},
)
