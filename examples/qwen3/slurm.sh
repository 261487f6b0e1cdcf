#!/usr/bin/env bash
#SBATCH --job-name=megatron-replay
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=slurm-%j.out
# Train a Qwen3 on the nodes of a Slurm job. Submit it from the root of the repository:
#
#   sbatch --nodes 4 examples/qwen3/slurm.sh MODEL_SIZE --load-hf DIR --data-path FILE --heldout-data-path FILE \
#       --run-dir DIR [more flags]
#
# MODEL_SIZE and flags are those of run_single_node.sh; each path must be the same file on every node. Environment:
#   GPUS         processes of a node, one a GPU; default 8; give another number to sbatch --gpus-per-node too
#   PORT         where the nodes meet, on the first of them; default 29500
#   IMAGE        container image of every node, for a Slurm with pyxis; the code that runs is then the image's
#   MOUNTS       what the container sees of the node, such as /data:/data
#   PYTHON       interpreter that trains; default python
#   VLLM_PYTHON  interpreter of the environment that has vLLM; default: the image's, without IMAGE the one that trains
#   DRY          not empty: print the command and run nothing
# Exit code 2: it cannot start.
set -euo pipefail

script=slurm.sh
# Slurm runs a copy of this file that lies elsewhere
cd "${SLURM_SUBMIT_DIR:-.}"
if [[ ! -f examples/qwen3/arguments.sh ]]; then
    echo "$script: it must be submitted from the root of the repository, got $PWD" >&2
    exit 2
fi
# shellcheck source=examples/qwen3/arguments.sh
source examples/qwen3/arguments.sh

launch=()
if [[ -n ${IMAGE:-} ]]; then
    VLLM_PYTHON=${VLLM_PYTHON:-/opt/vllm/python}
    launch=(--container-image "$IMAGE" --container-workdir /opt/megatron_replay)
    [[ -z ${MOUNTS:-} ]] || launch+=(--container-mounts "$MOUNTS")
elif [[ -n ${MOUNTS:-} ]]; then
    fail "MOUNTS needs IMAGE, which is not set, got $MOUNTS"
fi
read_arguments "$@"
gpus=${GPUS:-8} port=${PORT:-29500}
whole_number GPUS "$gpus"
whole_number PORT "$port"
[[ -n ${SLURM_JOB_ID:-} && -n ${SLURM_JOB_NODELIST:-} ]] || fail "it must run in a Slurm job: SLURM_JOB_ID is not set"
listed=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "SLURM_JOB_NODELIST is unknown: $SLURM_JOB_NODELIST"
mapfile -t nodes <<<"$listed"

# one launcher a node, which starts the node's processes itself; one that fails ends the others
run_or_print srun --nodes "${#nodes[@]}" --ntasks "${#nodes[@]}" --ntasks-per-node 1 --kill-on-bad-exit=1 \
    "${launch[@]}" "${PYTHON:-python}" -m torch.distributed.run --nnodes "${#nodes[@]}" --nproc-per-node "$gpus" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "${nodes[0]}:$port" "${trainer[@]}"
