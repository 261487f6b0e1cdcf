#!/usr/bin/env bash
# Train a Qwen3 on the GPUs of one node.
#
#   examples/qwen3/run_single_node.sh MODEL_SIZE --load-hf DIR --data-path FILE --heldout-data-path FILE [more flags]
#
# MODEL_SIZE is 0.6b, 1.7b or 4b. Flags behind it overrule those of examples/qwen3/*.txt; relative paths begin at the
# root of the repository. Environment:
#   GPUS         processes, one a GPU; default 8
#   PYTHON       interpreter that trains; default python
#   VLLM_PYTHON  interpreter of the environment that has vLLM; default: the one that trains
#   DRY          not empty: print the command and run nothing
# Exit code 2: it cannot start.
set -euo pipefail

script=run_single_node.sh
cd "$(dirname -- "${BASH_SOURCE[0]}")/../.."
# shellcheck source=examples/qwen3/arguments.sh
source examples/qwen3/arguments.sh

read_arguments "$@"
gpus=${GPUS:-8}
whole_number GPUS "$gpus"
run_or_print "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "${trainer[@]}"
