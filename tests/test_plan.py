"""tools/plan.py: its contract and refusals; its memory model against real models, optimizers and buffers on a CPU.

Started as a program this file is the worker of its own slow test: it measures each layout of the world in turn.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_replay import arguments
from megatron_replay.config import ModelOptions, OptimizerOptions, ReplayConfig, SamplingConfig
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.linear_grpo_loss import linear_grpo_loss
from megatron_replay.planning.activation_memory import ActivationModel
from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.parameters import numel, rank_parameters
from megatron_replay.planning.plan import Plan, make_plan
from megatron_replay.planning.presets import PRESETS, model_shape
from megatron_replay.planning.rank_memory import HEAD_ROW, rank_memory, sent_bytes
from megatron_replay.planning.state_memory import buffer_bytes, state_bytes
from megatron_replay.planning.step_time import layer_flops
from megatron_replay.planning.traffic import pushed_bytes
from megatron_replay.planning.workload import workload
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.trainer import generation
from megatron_replay.trainer.attention import PackedSequences
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.optimizer import wrap_for_training
from megatron_replay.trainer.parallel import ParallelGroups, initialize
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from megatron_replay.weight_sync.transfer_plan import local_entries
from megatron_replay.weight_sync.transfer_plan import make_plan as make_transfer_plan
from tests.hf_configs import LLAMA32_1B, QWEN3_06B, QWEN25_05B, shape_of
from tests.launch import ROOT, run_script
from tests.parallel.forked import run_world
from tests.single_rank import SEQ_LENGTH, groups

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# head_dim * heads is not hidden, no size is a multiple of 64 and the vocabulary is padded
SMALL = {"num_hidden_layers": 4, "hidden_size": 44, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
SMALL |= {"intermediate_size": 84, "vocab_size": 29}
LAYOUTS = {"tp2-pp2": (2, 2), "tp2": (2, 1), "pp2": (1, 2), "dp4": (1, 1)}
CASES = list(itertools.product(LAYOUTS, DTYPES, (True, False), (True, False)))


def small(tied: bool) -> ModelShape:
    return shape_of(QWEN3_06B, **SMALL, tie_word_embeddings=tied)


def nbytes(tensors: list[Tensor]) -> int:
    """Of the memory behind tensors, each piece once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measured(shape: ModelShape, groups: ParallelGroups, dtype: torch.dtype, distributed: bool) -> dict[str, int]:
    """Bytes of this rank after one optimizer step."""
    options = ModelOptions(dtype=dtype, make_vocab_size_divisible_by=8)
    model = build_model(shape, options, groups, SEQ_LENGTH)
    for p in model.parameters():
        p.data.normal_(0, 0.02)
    ddp, optimizer, _ = wrap_for_training(
        model, OptimizerOptions(lr=1e-3, total_updates=1, use_distributed_optimizer=distributed)
    )
    for p in ddp.parameters():
        p.main_grad.normal_()
    optimizer.step()
    weights = [p.data for p in ddp.parameters()]
    owned = {w.untyped_storage().data_ptr() for w in weights}
    kept = []
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = inner.optimizer
        kept += [t for state in adam.state.values() for t in state.values() if torch.is_tensor(t) and t.dim()]
        kept += [p.data for group in adam.param_groups for p in group["params"]]
    return {
        "weights": nbytes(weights),
        "gradients": nbytes([b.grad_data for b in ddp.buffers]),
        "optimizer": nbytes([t for t in kept if t.untyped_storage().data_ptr() not in owned]),
    }


def planned(shape: ModelShape, layout: Layout, stage: int, dtype: torch.dtype, distributed: bool) -> dict[str, int]:
    shapes = rank_parameters(shape, shape.padded_vocab_size(8, layout.tensor), layout.tensor, layout.pipeline, stage)
    shared = shape.tied_embeddings and layout.pipeline > 1
    return vars(state_bytes(shapes, dtype, distributed=distributed, data=layout.data, shares_embedding=shared))


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_state_of_one_rank_is_exact(tied: bool, dtype: torch.dtype, distributed: bool) -> None:
    shape = small(tied)
    found, expected = (
        measured(shape, groups(), dtype, distributed),
        planned(shape, Layout(1, 1, 1, 1), 0, dtype, distributed),
    )
    if not distributed:
        assert found == expected
        return
    assert (found["weights"], found["gradients"]) == (expected["weights"], expected["gradients"])
    # the plan's shard has the alignment of the buffers in it, an optimizer's has not
    assert 0.95 * expected["optimizer"] <= found["optimizer"] <= expected["optimizer"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("plan") / "measured.json"
    run_script(Path(__file__), out)
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype", "tied", "distributed"), CASES)
def test_state_of_every_rank_of_a_layout(
    layouts: dict[str, Any], name: str, dtype: str, tied: bool, distributed: bool
) -> None:
    tensor, pipeline = LAYOUTS[name]
    layout = Layout.of(4, tensor, pipeline, 4)
    ranks = layouts[f"{name} {dtype} {tied} {distributed}"]
    assert len(ranks) == 4
    for rank, found in enumerate(ranks):
        expected = planned(small(tied), layout, rank // (4 // pipeline), DTYPES[dtype], distributed)
        if not distributed:
            assert found == expected, rank
            continue
        assert (found["weights"], found["gradients"]) == (expected["weights"], expected["gradients"]), rank
        assert found["optimizer"] <= expected["optimizer"], rank
    if distributed:
        # the shards of a stage together hold its state once
        for stage in range(pipeline):
            held = ranks[stage * 4 // pipeline : (stage + 1) * 4 // pipeline : tensor]
            expected = planned(small(tied), layout, stage, DTYPES[dtype], distributed)["optimizer"] * layout.data
            assert sum(r["optimizer"] for r in held) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("capacity", "tokens"), [(7, 100), (30_000, 1), (64, 4096)])
def test_the_buffer_is_exact(capacity: int, tokens: int) -> None:
    ring = RolloutReplayBuffer(ReplayConfig(capacity=capacity), seed=1, arena_tokens=tokens).ring
    device = nbytes([*ring.arena.values(), ring.log_weight, ring.uid])
    assert buffer_bytes(capacity, tokens) == (device, nbytes([ring.records]))


LENGTHS = [40, 64, 39, 17]  # of the sequences of one pack


def saved_bytes(shape: ModelShape, at: ParallelGroups, **options: Any) -> int:
    """What a real forward pass of one packed microbatch keeps for backward, weights left out."""
    model = build_model(shape, ModelOptions(**options), at, 256)
    model.train()
    for p in model.parameters():
        p.data.normal_(0, 0.02)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    net = Float16Module(model.config, model) if options["dtype"] == torch.bfloat16 else model
    cu = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    position_ids = torch.cat([torch.arange(n) for n in LENGTHS])
    ids = torch.arange(len(position_ids))[None] % shape.vocab_size
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        net(
            ids,
            position_ids[None],
            None,
            packed_seq_params=PackedSequences.build(cu, position_ids, max(LENGTHS), dtype=options["dtype"]),
            # the head's memory is planned apart: this keeps nothing
            output_processor=lambda *, hidden_states, **_: hidden_states.float().sum(),
        )
    return nbytes(list(kept.values()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("config", [QWEN3_06B, QWEN25_05B, LLAMA32_1B], ids=["qwen3", "qwen2", "llama"])
def test_activations_of_a_real_forward_pass_are_exact(
    config: dict[str, Any], dtype: torch.dtype, recompute: bool
) -> None:
    shape = shape_of(config, **SMALL | {"num_hidden_layers": 3, "rope_scaling": None})
    model = ActivationModel(shape, dtype, recompute=recompute, device="cpu")
    expected = model.saved(sum(LENGTHS), 3, first=True, last=True, longest=64)
    assert saved_bytes(shape, groups(), dtype=dtype, recompute_activations=recompute) == expected


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_a_tensor_parallel_rank(
    layouts: dict[str, Any], dtype: str, sequence_parallel: bool, recompute: bool
) -> None:
    model = ActivationModel(small(True), DTYPES[dtype], 2, sequence_parallel, recompute, "cpu")
    expected = model.saved(sum(LENGTHS), 4, first=True, last=True, longest=64)
    for found in layouts[f"activations {dtype} {sequence_parallel} {recompute}"]:
        assert found == expected


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_head_keeps_a_float32_gradient_of_its_weight(dtype: torch.dtype) -> None:
    shape, layout = shape_of(QWEN3_06B, **SMALL | {"vocab_size": 128}), Layout(1, 1, 1, 8)
    job = replace(job_of(layout), micro_batch_size=1, max_response_length=50, dtype=dtype)
    hidden = torch.randn(50, 44, dtype=dtype, requires_grad=True)
    weight = torch.randn(128, 44, dtype=dtype, requires_grad=True)
    inputs = GrpoLossInputs(
        behavior_logprobs=torch.zeros(50),
        advantage=torch.ones(1),
        cu_seqlens=torch.tensor([0, 50], dtype=torch.int32),
        loss_mask=torch.ones(50, dtype=torch.bool),
        loss_weight=torch.ones(1),
    )
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        linear_grpo_loss(hidden, weight, torch.zeros(50, dtype=torch.int64), inputs, GrpoLossOptions())
    planned = rank_memory(shape, layout, job, Hardware(), 0).head_gradient
    # beside what is kept for backward: the trained rows of the hidden states, and each one's float32 numbers
    assert nbytes(kept) == planned - nbytes([hidden]) - 50 * HEAD_ROW


def test_the_key_value_cache_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[Any] = []

    class Kept(generation.StaticInferenceContext):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            contexts.append(self)

    monkeypatch.setattr(generation, "StaticInferenceContext", Kept)
    shape = small(True)
    model = build_model(shape, ModelOptions(make_vocab_size_divisible_by=8), groups(), SEQ_LENGTH)
    for p in model.parameters():
        p.data.normal_(0, 0.02)
    sampler = generation.ModelSampler(model, groups(), vocab_size=29, max_sequence_length=SEQ_LENGTH, batch_size=3)
    sampler([[3, 4, 5]] * 3, [0, 1, 2], SamplingConfig(max_response_length=7), eos_id=1)
    (context,) = contexts
    held = nbytes([t for pair in context.key_value_memory_dict.values() for t in pair])
    assert held == ActivationModel(shape, torch.float32).cache(3, 10, 4)


def test_a_gpu_keeps_less_than_a_cpu_and_sequence_parallelism_cuts_what_is_between() -> None:
    shape = model_shape("qwen3-4b")
    sizes = [
        ActivationModel(shape, torch.bfloat16, 4, sequence_parallel=sp, device=device).layer(4096)
        for sp, device in ((False, "cpu"), (False, "cuda"), (True, "cuda"))
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    # norms and their outputs, inputs of two linear layers: 4 times T H, three quarters of which go
    assert sizes[1] - sizes[2] == 4096 * (4 * 2 * 2560 + 2 * 4) * 3 // 4


@pytest.mark.parametrize(
    ("name", "parameters"),
    # "0.6B", "1.7B", "4B" and "8B" of the model cards, embedding counted once where it is tied
    [("qwen3-0.6b", 0.596e9), ("qwen3-1.7b", 1.721e9), ("qwen3-4b", 4.022e9), ("qwen3-8b", 8.191e9)],
)
def test_presets_have_the_parameters_of_the_released_models(name: str, parameters: float) -> None:
    shape = model_shape(name)
    assert numel(rank_parameters(shape, shape.vocab_size, 1, 1, 0)) == pytest.approx(parameters, rel=1e-3)


def test_the_push_is_that_of_the_transfer_plan() -> None:
    """What the ranks of a replica send by the plan of a real push, from parameters without memory."""
    shape, layout = model_shape("qwen3-4b"), Layout(4, 2, 1, 8)
    job = job_of(layout, "--bf16", "--rl-engine", "vllm-server")
    padded = shape.padded_vocab_size(128, 4)
    entries, sent = [], []
    for stage, rank in itertools.product(range(2), range(4)):
        shapes = rank_parameters(shape, padded, 4, 2, stage)
        tensors = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}
        weights = ShardedWeights(shape, padded, tensors, tensor_rank=rank, tensor_size=4)
        entries.append(local_entries(weights, stage * 4 + rank))
        sent.append(sent_bytes(shapes, shape, 2, first_rank=rank == 0))
    plan = make_transfer_plan(entries, shape, padded, job.bucket_bytes)
    assert pushed_bytes(shape, layout, job) == plan.nbytes == sum(sent)
    memory = plan_of(shape, layout, "--bf16", "--rl-engine", "vllm-server").stages
    for stage, held in enumerate(memory):
        assert held.push == pytest.approx(2 * plan.largest_payload(stage * 4), rel=0.05)


def flags(*more: object) -> Namespace:
    base = "--run-dir x --train-iters 1 --lr 1 --load-hf x --seq-length 4096 --rl-max-response-length 3072"
    return arguments.parse_args(
        [*base.split(), "--grpo-prompts-per-step", "64", "--grpo-group-size", "8", *map(str, more)]
    )


def job_of(layout: Layout, *more: object) -> Any:
    return workload(flags(*more), layout)


def plan_of(shape: ModelShape, layout: Layout, *more: object, **hardware: float) -> Plan:
    return make_plan(shape, layout, job_of(layout, *more), Hardware(**hardware))


def test_flops_are_six_for_each_parameter_and_token_and_the_attention_beside() -> None:
    shape = model_shape("qwen3-8b")
    layout = Layout(1, 1, 64, 8)
    linear = numel(rank_parameters(shape, shape.vocab_size, 1, 1, 0)) - 2 * shape.vocab_size * shape.hidden_size
    tokens = job_of(layout).rollouts(64) * 4096
    # norms multiply nothing
    linear -= (2 * shape.num_layers + 1) * shape.hidden_size + 2 * shape.num_layers * shape.head_dim
    attention = shape.num_layers * 2 * 4096 * shape.num_heads * shape.head_dim
    head = shape.vocab_size * shape.hidden_size * 3 / 4  # of the tokens three in four are trained
    flops = 3 * tokens * (2 * linear + attention + 2 * head)
    assert layer_flops(shape, 1, 4096) == 2 * linear // 36 + attention // 36
    time = plan_of(shape, layout, "--bf16", gpu_memory_gb=1000).time
    assert time.forward_backward == pytest.approx(flops / 989e12, rel=1e-9)


def test_decoding_reads_the_weights_for_every_token_of_a_batch() -> None:
    shape, layout = model_shape("qwen3-8b"), Layout(1, 1, 1, 8)
    options = ("--bf16", "--rl-engine", "vllm-server", "--rl-vllm-max-num-seqs", "512")
    few = plan_of(shape, layout, *options, "--grpo-prompts-per-step", "1", gpu_memory_gb=1000).time.generation
    # 3,072 steps of 8 sequences: 7.57e9 weights each, and the keys and values of 2,560 tokens on average
    cache = 8 * 2560 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    prefill = shape.num_layers * layer_flops(shape, 1024, 1024) / 989e12
    assert few == pytest.approx(3072 * 2 * (7.57e9 + cache) / 3.35e12 + prefill, rel=1e-3)
    many = plan_of(shape, layout, *options, "--grpo-prompts-per-step", "64", gpu_memory_gb=1000).time.generation
    assert few < many < 64 * few


def test_parallelism_divides_the_memory_and_adds_the_traffic() -> None:
    shape = model_shape("qwen3-8b")
    alone = plan_of(shape, Layout(1, 1, 1, 8))
    tensor, pipeline = plan_of(shape, Layout(8, 1, 1, 8)), plan_of(shape, Layout(1, 4, 1, 8))
    data = plan_of(shape, Layout(1, 1, 8, 8), "--use-distributed-optimizer")
    assert tensor.stages[0].weights == pytest.approx(alone.stages[0].weights / 8, rel=1e-3)
    assert sum(s.weights for s in pipeline.stages) == alone.stages[0].weights
    assert data.stages[0].optimizer == pytest.approx(alone.stages[0].optimizer / 8, rel=1e-4)
    assert alone.sent[0].total == 0
    assert tensor.sent[0].tensor_parallel > 0 and pipeline.sent[0].pipeline > 0 and data.sent[0].data_parallel > 0
    # the first stage holds the activations of four microbatches, the last of one
    assert pipeline.stages[0].activations > 3.9 * pipeline.stages[3].activations * 0.9
    # gradients in float32 and weights in the dtype go round once each
    parameters = alone.stages[0].weights / 4
    assert data.sent[0].data_parallel == pytest.approx(7 / 8 * (4 + 4) * parameters, rel=1e-3)


def test_wires() -> None:
    in_node, across = Layout(4, 2, 1, 8), Layout(4, 2, 2, 8)
    assert (in_node.tensor_wire, in_node.data_wire, in_node.pipeline_wire) == ("nvlink", "nvlink", "nvlink")
    assert (across.tensor_wire, across.data_wire, across.pipeline_wire) == ("nvlink", "nvlink", "network")
    assert Layout(8, 1, 2, 8).data_wire == "network" and Layout(16, 1, 1, 8).tensor_wire == "network"
    assert in_node.replicas_on_one_node and not across.replicas_on_one_node


def test_a_colocated_engine_wakes_beside_what_a_push_took() -> None:
    shape = model_shape("qwen3-4b")
    options = ("--bf16", "--rl-engine", "vllm-colocated")
    plan = plan_of(shape, Layout(1, 1, 8, 8), *options, "--use-distributed-optimizer")
    phases = plan.stages[0].phases("vllm-colocated")
    assert phases["sample"] == phases["push"] + 40_000_000_000
    assert plan.reason is None
    large_share = plan_of(shape, Layout(1, 1, 8, 8), *options, "--rl-vllm-gpu-memory-utilization", "0.9")
    assert large_share.reason is not None and "--rl-vllm-gpu-memory-utilization" in large_share.reason
    small_share = plan_of(shape, Layout(8, 1, 1, 8), *options, "--rl-vllm-gpu-memory-utilization", "0.05")
    assert small_share.reason is not None and "must hold the engine's weights" in small_share.reason


def run_tool(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "plan.py"), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


def test_the_json_has_what_the_contract_says(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = [
        "--model",
        "qwen3-4b",
        "--nodes",
        "2",
        "--gpus-per-node",
        "8",
        "--tp",
        "4",
        "--pp",
        "2",
        "--gpu-memory-gb",
        "80",
        "--json",
    ]
    done = run_tool(*words, out)
    assert done.returncode == 0, done.stderr
    plan = json.loads(out.read_text())
    assert plan["fits"] is True and "reason" not in plan
    assert plan["step_seconds_floor"] > 0 and plan["step_seconds_floor"] == plan["seconds_floor"]["total"]
    assert all(
        isinstance(n, int) and n >= 0 for n in (*plan["per_rank_bytes"].values(), *plan["traffic_bytes"].values())
    )
    needed = {"weights", "gradients", "optimizer", "activations", "logits", "buffer", "engine"}
    assert needed <= plan["per_rank_bytes"].keys()
    assert plan["layout"] == {"tensor": 4, "pipeline": 2, "data": 2}
    for word in (*plan["per_rank_bytes"], *plan["traffic_bytes"], "stage 1", "* the worst", "no prediction"):
        assert word in done.stdout, word


def test_what_cannot_fit_is_exit_1_and_says_why_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    done = run_tool("--model", "qwen3-8b", "--gpus-per-node", 1, "--json", out)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    plan = json.loads(out.read_text())
    assert plan["fits"] is False and line == f"does not fit: {plan['reason']}"
    assert "--gpu-memory-gb 80" in line and "--rl-generation-batch-size" in line
    done = run_tool("--model", "qwen3-8b", "--gpus-per-node", 1, "--rl-engine", "vllm-server", "--bf16")
    assert done.returncode == 1 and "the largest part is optimizer" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model qwen3-4b --tp 3 --gpus-per-node 6", "--tensor-model-parallel-size must divide the 8 key-value heads"),
        ("--model qwen3-4b --pp 5 --gpus-per-node 5", "--pipeline-model-parallel-size must divide the 36 layers, got"),
        ("--model qwen3-4b --tp 4 --pp 4", "must divide the number of processes, got 8"),
        ("--model qwen3-4b --nodes 3", "--grpo-prompts-per-step must be a multiple of the 24 data-parallel ranks, got"),
        ("--model qwen3-4b --nodes 0", "--nodes must be at least 1, got 0"),
        ("--model qwen3-4b --gpu-memory-gb 0", "--gpu-memory-gb must be positive, got 0.0"),
        ("--model qwen3-4b --headroom-gb -1", "--headroom-gb must be at least 0, got -1.0"),
        ("--model qwen3-5b", "qwen3-8b, or a folder with config.json, got 'qwen3-5b'"),
        ("--nodes 1", "--model must be one of"),
        ("--model qwen3-4b --seq-length 65536", "--seq-length must be at most the model's 40960 positions, got 65536"),
        ("--model qwen3-4b --mean-response-length 4000", "got 1024 and 4000"),
        ("--model qwen3-4b --sequence-parallel", "--sequence-parallel needs --tensor-model-parallel-size above 1"),
        ("--model qwen3-4b --rl-replay-capacity 0", "--rl-replay-capacity"),
        ("--model qwen3-4b --nodes 2 --tp 4 --pp 2 --rl-engine vllm-colocated", "needs each replica on one node"),
        ("--model qwen3-4b --rl-engine vllm-colocated --rl-vllm-tensor-parallel-size 2", "at most the 1 ranks of a"),
        ("--model qwen3-4b --json no/such/folder.json", "--json must be in a folder that exists"),
        ("--model qwen3-4b --frobnicate", "--frobnicate"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_2_and_one_line_that_names_the_flag(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plan as tool

    with pytest.raises(SystemExit) as ended:
        tool.main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[0]


def test_a_folder_and_a_file_of_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's own files are planned as they are, and give what the preset of the same shape gives."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import plan as tool

    (tmp_path / "config.json").write_text(json.dumps(PRESETS["qwen3-0.6b"]))
    (tmp_path / "flags.txt").write_text(f"--load-hf {tmp_path} --bf16  # comment\n--seq-length 2048\n")
    assert tool.main([f"@{tmp_path}/flags.txt", "--rl-max-response-length", "1024"]) == 0
    mine = capsys.readouterr().out
    words = "--model qwen3-0.6b --bf16 --seq-length 2048 --rl-max-response-length 1024"
    assert tool.main(words.split()) == 0
    assert capsys.readouterr().out == mine


def everyones(mine: Any) -> list[Any]:
    """Of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values


def measure_layouts(out: Path) -> None:
    results: dict[str, list[Any]] = {}
    for name, (tensor, pipeline) in LAYOUTS.items():
        at = initialize(tensor, pipeline, seed=1)
        for dtype, one, other in itertools.product(DTYPES, (True, False), (True, False)):
            results[f"{name} {dtype} {one} {other}"] = everyones(measured(small(one), at, DTYPES[dtype], other))
            if name == "tp2":
                options = {"sequence_parallel": one, "recompute_activations": other}
                mine = saved_bytes(small(True), at, dtype=DTYPES[dtype], **options)
                results[f"activations {dtype} {one} {other}"] = everyones(mine)
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))
    dist.barrier()


if __name__ == "__main__":
    written = Path(sys.argv[1])
    run_world(4, written.with_suffix(".store"), measure_layouts, written)
