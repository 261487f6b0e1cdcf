# The trainer's image, and with --target vllm one that samples with vLLM on GPUs as well: docs/container.md.
# torch, Transformer Engine and apex are the base image's and are never installed again. `pip install apex` would bring
# a web toolkit of that name that knows nothing of GPUs; NVIDIA's apex is in no package index.
# This tag is the last one with torch 2.13, the version that the tests run on and that vLLM 0.32 pins.
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3

FROM ${BASE} AS trainer
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# the extension, for A100, H100 and B200; the base image's TORCH_CUDA_ARCH_LIST has no say in it. The base image computes
# products of float32 in TF32, whose 10 bits of mantissa are fewer than what float32 is compared to, here and in vLLM.
ENV MEGATRON_REPLAY_CUDA=1 \
    MEGATRON_REPLAY_CUDA_ARCHS="80;90;100" \
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/megatron_replay
# what every later step is held against
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > /etc/torch.txt

COPY requirements/container.txt requirements/container.txt
# two sets of constraints hold here: ours for torch, and the base image's own (PIP_CONSTRAINT) for its other packages
RUN pip install --no-deps megatron-core==0.19.2 \
 && pip install --constraint /etc/torch.txt --requirement requirements/container.txt

COPY LICENSE README.md pyproject.toml setup.py ./
COPY csrc csrc
COPY megatron_replay megatron_replay
RUN pip install --no-build-isolation --no-deps --editable . \
 && python -c "from megatron_replay import _C; assert _C.cuda_architectures() == '80;90;100', _C.cuda_architectures()"

# A build has no driver: the base image's compatibility libraries stand in for libcuda. amp_C is compiled and part of
# NVIDIA's apex, and of no other.
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" | diff /etc/torch.txt - \
 && LD_LIBRARY_PATH="/usr/local/cuda/compat/lib.real:${LD_LIBRARY_PATH:-}" python -c "import torch, amp_C, apex, \
transformer_engine.pytorch; from importlib.metadata import version; from megatron_replay.trainer import cpu; \
cpu.check_version(version('megatron-core'))"

COPY examples examples
COPY tests tests
COPY tools tools

ARG VERSION=0.1.0
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="megatron_replay" \
      org.opencontainers.image.description="GRPO with rollout-level, advantage-prioritized replay on Megatron-core" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${BASE}"

# the tree is the user's: runs/ is written there, and tools/gpu_check.sh builds the extension in place
RUN useradd --create-home --uid 10001 trainer && chown -R trainer /opt/megatron_replay
USER 10001

FROM trainer AS vllm
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
USER 0
# vLLM pins a torch of its own, so it has an environment of its own, and the base image's constraints are not for it.
# This package is there to receive weights; it draws nothing, so its extension has no CUDA.
RUN python -m venv --without-pip /opt/vllm \
 && env -u PIP_CONSTRAINT pip --python /opt/vllm/bin/python install vllm==0.32.0 \
 && env -u PIP_CONSTRAINT MEGATRON_REPLAY_CUDA=0 pip --python /opt/vllm/bin/python install --no-deps . \
 && rm -rf build \
 && python -c "from importlib.metadata import version; print('torch==' + version('torch'))" | diff /etc/torch.txt -

# What --rl-vllm-python names. The base image's LD_LIBRARY_PATH begins with the folder of its torch, whose libraries
# vLLM's torch would load in place of its own; the rest of the path, with the driver's libraries, stays.
COPY --chmod=0755 <<'SCRIPT' /opt/vllm/python
#!/bin/sh
LD_LIBRARY_PATH=$(printf %s "${LD_LIBRARY_PATH:-}" | tr : '\n' | grep -v /dist-packages/ | paste -s -d : -)
export LD_LIBRARY_PATH
exec env -u PIP_CONSTRAINT /opt/vllm/bin/python "$@"
SCRIPT

RUN LD_LIBRARY_PATH="/usr/local/cuda/compat/lib.real:${LD_LIBRARY_PATH:-}" /opt/vllm/python -c "import vllm; \
from importlib.metadata import entry_points, version; assert version('vllm') == '0.32.0', version('vllm'); \
assert 'megatron_replay' in entry_points(group='vllm.general_plugins').names"

# NCCL meets none of another version, and each torch loads one of its own: the image's and the wheel's. Where they differ
# `--build-arg NCCL_MAY_DIFFER=1` builds all the same, for `--rl-vllm-transport gloo`; `nccl` is refused when it is used.
ARG NCCL_MAY_DIFFER=
RUN export LD_LIBRARY_PATH="/usr/local/cuda/compat/lib.real:${LD_LIBRARY_PATH:-}" \
 && version="import torch; print(*torch.cuda.nccl.version()[:3], sep='.')" \
 && trainer=$(python -c "$version") && vllm=$(/opt/vllm/python -c "$version") \
 && echo "NCCL: the trainer's torch loads $trainer, vLLM's $vllm" \
 && { test "$trainer" = "$vllm" || test -n "$NCCL_MAY_DIFFER"; }

# examples/qwen3 and examples/serve_vllm.sh read these
ENV VLLM_PYTHON=/opt/vllm/python
USER 10001
