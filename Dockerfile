# Trainer image; not built in CI. torch, Transformer Engine and apex are the base image's and are never reinstalled.
# (The PyPI project called "apex" is something else.) vLLM has an image or an environment of its own: docs/rollouts.md.
ARG BASE=nvcr.io/nvidia/pytorch:26.07-py3
FROM ${BASE}

# the extension: A100, H100, B200
ENV MEGATRON_REPLAY_CUDA=1 \
    MEGATRON_REPLAY_CUDA_ARCHS="80;90;100" \
    PIP_NO_CACHE_DIR=1

WORKDIR /opt/megatron_replay
COPY requirements/container.txt requirements/container.txt
# the base image's pip constraints keep its packages at their versions; that of torch is checked, whatever the base
RUN python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > /tmp/torch.txt \
 && pip install --no-deps megatron-core==0.19.2 \
 && pip install --constraint /tmp/torch.txt -r requirements/container.txt \
 && python -c "from importlib.metadata import version; print('torch==' + version('torch'))" | diff /tmp/torch.txt - \
 && rm /tmp/torch.txt

COPY . .
RUN pip install --no-build-isolation --no-deps --editable . \
 && python -c "from megatron_replay import _C; assert _C.cuda_architectures() == '80;90;100'"

RUN useradd --create-home trainer && chown -R trainer /opt/megatron_replay
USER trainer
