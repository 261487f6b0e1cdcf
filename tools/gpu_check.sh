#!/usr/bin/env bash
# One command for a machine with a CUDA device: builds the extension, runs the GPU tests, measures; one JSON with it all.
#
#   tools/gpu_check.sh [--full] [--dry-run] [OUT.json]
#
#   OUT.json   default gpu_check.json
#   --full     also sweep the launch configurations of the kernels; takes longer than ten minutes
#   --dry-run  print the steps and their limits in seconds, run none
#
# PYTHON chooses the interpreter, default python3. It needs torch, triton, numpy, pytest, hypothesis, setuptools,
# pybind11 and matplotlib, and the machine nvcc and a C++ compiler; nothing is installed and no network is used.
# Exit code 0: all passed; 1: a step failed; 2: it cannot start.
set -euo pipefail

PYTHON=${PYTHON:-python3}
out=gpu_check.json
benchmark="--quick" benchmark_limit=135 dry_run=

fail() {
    echo "gpu_check.sh: $1" >&2
    exit 2
}

for argument in "$@"; do
    case $argument in
        --full) benchmark="--quick --tune" benchmark_limit=900 ;;
        --dry-run) dry_run=1 ;;
        -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" && exit 0 ;;
        -*) fail "must be --full, --dry-run or OUT.json, got $argument" ;;
        *) out=$argument ;;
    esac
done
[[ -d $(dirname -- "$out") ]] || fail "OUT.json must be in a folder that exists, got $out"
out=$(realpath -m -- "$out")
found=$(command -v -- "$PYTHON") || fail "PYTHON must be an interpreter, got $PYTHON"
# absolute, since the folder changes; links stay, since the interpreter of a virtual environment is one
PYTHON=$(realpath -s -- "$found")
cd "$(dirname -- "$0")/.."

# the files with GPU tests; they import neither megatron-core nor transformers
tests="tests/test_token_logprob*.py tests/test_grpo_loss*.py tests/test_linear_grpo_loss*.py"
tests="$tests tests/test_extension.py tests/test_replay_buffer.py"

steps() {
    cat <<STEPS
environment 20 "$PYTHON" tools/benchmarks/environment.py "\$RESULT"
build 80 "$PYTHON" setup.py build_ext --inplace
gpu_tests 195 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider $tests
kernel_report 75 "$PYTHON" tools/kernel_report.py --json "\$RESULT"
benchmark_loss $benchmark_limit "$PYTHON" tools/benchmark_loss.py --device cuda $benchmark --json "\$RESULT"
benchmark_buffer 90 "$PYTHON" tools/benchmark_buffer.py --device cuda --quick --json "\$RESULT"
STEPS
}

if [[ -n $dry_run ]]; then
    steps
    exit 0
fi
"$PYTHON" -c 'import torch' 2>/dev/null || fail "PYTHON must have torch, got $PYTHON"
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || fail "no CUDA device: torch finds none"

# a build without CUDA would pass with its tests skipped; other cards' code is not needed, and an older nvcc may not
# know them
export MEGATRON_REPLAY_CUDA=1
capability='import torch; print("%d%d" % torch.cuda.get_device_capability())'
export MEGATRON_REPLAY_CUDA_ARCHS=${MEGATRON_REPLAY_CUDA_ARCHS:-$("$PYTHON" -c "$capability")}
# the project need not be installed; kernels are compiled, never interpreted
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
# NVIDIA's images compute products of float32 in TF32; tests and measurements mean float32
export TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0
steps | "$PYTHON" tools/run_steps.py "$out"
