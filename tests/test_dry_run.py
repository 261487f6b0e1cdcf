"""The dry run: a Qwen3-4B without weights on TP 4 x PP 2 x DP 2 passes, and each thing that is broken is named.

A dry run needs a process without process groups, and these tests' process may have some: the cases run in one other
process, which is this file.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_replay import arguments
from megatron_replay.planning.findings import Findings
from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.presets import PRESETS, model_shape
from megatron_replay.planning.safetensors_header import tensor_shapes
from megatron_replay.run.checks import flag_problems
from megatron_replay.run.dry_run import dry_run
from megatron_replay.weight_sync.hf_mapping import hf_shapes
from tests.launch import ROOT, run_script
from tools.benchmarks.host_memory import host_memory

QUICKSTART = ROOT / "examples" / "quickstart"
NORM, EMBEDDING = "model.layers.7.input_layernorm.weight", "model.embed_tokens.weight"
TensorShapes = dict[str, tuple[int, ...]]


def write_headers(path: Path, shapes: TensorShapes) -> None:
    """A bfloat16 safetensors file whose tensors are a hole in it."""
    header, end = {}, 0
    for name, size in shapes.items():
        nbytes = 2
        for n in size:
            nbytes *= n
        header[name] = {"dtype": "BF16", "shape": list(size), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def write_model(folder: Path, change: Callable[[TensorShapes], object] = lambda shapes: None) -> Path:
    """Qwen3-4B: config.json, an index, and two files of headers."""
    folder.mkdir()
    shapes: TensorShapes = dict(hf_shapes(model_shape("qwen3-4b")))
    change(shapes)
    (folder / "config.json").write_text(json.dumps(PRESETS["qwen3-4b"]))
    weight_map = {}
    names = list(shapes)
    for number, part in enumerate((names[:200], names[200:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        write_headers(folder / file, {name: shapes[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_data(path: Path, prompts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"prompt": p, "answer": "12345"}) + "\n" for p in prompts))
    return path


def write_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> flags that differ from the good run's, and what `dry_run` gets beside them."""
    good = write_model(folder / "good")
    cut, gone = write_model(folder / "cut"), write_model(folder / "gone")
    with (cut / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    (gone / "model-00001-of-00002.safetensors").unlink()
    data = write_data(folder / "data.jsonl", [f"{n:05}=" for n in range(200)])
    long = write_data(folder / "long.jsonl", [f"{n:05}=" for n in range(50)] + ["1" * 2000] + ["2" * 2000])
    (folder / "broken.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": "2=",\n')
    (folder / "grader.py").write_text("def fails(prompt, response, answer, extra):\n    raise KeyError(answer)\n")
    missing = write_model(folder / "missing", lambda s: s.pop(NORM))
    shaped = write_model(folder / "shaped", lambda s: s.update({NORM: (2561,), EMBEDDING: (151936, 2560, 1)}))
    extra = write_model(folder / "extra", lambda s: s.update({"model.rotary": (3,)}))
    base = ["--load-hf", good, "--data-path", data]

    def case(*flags: object, **options: Any) -> dict[str, Any]:
        return {"flags": list(map(str, [*base, *flags])), **options}

    return {
        "good": case(),
        "missing tensor": case("--load-hf", missing),
        "wrong shapes": case("--load-hf", shaped),
        "unknown tensor": case("--load-hf", extra),
        "cut short": case("--load-hf", cut),
        "file gone": case("--load-hf", gone),
        "no config": case("--load-hf", folder),
        "tp 3": case("--tensor-model-parallel-size", 3, world_size=12),
        "pp 5": case("--pipeline-model-parallel-size", 5, world_size=20),
        "world 12": case(world_size=12),
        "no data": case("--data-path", folder / "nothing.jsonl"),
        "broken data": case("--data-path", folder / "broken.jsonl"),
        "long prompts": case("--data-path", long),
        "no held-out data": case("--eval-prompts", 8),
        "reward": case("--rl-reward", f"{folder}/grader.py:fails"),
        "no reward": case("--rl-reward", f"{folder}/grader.py:absent"),
        "resume": case("--load", folder),
        "export": case("--save-hf", folder),
        "small GPU": case(gpu_memory_gb=10),
        "engine": case("--rl-engine", "vllm-colocated"),
        "many": case("--load-hf", missing, "--tensor-model-parallel-size", 3, "--data-path", long, "--save-hf", folder),
        "elsewhere": case("--rl-engine", "vllm-server", "--rl-kernel-backend", "triton"),
        "broken mapping": case(broken_mapping=True),
        "quickstart": {"flags": [f"@{QUICKSTART}/flags.txt"], "world_size": 2},
    }


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dry")
    (folder / "cases.json").write_text(json.dumps(write_cases(folder)))
    run_script(Path(__file__), folder, timeout=300)
    return json.loads((folder / "outcome.json").read_text())


def test_a_sound_run_passes_in_seconds_and_without_the_memory_of_its_model(outcome: dict[str, Any]) -> None:
    good = outcome["good"]
    assert good["problems"] == [] and good["exit_code"] == 0
    assert good["lines"][0].startswith("TP 4 x PP 2 x DP 2, 16 GPUs, bfloat16")
    assert good["lines"][-1] == "problems: 0"
    said = "\n".join(good["lines"])
    assert "every parameter of TP 4 x PP 2 maps to tensors" in said
    assert "the first 128 prompts have at most 6 tokens of 1024" in said
    assert "16 gold answers have a mean reward of 1.000" in said
    assert "not checked" not in said
    # 8 GB of weights; seconds where nothing else runs
    assert good["peak_bytes"] < 1e9
    assert good["seconds"] < 60


def test_the_quickstart_passes(outcome: dict[str, Any]) -> None:
    assert outcome["quickstart"]["problems"] == []


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing tensor", [f"lacks 1 tensors, the first is {NORM}"]),
        ("wrong shapes", [f"{EMBEDDING} must be [151936, 2560], got [151936, 2560, 1]", f"{NORM} must be [2560], got"]),
        ("unknown tensor", ["has 1 unknown tensors, the first is model.rotary"]),
        ("cut short", ["bytes by its header, got 1000000"]),
        ("file gone", ["model-00001-of-00002.safetensors cannot be read: No such file or directory"]),
        ("no config", ["--load-hf must name a folder with a config.json"]),
        ("tp 3", [
            "--tensor-model-parallel-size must divide the 8 key-value heads or be a multiple of it, got 3",
            "--tensor-model-parallel-size must divide the 32 attention heads, got 3",
            "--tensor-model-parallel-size must divide the 9728 ffn rows, got 3",
        ]),
        ("pp 5", ["--pipeline-model-parallel-size must divide the 36 layers, got 5"]),
        ("world 12", ["--pipeline-model-parallel-size 2 must divide the number of processes, got 12"]),
        ("no data", ["--data-path: data_path must name a readable JSONL file"]),
        ("broken data", ["broken.jsonl:2: "]),
        ("long prompts", ["long.jsonl: prompt 50 must have 1 to 1024", "long.jsonl: prompt 51 must have 1 to 1024"]),
        ("no held-out data", ["--heldout-data-path must name a JSONL file"]),
        ("reward", ["must have a finite reward, got None"]),
        ("no reward", ["absent"]),
        ("resume", ["--load must name a folder with a checkpoint"]),
        ("export", ["--save-hf must name a folder that does not exist"]),
        ("small GPU", ["needs", "--gpu-memory-gb 10"]),
        ("engine", ["--rl-engine vllm-colocated needs each replica on one node"]),
    ],
)  # fmt: skip
def test_each_broken_thing_is_one_line_that_names_it(outcome: dict[str, Any], name: str, said: list[str]) -> None:
    found = outcome[name]
    assert found["exit_code"] == 1
    for words in said:
        assert any(words in problem for problem in found["problems"]), (words, found["problems"])
    assert all("\n" not in problem and "--" in problem for problem in found["problems"])
    assert len(found["problems"]) == len(set(found["problems"]))
    # nothing else is wrong; a reward fails for each of the answers that are scored
    assert len(found["problems"]) == {"reward": 16, "small GPU": 1}.get(name, len(said))


def test_all_problems_are_listed_and_not_the_first_alone(outcome: dict[str, Any]) -> None:
    problems = "\n".join(outcome["many"]["problems"])
    for words in ("lacks 1 tensors", "key-value heads", "number of processes, got 16", "prompt 50", "--save-hf"):
        assert words in problems, words
    lines = outcome["many"]["lines"]
    assert lines[-1] == f"problems: {len(outcome['many']['problems'])}"
    assert any(line.startswith("not checked: the model of each rank") for line in lines)


def test_what_is_not_checked_says_so(outcome: dict[str, Any]) -> None:
    lines = outcome["elsewhere"]["lines"]
    assert outcome["elsewhere"]["problems"] == []
    assert [line for line in lines if line.startswith("not checked: ")] == [
        "not checked: --rl-kernel-backend triton: it depends on the device that trains",
        "not checked: --rl-engine vllm-server: no engine is started and no server asked",
    ]


def test_a_parameter_of_another_shape_is_found_on_every_rank_that_has_it(outcome: dict[str, Any]) -> None:
    found = outcome["broken mapping"]["problems"]
    assert len(found) == 4
    for rank, problem in enumerate(found):
        assert problem.startswith(f"--load-hf: tensor-parallel rank {rank} of stage 1: decoder.final_layernorm.weight")


def test_flags_that_need_model_and_tokenizer() -> None:
    shape, layout = model_shape("qwen3-0.6b"), Layout(1, 1, 3, 8)
    args = flags("--seq-length", 50_000, "--rl-max-response-length", 10)

    class Large:
        vocab_size = 151_937
        eos_id = 1

    problems = list(flag_problems(args, shape, Large(), layout.data))  # type: ignore[arg-type]
    assert problems == [
        "--seq-length must be at most the model's 40960 positions, got 50000",
        "--tokenizer-model must fit the model's vocabulary of 151936, got 151937 ids",
        "--grpo-prompts-per-step must be a multiple of the 3 data-parallel ranks, got 64",
    ]
    assert list(flag_problems(args, None, None, None)) == []


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 64, "its header would have"),
        (struct.pack("<Q", 2) + b"[]", "is no safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "is no safetensors file"),
        (struct.pack("<Q", 2) + b"{}x", "must have 10 bytes by its header, got 11"),
    ],
)
def test_what_is_no_safetensors_file(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        tensor_shapes(path)
    assert str(refused.value).startswith(str(path))


def test_headers_are_those_that_safetensors_writes() -> None:
    from safetensors import safe_open

    path = QUICKSTART / "model" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        expected = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert tensor_shapes(path) == expected


def flags(*more: object) -> argparse.Namespace:
    base = [
        *("--run-dir", "x", "--train-iters", "2", "--load-hf", "x", "--lr", "1e-6", "--bf16", "--eval-prompts", "0"),
        *("--seq-length", "4096", "--rl-max-response-length", "3072"),
        *("--grpo-prompts-per-step", "64", "--grpo-group-size", "8", "--rl-task", "jsonl"),
        *("--tensor-model-parallel-size", "4", "--pipeline-model-parallel-size", "2"),
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(QUICKSTART / "model/tokenizer.model")),
    ]
    return arguments.parse_args([*base, *map(str, more)])


def run_case(case: dict[str, Any]) -> Findings:
    quickstart = case["flags"][0].startswith("@")
    args = arguments.parse_args(case["flags"]) if quickstart else flags(*case["flags"])
    hardware = Hardware(gpu_memory_gb=case.get("gpu_memory_gb", 80))
    return dry_run(args, world_size=case.get("world_size", 16), hardware=hardware)


def main() -> None:
    folder = Path(sys.argv[1])
    from megatron_replay.trainer import cpu

    cpu.install()
    from megatron_replay.trainer import dry_run as trainer

    outcomes, true_shape = {}, trainer.shard_shape
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        if case.get("broken_mapping"):
            trainer.shard_shape = lambda name, *at: (1,) if "final" in name else true_shape(name, *at)  # type: ignore[assignment]
        began = time.perf_counter()
        found = run_case(case)
        outcomes[name] = {
            "problems": found.problems,
            "lines": found.lines(),
            "exit_code": found.exit_code,
            "seconds": time.perf_counter() - began,
            "peak_bytes": host_memory("VmHWM"),
        }
        trainer.shard_shape = true_shape
    (folder / "outcome.json").write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main()
