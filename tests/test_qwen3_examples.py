"""examples/qwen3: the flags parse, the layouts divide, and the scripts print the commands that they would run."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_replay.arguments import grpo_config, model_options, optimizer_options, parse_args
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_configs import QWEN3_06B
from tests.launch import ROOT, command, environment

FOLDER = ROOT / "examples" / "qwen3"
SINGLE, SLURM = FOLDER / "run_single_node.sh", FOLDER / "slurm.sh"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
QWEN3 = QWEN3_06B | {"vocab_size": 151936}
# config.json of the released models, where they differ from the smallest
CONFIGS = {
    "0.6b": QWEN3 | {"num_hidden_layers": 28},
    "1.7b": QWEN3 | {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144},
    "4b": QWEN3 | {"num_hidden_layers": 36, "hidden_size": 2560, "num_attention_heads": 32, "intermediate_size": 9728},
}
FILES = ("--load-hf", "/m/Qwen 3", "--data-path=/d/a.jsonl", "--heldout-data-path", "/d/b.jsonl")


def run(script: Path, *words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    ours = ("GPUS", "PORT", "IMAGE", "MOUNTS", "DRY", "PYTHON", "VLLM_PYTHON")
    kept = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SLURM_")}
    command = ["bash", str(script), *words]
    return subprocess.run(command, cwd=cwd, env=kept | env, capture_output=True, text=True, timeout=60)


def printed(script: Path, *words: str, **env: str) -> list[str]:
    """The words of the command that a dry run prints."""
    done = run(script, *words, DRY="1", **env)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return shlex.split(done.stdout)


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables of a job of three nodes, with a stand-in for scontrol."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\n[ "$*" = "show hostnames gpu[3-5]" ] && printf "gpu3\\ngpu4\\ngpu5\\n"\n')
    scontrol.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    yield {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "gpu[3-5]", "SLURM_SUBMIT_DIR": str(ROOT), "PATH": path}


def arguments(size: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[Namespace, int]:
    """What the trainer makes of the printed command, and the processes of one node."""
    (folder / "config.json").write_text(json.dumps(CONFIGS[size]))
    words = printed(SINGLE, size, "--load-hf", str(folder), *FILES[2:], *more)
    monkeypatch.chdir(ROOT)
    return parse_args(words[words.index("examples/pretrain_replay_grpo.py") + 1 :]), int(
        after(words, "--nproc-per-node")
    )


@pytest.mark.parametrize("size", CONFIGS)
def test_the_flags_parse_and_the_layout_divides(size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args, gpus = arguments(size, tmp_path, monkeypatch)
    shape = ModelShape.from_folder(args.load_hf)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    assert gpus == 8 and shape.num_kv_heads == 8
    # the trainer's own rule, as build_model applies it on every rank
    from megatron_replay.trainer.model import _check_layout

    _check_layout(shape, model_options(args), SimpleNamespace(tensor_size=tensor, pipeline_size=pipeline))
    assert args.sequence_parallel == (tensor > 1)
    for nodes in (1, 2, 4, 8):
        assert gpus * nodes % (tensor * pipeline) == 0
        assert args.grpo_prompts_per_step % (gpus * nodes // (tensor * pipeline)) == 0
    # a colocated engine lies on its replica's GPUs, and these on one node
    assert args.rl_vllm_tensor_parallel_size == tensor * pipeline <= gpus
    assert args.seq_length <= shape.max_positions


@pytest.mark.parametrize("size", CONFIGS)
def test_the_settings_are_those_that_the_readme_states(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, gpus = arguments(size, tmp_path, monkeypatch)
    config, loss = grpo_config(args), grpo_config(args).loss
    replay = config.replay
    assert (replay.priority, replay.composition, replay.tau_max) == ("abs-advantage", "fresh-anchored", 10)
    assert (replay.priority_alpha, replay.priority_eps, replay.replay_ratio) == (0.5, 1e-6, 0.5)
    assert (replay.warmup_steps, replay.capacity, loss.aggregation) == (20, 30_000, "token-mean")
    assert (loss.clip_eps_low, loss.clip_eps_high, loss.kl_beta, loss.entropy_weight) == (0.2, 0.28, 0, 0)
    assert loss.dual_clip is None
    assert args.bf16 and args.transformer_impl == "transformer_engine" and args.recompute_activations
    assert optimizer_options(args).use_distributed_optimizer and args.rl_engine == "vllm-colocated"

    shape = ModelShape.from_folder(args.load_hf)
    rows = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim + 3 * shape.ffn_size
    parameters = (shape.num_layers * rows + shape.vocab_size) * shape.hidden_size
    tensor = args.tensor_model_parallel_size
    gigabytes = parameters / tensor * (6 + 12 / (gpus / tensor)) / 1e9
    (row,) = re.findall(rf"^\| {size[:-1]}B \|.*", (FOLDER / "README.md").read_text(), re.MULTILINE)
    assert f"| {tensor} x 1 x {gpus // tensor} |" in row and row.endswith(f"| {gigabytes:.1f} GB |")


def test_every_value_of_the_method_says_where_it_is_from() -> None:
    source, marked = None, {}
    for line in (FOLDER / "method.txt").read_text().splitlines()[3:]:
        if found := re.match(r"# (\[\w+\]|not of the method)", line):
            source = found[1]
        elif line.startswith("--"):
            marked[line.split()[0]] = source
    assert None not in marked.values() and set(marked.values()) == {
        "[paper]",
        "[tables]",
        "[unknown]",
        "not of the method",
    }
    unknown = {flag for flag, where in marked.items() if where == "[unknown]"}
    assert {"--lr", "--grpo-group-size", "--grpo-prompts-per-step", "--rl-max-response-length"} <= unknown
    assert not any(flag.startswith("--rl-replay") for flag in unknown)


def test_one_node(tmp_path: Path) -> None:
    words = printed(SINGLE, "1.7b", *FILES, "--lr", "2e-6", GPUS="4", PYTHON="/py thon", VLLM_PYTHON="/opt/vllm/python")
    assert words == [
        *("/py thon", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
        *("examples/pretrain_replay_grpo.py", "@examples/qwen3/qwen3-1.7b.txt"),
        *("--rl-vllm-python", "/opt/vllm/python", *FILES, "--lr", "2e-6"),
    ]
    assert run(SINGLE, "1.7b", *FILES, DRY="1", cwd=tmp_path).stdout == run(SINGLE, "1.7b", *FILES, DRY="1").stdout


def test_without_dry_the_script_becomes_the_command(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$$ $CUDA_DEVICE_MAX_CONNECTIONS $OMP_NUM_THREADS $PWD $#"\nexit 5\n')
    python.chmod(0o755)
    env = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OMP_NUM_THREADS": "3"}
    process = subprocess.Popen([SINGLE, "4b", *FILES], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=60)
    # the same process: what ends the script ends the launcher
    assert (process.returncode, said) == (5, f"{process.pid} 1 3 {ROOT} {7 + len(FILES)}\n")


RANK = """
import os, signal, sys, time
heard = []
signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
mine = os.path.join(sys.argv[1], os.environ["RANK"])
open(mine + ".ready", "w").close()
deadline = time.monotonic() + 200
while not heard and time.monotonic() < deadline:
    time.sleep(0.05)
# what a save takes; a launcher that is gone would end it here
time.sleep(1)
open(mine + ".saved", "w").write(str(heard))
"""


@pytest.mark.parametrize("theirs", ["", "SIGTERM,SIGUSR1"])
def test_torchrun_passes_sigusr1_on_and_waits(tmp_path: Path, theirs: str) -> None:
    """The installed torchrun, in the environment that the script gives it, with two ranks that save."""
    (tmp_path / "rank.py").write_text(RANK)
    python = tmp_path / "python"
    words = command(2, tmp_path / "rank.py", tmp_path)
    python.write_text(f"#!/bin/sh\nexec {shlex.join(words)}\n")
    python.chmod(0o755)
    env = environment() | {"PYTHON": str(python)} | ({"PET_SIGNALS_TO_HANDLE": theirs} if theirs else {})
    process = subprocess.Popen([SINGLE, "4b", *FILES], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 200
        while len(list(tmp_path.glob("*.ready"))) < 2:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        process.wait(200)
    finally:
        process.kill()
    saved = {x.name: x.read_text() for x in tmp_path.glob("*.saved")}
    assert saved == dict.fromkeys(("0.saved", "1.saved"), str([int(signal.SIGUSR1)]))


def test_several_nodes_meet_at_the_first(slurm: dict[str, str], tmp_path: Path) -> None:
    # as Slurm does, which runs a copy
    words = printed(Path(shutil.copy(SLURM, tmp_path / "slurm_script")), "4b", *FILES, **slurm)
    assert words[0] == "srun" and after(words, "--nodes") == after(words, "--ntasks") == after(words, "--nnodes") == "3"
    assert (after(words, "--rdzv-endpoint"), after(words, "--rdzv-id")) == ("gpu3:29500", "77")
    assert (after(words, "--rdzv-backend"), after(words, "--nproc-per-node")) == ("c10d", "8")
    assert words[words.index("examples/pretrain_replay_grpo.py") :] == [
        *("examples/pretrain_replay_grpo.py", "@examples/qwen3/qwen3-4b.txt", *FILES)
    ]
    assert "--container-image" not in words and "--rl-vllm-python" not in words


def test_several_nodes_in_the_image(slurm: dict[str, str]) -> None:
    words = printed(SLURM, "4b", *FILES, IMAGE="/i.sqsh", MOUNTS="/d:/d", PORT="1234", GPUS="4", **slurm)
    assert (after(words, "--container-image"), after(words, "--container-mounts")) == ("/i.sqsh", "/d:/d")
    assert (after(words, "--rdzv-endpoint"), after(words, "--nproc-per-node")) == ("gpu3:1234", "4")
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert f"WORKDIR {after(words, '--container-workdir')}\n" in dockerfile
    assert f"ENV VLLM_PYTHON={after(words, '--rl-vllm-python')}\n" in dockerfile


SUBMITTED_ELSEWHERE = {"SLURM_SUBMIT_DIR": "/", "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "gpu[3-5]"}


@pytest.mark.parametrize(
    ("script", "words", "env", "message"),
    [
        (SINGLE, (), {}, "MODEL_SIZE is missing: 0.6b, 1.7b or 4b"),
        (SLURM, (), {}, "MODEL_SIZE is missing: 0.6b, 1.7b or 4b"),
        (SINGLE, ("8b", *FILES), {}, "MODEL_SIZE must be 0.6b, 1.7b or 4b, got 8b"),
        (SINGLE, ("0x6b", *FILES), {}, "MODEL_SIZE must be 0.6b, 1.7b or 4b, got 0x6b"),
        (SINGLE, ("4b", *FILES[2:]), {}, "--load-hf DIR is missing behind MODEL_SIZE"),
        (SINGLE, ("4b", *FILES[:2], *FILES[3:]), {}, "--data-path FILE is missing behind MODEL_SIZE"),
        (
            SINGLE,
            ("4b", *FILES[:3]),
            {},
            "--heldout-data-path FILE is missing behind MODEL_SIZE (--eval-prompts 0 does",
        ),
        (SINGLE, ("4b", *FILES), {"GPUS": "0"}, "GPUS must be a whole number of at least 1, got 0"),
        (SLURM, ("4b", *FILES), {"PORT": "x"}, "PORT must be a whole number of at least 1, got x"),
        (SLURM, ("4b", *FILES), {"MOUNTS": "/d:/d"}, "MOUNTS needs IMAGE, which is not set, got /d:/d"),
        (SLURM, ("4b", *FILES), {}, "it must run in a Slurm job: SLURM_JOB_ID is not set"),
        (SLURM, ("4b", *FILES), SUBMITTED_ELSEWHERE, "it must be submitted from the root of the repository, got /"),
    ],
)
def test_what_is_missing_or_wrong_is_one_line(script: Path, words: tuple, env: dict, message: str) -> None:
    done = run(script, *words, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script.name}: {message}") and done.stderr.count("\n") == 1


def test_nodes_that_slurm_does_not_know(slurm: dict[str, str]) -> None:
    done = run(SLURM, "4b", *FILES, **(slurm | {"SLURM_JOB_NODELIST": "cpu1"}))
    assert (done.returncode, done.stderr) == (2, "slurm.sh: SLURM_JOB_NODELIST is unknown: cpu1\n")


@pytest.mark.parametrize(
    "words",
    [
        ("--load-hf", "m", "--rl-task", "reasoning-gym:chain_sum"),
        ("--load-hf", "m", "--data-path", "a", "--eval-prompts", "0"),
        ("@mine.txt",),
    ],
)
def test_what_another_task_or_file_makes_needless_is_not_asked_for(words: tuple[str, ...]) -> None:
    assert printed(SINGLE, "4b", *words)[-len(words) :] == list(words)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_valid_bash_and_clean(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    assert os.access(script, os.X_OK) == script.read_text().startswith("#!")
    shellcheck = Path(sys.executable).with_name("shellcheck")
    if not shellcheck.exists():
        pytest.skip("shellcheck is not installed; `make lint` installs it")
    command = [shellcheck, "--external-sources", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
