"""Everything of a run that can be known before a process group or a GPU is there.

All problems are found, not the first alone; each is one line that names a flag and its value. Nothing is written.
"""

from __future__ import annotations

from typing import Any

from megatron_replay import arguments
from megatron_replay.planning.findings import Findings
from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.plan import make_plan
from megatron_replay.planning.workload import workload
from megatron_replay.run.checks import flag_problems
from megatron_replay.run.data_check import check_data
from megatron_replay.tokenizer import build_tokenizer
from megatron_replay.weight_sync.model_shape import ModelShape, layout_problems

PROMPTS = 1024  # of the run's first ones that are encoded


def dry_run(
    args: Any,
    *,
    world_size: int,
    gpus_per_node: int = 8,
    hardware: Hardware | None = None,
    prompts: int = PROMPTS,
) -> Findings:
    """Look at a run of `world_size` processes with these flags, as `arguments.parse_args` returns them.

    Raises RuntimeError where torch.distributed runs already.
    """
    found = Findings()
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    shape = found.attempt(lambda: ModelShape.from_folder(args.load_hf))
    layout = found.attempt(lambda: Layout.of(world_size, tensor, pipeline, gpus_per_node))
    tokenizer = found.attempt(lambda: build_tokenizer(args.tokenizer_type, args.tokenizer_model or args.load_hf))
    for problem in flag_problems(args, shape, tokenizer, None if layout is None else layout.data):
        found.refuse(problem)
    if shape is not None:
        _check_model(found, args, shape)
    else:
        found.skipped.append("weights, model and plan: there is no config.json to go by")
    check_data(found, args, tokenizer, min(prompts, max(1, args.train_iters) * args.grpo_prompts_per_step))
    if shape is not None and layout is not None:
        _plan(found, args, shape, layout, hardware or Hardware())
    if args.rl_kernel_backend != "auto":
        found.skipped.append(f"--rl-kernel-backend {args.rl_kernel_backend}: it depends on the device that trains")
    if args.rl_engine != "embedded":
        found.skipped.append(f"--rl-engine {args.rl_engine}: no engine is started and no server asked")
    return found


def _check_model(found: Findings, args: Any, shape: ModelShape) -> None:
    # these bring megatron-core, which a plan does without
    from megatron_replay.trainer.checkpoint import latest
    from megatron_replay.trainer.dry_run import checkpoint_problems, model_problems

    options = arguments.model_options(args)
    tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if refused := checkpoint_problems(args.load_hf, shape):
        found.problems += refused
    else:
        found.checked.append(f"--load-hf {args.load_hf}: its tensors have the names and shapes of config.json")
    if args.load:
        found.attempt(lambda: latest(args.load))
    if refused := list(layout_problems(shape, tensor, pipeline, sequence_parallel=options.sequence_parallel)):
        found.problems += refused
        found.skipped.append("the model of each rank: the layout cannot be built")
        return
    if options.transformer_impl == "transformer_engine":
        found.skipped.append("--transformer-impl transformer_engine: built as local layers, whose parameters are equal")
    if refused := model_problems(shape, options, tensor, pipeline, args.seq_length):
        found.problems += refused
    else:
        found.checked.append(f"every parameter of TP {tensor} x PP {pipeline} maps to tensors of --load-hf, and back")


def _plan(found: Findings, args: Any, shape: ModelShape, layout: Layout, hardware: Hardware) -> None:
    plan = found.attempt(lambda: make_plan(shape, layout, workload(args, layout), hardware))
    if plan is None:
        found.skipped.append("memory, times and traffic: the problems leave nothing to plan")
        return
    found.plan = plan.lines()
    if plan.reason is not None:
        found.problems.append(plan.reason)
