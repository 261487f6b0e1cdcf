# shellcheck shell=bash
# What run_single_node.sh and slurm.sh share: MODEL_SIZE and the flags behind it become the trainer's arguments.
# Sourced from the root of the repository, by a script that has set `script` to its name.

fail() {
    echo "${script:?}: $1" >&2
    exit 2
}

# whole_number NAME VALUE: ends the script unless VALUE is at least 1
whole_number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1 must be a whole number of at least 1, got $2"
}

# has FLAG WORDS...: whether FLAG, alone or as FLAG=VALUE, is among the words, or may be in an @FILE among them
has() {
    local flag=$1 word
    shift
    for word in "$@"; do
        [[ $word != "$flag" && $word != "$flag="* && $word != @* ]] || return 0
    done
    return 1
}

# read_arguments MODEL_SIZE FLAGS...: fills the array `trainer`, the entry script and its arguments
read_arguments() {
    [[ $# -gt 0 ]] || fail "MODEL_SIZE is missing: 0.6b, 1.7b or 4b"
    [[ $1 =~ ^(0\.6b|1\.7b|4b)$ ]] || fail "MODEL_SIZE must be 0.6b, 1.7b or 4b, got $1"
    trainer=(examples/pretrain_replay_grpo.py "@examples/qwen3/qwen3-$1.txt")
    shift
    has --load-hf "$@" || fail "--load-hf DIR is missing behind MODEL_SIZE"
    # another task than that of method.txt reads no file, and without prompts nothing is held out
    has --rl-task "$@" || has --data-path "$@" || fail "--data-path FILE is missing behind MODEL_SIZE"
    has --rl-task "$@" || has --eval-prompts "$@" || has --heldout-data-path "$@" ||
        fail "--heldout-data-path FILE is missing behind MODEL_SIZE (--eval-prompts 0 does without)"
    [[ -z ${VLLM_PYTHON:-} ]] || trainer+=(--rl-vllm-python "$VLLM_PYTHON")
    trainer+=("$@")
}

# run_or_print COMMAND...: with DRY set the command is printed, quoted for a shell, and not run
run_or_print() {
    if [[ -n ${DRY:-} ]]; then
        printf '%q ' "$@"
        echo
    else
        exec "$@"
    fi
}

# megatron-core lets tensor-parallel communication and GEMMs overlap by their order in one queue
export CUDA_DEVICE_MAX_CONNECTIONS=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# torchrun's --signals-to-handle: what it passes on to the ranks. Without SIGUSR1 there it dies of one, and they with it
export PET_SIGNALS_TO_HANDLE="${PET_SIGNALS_TO_HANDLE:-SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1}"
