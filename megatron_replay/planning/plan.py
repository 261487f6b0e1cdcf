"""Plan: whether a run fits, and how long its steps take at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_replay.planning.hardware import GB, Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.rank_memory import RankMemory, host_bytes, rank_memory
from megatron_replay.planning.step_time import StepTime, step_time
from megatron_replay.planning.traffic import Traffic, pushed_bytes, traffic
from megatron_replay.planning.workload import Workload
from megatron_replay.weight_sync.model_shape import ModelShape, layout_problems

REMEDY = {
    "weights": "a larger --tensor-model-parallel-size or --pipeline-model-parallel-size",
    "gradients": "a larger --tensor-model-parallel-size or --pipeline-model-parallel-size",
    "optimizer": "--use-distributed-optimizer",
    "activations": "--recompute-activations or a smaller --micro-batch-size",
    "logits": "a smaller --rl-logits-memory-mib",
    "head_gradient": "a larger --tensor-model-parallel-size",
    "workspace": "a smaller --micro-batch-size",
    "batch": "--rl-replay-buffer-device cpu",
    "buffer": "--rl-replay-buffer-device cpu",
    "reference": "--grpo-kl-beta 0",
    "push": "a smaller --rl-vllm-bucket-mib",
}
ENGINE_REMEDY = {
    "embedded": "a smaller --rl-generation-batch-size",
    "vllm-colocated": "a smaller --rl-vllm-gpu-memory-utilization, or --rl-engine vllm-server",
}


@dataclass(frozen=True)
class Plan:
    shape: ModelShape
    layout: Layout
    job: Workload
    hardware: Hardware
    stages: tuple[RankMemory, ...]
    sent: tuple[Traffic, ...]
    time: StepTime
    host: int  # bytes of a rank on its host

    @property
    def worst_stage(self) -> int:
        return max(range(len(self.stages)), key=lambda s: self.peak(s)[1])

    def peak(self, stage: int) -> tuple[str, int]:
        """The phase of a step in which a rank of the stage holds the most, and the bytes."""
        return max(self.stages[stage].phases(self.job.engine).items(), key=lambda item: item[1])

    @property
    def reason(self) -> str | None:
        """Why it does not fit, in one line with what to change; None: it fits."""
        phase, peak = self.peak(self.worst_stage)
        usable = self.hardware.usable_bytes
        if peak > usable:
            parts = self.stages[self.worst_stage].parts(self.job.engine)[phase]
            largest = max(parts, key=lambda name: parts[name])
            return (
                f"a rank of stage {self.worst_stage} needs {peak / GB:.1f} GB in phase {phase}, and --gpu-memory-gb "
                f"{self.hardware.gpu_memory_gb:g} less --headroom-gb {self.hardware.headroom_gb:g} leaves "
                f"{usable / GB:.1f}: the largest part is {largest}, {parts[largest] / GB:.1f} GB; "
                f"try {self._remedy(largest)}"
            )
        if self.job.engine == "vllm-colocated":
            share = self.job.engine_share * self.hardware.memory_bytes
            weights = pushed_bytes(self.shape, self.layout, self.job) / self.job.engine_tensor
            if weights > share:
                return (
                    f"--rl-vllm-gpu-memory-utilization {self.job.engine_share:g} must hold the engine's weights, "
                    f"{weights / GB:.1f} GB on each of --rl-vllm-tensor-parallel-size {self.job.engine_tensor} GPUs, "
                    f"got {share / GB:.1f} GB"
                )
        return None

    @property
    def fits(self) -> bool:
        return self.reason is None

    def to_json(self) -> dict[str, Any]:
        """Numbers in bytes and seconds. `per_rank_bytes` and `traffic_bytes` are of the worst stage."""
        worst = self.worst_stage
        phase, peak = self.peak(worst)
        result: dict[str, Any] = {
            "per_rank_bytes": self.stages[worst].items(),
            "fits": self.fits,
            "step_seconds_floor": self.time.total,
            "traffic_bytes": self.sent[worst].items(),
            "worst_stage": worst,
            "peak_bytes": peak,
            "peak_phase": phase,
            "phase_bytes": self.stages[worst].phases(self.job.engine),
            "usable_bytes": self.hardware.usable_bytes,
            "host_bytes": self.host,
            "seconds_floor": self.time.items(),
            "stages": [
                {"per_rank_bytes": m.items(), "phase_bytes": m.phases(self.job.engine), "traffic_bytes": t.items()}
                for m, t in zip(self.stages, self.sent, strict=True)
            ],
            "layout": {"tensor": self.layout.tensor, "pipeline": self.layout.pipeline, "data": self.layout.data},
        }
        return result if self.reason is None else result | {"reason": self.reason}

    def lines(self) -> list[str]:
        """A table for people, then what is not in it."""
        at, worst = self.layout, self.worst_stage
        phase, peak = self.peak(worst)
        unit, size = ("GB", GB) if peak >= GB else ("MB", 10**6)
        columns = [m.items() | {f"at once: {p}": n for p, n in m.phases(self.job.engine).items()} for m in self.stages]
        columns = [
            column | {f"sent: {name}": n for name, n in sent.items().items()}
            for column, sent in zip(columns, self.sent, strict=True)
        ]
        rows = [(f"{unit} of one rank", *(f"stage {s}{' *' if s == worst else ''}" for s in range(at.pipeline)))]
        rows += [(name, *(f"{column[name] / size:.3f}" for column in columns)) for name in columns[0]]
        seconds = ", ".join(f"{name} {value:.3g}" for name, value in self.time.items().items() if name != "total")
        return [
            f"TP {at.tensor} x PP {at.pipeline} x DP {at.data}, {at.world} GPUs, "
            f"{str(self.job.dtype).removeprefix('torch.')}, engine {self.job.engine}",
            *_aligned(rows),
            f"* the worst: {peak / size:.1f} {unit} in phase {phase}, of {self.hardware.usable_bytes / GB:.1f} GB; "
            f"{self.host / size:.3f} {unit} of a rank on its host",
            f"a step takes at least {self.time.total:.3g} s: {seconds}",
            "floors from data-sheet numbers, at the mean lengths; not measured, and no prediction",
        ]

    def _remedy(self, largest: str) -> str:
        """What to change, where it is not changed already."""
        job = self.job
        if largest == "engine":
            return ENGINE_REMEDY[job.engine]
        if largest == "optimizer" and (job.distributed_optimizer or self.layout.data == 1):
            return REMEDY["weights"]
        if largest == "activations" and job.recompute:
            return "a smaller --micro-batch-size" if job.micro_batch_size > 1 else "a smaller --seq-length"
        if largest == "workspace" and job.micro_batch_size == 1:
            return "a smaller --seq-length"
        return REMEDY[largest]


def make_plan(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware) -> Plan:
    """Raises ValueError that names a flag for a layout that this model or engine cannot have."""
    problems = [
        *layout_problems(shape, layout.tensor, layout.pipeline, sequence_parallel=job.sequence_parallel),
        *engine_problems(shape, layout, job),
    ]
    if problems:
        raise ValueError(problems[0])
    stages = range(layout.pipeline)
    return Plan(
        shape=shape,
        layout=layout,
        job=job,
        hardware=hardware,
        stages=tuple(rank_memory(shape, layout, job, hardware, s) for s in stages),
        sent=tuple(traffic(shape, layout, job, s) for s in stages),
        time=step_time(shape, layout, job, hardware),
        host=host_bytes(shape, layout, job),
    )


def engine_problems(shape: ModelShape, layout: Layout, job: Workload) -> list[str]:
    """Why the engine cannot run on this layout; each names a flag."""
    if job.engine == "embedded":
        return []
    found = []
    size, flag = job.engine_tensor, "--rl-vllm-tensor-parallel-size"
    if shape.num_heads % size:
        found.append(f"{flag} must divide the {shape.num_heads} attention heads, got {size}")
    if job.engine == "vllm-colocated":
        ranks = layout.tensor * layout.pipeline
        if size > ranks:
            found.append(f"{flag} must be at most the {ranks} ranks of a replica, got {size}")
        if not layout.replicas_on_one_node:
            found.append(
                f"--rl-engine vllm-colocated needs each replica on one node, got TP {layout.tensor} x "
                f"PP {layout.pipeline} x DP {layout.data} with {layout.gpus_per_node} GPUs a node, whose pipeline "
                "stages lie on several; use vllm-server"
            )
    return found


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(x.rjust(w) if i else x.ljust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
