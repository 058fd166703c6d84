# The trainer on CPUs, to learn and to test with, from the root of the repository:
#
#   docker build -f examples/images/cpu.Dockerfile -t fspo-cpu .
#   docker run --rm fspo-cpu
#   docker run --rm --interactive --tty --volume "$PWD:/work" --workdir /work fspo-cpu bash
#
# BASE may be another Debian 12. With --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's index of builds for CPUs> no
# packages of CUDA are installed.

ARG BASE=debian:bookworm-slim
# hadolint ignore=DL3006
FROM ${BASE}
ARG PIP_EXTRA_INDEX_URL
COPY . /opt/megatron_fspo
# reasoning-gym has a dependency that compiles.
RUN /opt/megatron_fspo/examples/images/install.sh system gcc libc6-dev python3-dev
# hadolint ignore=DL3059
RUN /opt/megatron_fspo/examples/images/install.sh trainer all
ENV PATH=/opt/fspo/bin:$PATH OMP_NUM_THREADS=1
RUN useradd --create-home --uid 1000 fspo
USER 1000
WORKDIR /home/fspo
# A folder to train in, twelve steps, and the report of the run.
CMD ["bash", "-c", "megatron-fspo init task && cd task && megatron-fspo train --config run.toml"]
