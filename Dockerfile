# Trainer image. torch, Transformer Engine and apex are the base image's and are never reinstalled.
# (The PyPI project called "apex" is something else.)
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE}

# the extension: A100, H100, B200
ENV MEGATRON_REPLAY_CUDA=1 \
    MEGATRON_REPLAY_CUDA_ARCHS="80;90;100" \
    PIP_NO_CACHE_DIR=1

WORKDIR /opt/megatron_replay
COPY requirements/container.txt requirements/container.txt
# the base image's own constraint file keeps its torch and its libraries at their versions
RUN pip install --no-deps megatron-core==0.19.2 \
 && pip install -r requirements/container.txt

COPY . .
RUN pip install --no-build-isolation --no-deps --editable . \
 && python -c "from megatron_replay import _C; assert _C.cuda_architectures() == '80;90;100'"

RUN useradd --create-home trainer && chown -R trainer /opt/megatron_replay
USER trainer
