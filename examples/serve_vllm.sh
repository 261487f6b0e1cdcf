#!/usr/bin/env bash
# Start a vLLM server for rollouts by hand, with the options that the trainer gives to those it starts itself.
#
#   examples/serve_vllm.sh MODEL [PORT] [more vLLM options]     e.g. ... Qwen3-0.6B 8000 --tensor-parallel-size 2
#
# MODEL is a Hugging Face folder; its weights are not read: the trainer pushes all of them first. The trainer finds
# the server by --rl-vllm-server-url http://HOST:PORT. Environment:
#   HOST          address to listen on; default 127.0.0.1, any other one needs VLLM_API_KEY
#   VLLM_API_KEY  key that every request must carry; the trainer reads the same variable
#   PYTHON        interpreter that has vllm and megatron_replay; default python
#   DTYPE, MAX_MODEL_LEN   default bfloat16 and 4096; both must be those of the run
#   FP32_LM_HEAD  1 for a run with --rl-fp32-lm-head; default 0
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
    echo "usage: $0 MODEL [PORT] [more vLLM options], got: ${*:-nothing}" >&2
    exit 2
fi
model=$1
shift
port=8000
if [[ $# -gt 0 && $1 != -* ]]; then
    port=$1
    shift
fi
host=${HOST:-127.0.0.1}
python=${PYTHON:-python}

if [[ ! -f $model/config.json ]]; then
    echo "$0: MODEL must be a folder with config.json, got $model" >&2
    exit 2
fi
if [[ ! $port =~ ^[0-9]+$ ]]; then
    echo "$0: PORT must be a number, got $port" >&2
    exit 2
fi
if [[ ! $host =~ ^(127\.[0-9.]+|localhost|::1)$ && -z ${VLLM_API_KEY:-} ]]; then
    echo "$0: HOST must be a loopback address where VLLM_API_KEY is not set, got $host" >&2
    exit 2
fi

case ${FP32_LM_HEAD:-0} in
    0) head=() ;;
    1) head=(--hf-overrides '{"head_dtype": "float32"}') ;;
    *)
        echo "$0: FP32_LM_HEAD must be 0 or 1, got $FP32_LM_HEAD" >&2
        exit 2
        ;;
esac

tensor_parallel=
for option in "$@"; do
    case $option in
        --host | --host=* | --port | --port=*)
            echo "$0: host and port are HOST and the second argument, got $option" >&2
            exit 2
            ;;
        --tensor-parallel-size* | --tensor_parallel_size* | -tp*) tensor_parallel=yes ;;
    esac
done

# a CPU has no graphs to capture, and vLLM would take most of its memory
if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    device=()
else
    device=(--enforce-eager --kv-cache-memory-bytes $((2 << 30)))
    # vLLM would bind each of several workers to a NUMA node of its own, and fail where there are fewer
    if [[ -n $tensor_parallel ]]; then
        export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}"
    fi
fi

export VLLM_SERVER_DEV_MODE=1 # the routes of weight transfer
export VLLM_LOGGING_LEVEL="${VLLM_LOGGING_LEVEL:-WARNING}" VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

exec "$python" -m vllm.entrypoints.openai.api_server \
    --model "$model" --served-model-name policy --host "$host" --port "$port" \
    --dtype "${DTYPE:-bfloat16}" --max-model-len "${MAX_MODEL_LEN:-4096}" \
    --load-format dummy --generation-config vllm --logprobs-mode processed_logprobs \
    --weight-transfer-config '{"backend": "megatron_replay"}' \
    --worker-extension-cls megatron_replay.engines.transfer_status.TransferStatus \
    --middleware megatron_replay.engines.require_api_key.RequireApiKey \
    --skip-tokenizer-init --enable-scale-out \
    --uvicorn-log-level warning --disable-uvicorn-access-log --disable-log-stats --disable-fastapi-docs \
    "${head[@]}" "${device[@]}" "$@"
