"""MegatronPolicy: one clipped update, and log-probs, of a packed batch under TP x PP x DP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_replay.ops.grpo_loss import rollout_loss_weights
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import MAXIMA, STATS, summarize_stats
from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer.forward_step import (
    HeadOptions,
    LogprobForwardStep,
    LossReport,
    TrainForwardStep,
)
from megatron_replay.trainer.frozen_policy import sharded_weights
from megatron_replay.trainer.nonfinite import NonfiniteUpdates, gradients_are_finite
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.packing import PackedMicrobatch, longest_pack, pack, padded_length, plan_bins
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sharded_weights import ShardedWeights

PER_AGE = ("ratio_mean", "clip_fraction", "ess")


@dataclass
class MegatronPolicy:
    """The policy as the loop sees it. Every rank calls every method, with its data-parallel shard of the batch."""

    model: DistributedDataParallel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    groups: ParallelGroups
    head: HeadOptions
    bin_tokens: int  # token budget of a microbatch
    age_metrics: bool = False  # names for each age: the head's age_buckets are then ages
    generation_lag: int = 0  # age of a fresh rollout, but for the first step's
    nonfinite: NonfiniteUpdates | None = None  # counts updates with a NaN; without it they are skipped all the same
    reference: dict[str, Tensor] | None = None  # weights of the reference model, where kl_beta > 0

    def __post_init__(self) -> None:
        if self.head.loss.kl_beta > 0 and self.reference is None:
            self.reference = {n: p.detach().to("cpu", copy=True) for n, p in unwrap(self.model).named_parameters()}

    def sharded_weights(self, shape: ModelShape) -> ShardedWeights:
        """What this rank holds of the weights; the tensors are the model's own."""
        return sharded_weights(unwrap(self.model), self.groups, shape)

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """One update on the global batch, and its metrics (the same on every rank).

        Without a single rollout on any rank, and where loss or gradient are not finite, nothing is trained: weights
        and optimizer state stay as they are. Raises NonfiniteUpdatesError for too many of the latter in a row.
        """
        data = self.groups.data_parallel()
        counts = torch.tensor([int(batch.loss_mask.sum()), len(batch)], dtype=torch.int64)
        tokens, rollouts = data.sum(counts).tolist()
        # the schedule counts updates from 1: what it sets now is this update's
        self.scheduler.step(1)
        lr = self._lr()
        if rollouts == 0:
            skipped = {"update_skipped": 1.0, "update_nonfinite": 0.0}
            return {"loss": 0.0, "grad_norm": 0.0, "lr": lr, "train/tokens": 0.0} | skipped
        weights = rollout_loss_weights(batch.response_lengths, tokens, rollouts, self.head.loss)
        packs = self._pack(batch)
        reference = self._reference_logprobs(batch, packs) if self.reference is not None else None
        newest = step - self.generation_lag
        inputs = [_loss_inputs(p, batch, weights, newest, reference, self.head.age_buckets) for p in packs]
        forward_step = TrainForwardStep(self.groups, self.head)

        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._schedule(forward_step, list(zip(packs, inputs, strict=True)), forward_only=False)
        finite = gradients_are_finite(self.model, forward_step.report.loss)
        grad_norm = self.optimizer.step()[1] if finite else math.nan
        metrics = self._metrics(forward_step.report)
        if self.nonfinite is not None:
            self.nonfinite.observe(finite, batch, step, self.groups)
        metrics |= {
            "grad_norm": float(grad_norm or 0.0),
            "lr": lr,
            "update_skipped": float(not finite),
            "update_nonfinite": float(not finite),
            "train/tokens": float(tokens),
            "train/microbatches": float(len(packs)),
        }
        return metrics

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs [T] float32 of the batch's trained tokens under the current weights, 0 elsewhere."""
        return self._logprobs(batch, self._pack(batch))

    @torch.no_grad()
    def _logprobs(self, batch: RolloutBatch, packs: list[PackedMicrobatch]) -> Tensor:
        self.model.eval()
        found = self._schedule(LogprobForwardStep(self.groups, self.head), packs, forward_only=True)
        out = torch.zeros(batch.tokens.numel(), device=batch.device)
        for i, p in enumerate(packs):
            values = torch.zeros(p.rows.numel(), device=self.groups.device)
            if self.groups.is_last_stage:
                values.copy_(found[i])
            out[p.token_index] = self.groups.from_last_stage(values).to(batch.device)
        return out

    def _pack(self, batch: RolloutBatch) -> list[PackedMicrobatch]:
        """Equal counts on every data-parallel rank; one length for all packs where the pipeline sends them."""
        lengths = batch.lengths.tolist()
        bins = plan_bins(lengths, self.bin_tokens)
        config = unwrap(self.model).config
        multiple = self.groups.tensor_size if config.sequence_parallel else 1
        # attention on a GPU wants each sequence in one piece
        share = self.groups.device.type == "cpu"
        piped = self.groups.pipeline_size > 1
        longest = longest_pack(batch, bins, share) if piped else 0
        most = self.groups.data_parallel().max(torch.tensor([len(bins), longest], dtype=torch.int64))
        count, longest = (int(x) for x in most)
        length = padded_length(longest, multiple) if piped else None
        return pack(batch, bins, count=max(1, count), multiple=multiple, length=length, share_prompts=share)

    def _schedule(self, forward_step: object, items: list[Any], forward_only: bool) -> list[Any]:
        first = items[0] if isinstance(items[0], PackedMicrobatch) else items[0][0]
        outputs: list[Any] = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(items),
            model=[self.model],
            num_microbatches=len(items),
            seq_length=first.input_ids.size(1),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return outputs

    def _reference_logprobs(self, batch: RolloutBatch, packs: list[PackedMicrobatch]) -> Tensor:
        with self._reference_weights():
            return self._logprobs(batch, packs)

    @contextmanager
    def _reference_weights(self) -> Iterator[None]:
        assert self.reference is not None
        parameters = dict(unwrap(self.model).named_parameters())
        current = {name: p.detach().clone() for name, p in parameters.items()}
        try:
            _fill(parameters, self.reference)
            yield
        finally:
            _fill(parameters, current)

    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def _metrics(self, report: LossReport) -> dict[str, float]:
        """Sums over microbatches and data-parallel ranks, from the last stage to all; then named."""
        buckets, device = self.head.age_buckets, self.groups.device
        sums = torch.zeros(1 + buckets * len(STATS), dtype=torch.float64, device=device)
        maxima = torch.zeros(buckets, len(MAXIMA), dtype=torch.float64, device=device)
        if report.loss is not None and report.stats is not None and report.maxima is not None:
            sums = torch.cat([report.loss.double().reshape(1), report.stats.double().flatten()])
            maxima = report.maxima.double()
        data = self.groups.data_parallel()
        sums = self.groups.from_last_stage(data.sum(sums))
        maxima = self.groups.from_last_stage(data.max(maxima).contiguous()).cpu()
        stats = sums[1:].view(buckets, len(STATS)).cpu()
        metrics = {"loss": float(sums[0])}
        parts = {"fresh": (stats[0], maxima[0]), "train": (stats.sum(0), maxima.max(0).values)}
        if buckets > 1:
            parts["replay"] = (stats[1:].sum(0), maxima[1:].max(0).values)
        for part, (row, top) in parts.items():
            metrics |= {f"{part}/{name}": value for name, value in summarize_stats(row, top).items()}
        for age in range(buckets if self.age_metrics else 0):
            of_age = summarize_stats(stats[age], maxima[age])
            if of_age["tokens"] > 0:
                metrics |= {f"age_{age + self.generation_lag:02d}/{name}": of_age[name] for name in PER_AGE}
        metrics["replay/fraction"] = metrics.get("replay/rollouts", 0.0) / max(1.0, metrics["train/rollouts"])
        metrics["train_rollout_logprob_abs_diff"] = metrics["fresh/logprob_abs_diff_mean"]
        metrics["train_rollout_logprob_abs_diff_max"] = metrics["fresh/logprob_abs_diff_max"]
        metrics["train_rollout_logprob_outliers"] = metrics["fresh/logprob_outlier_count"]
        return metrics


@torch.no_grad()
def _fill(parameters: dict[str, torch.nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def _loss_inputs(
    pack: PackedMicrobatch,
    batch: RolloutBatch,
    weights: Tensor,
    newest: int,
    reference: Tensor | None,
    age_buckets: int,
) -> GrpoLossInputs:
    """The loss sees the rows that predict a trained token, and nothing else of the pack."""
    at = pack.rollouts
    return GrpoLossInputs(
        behavior_logprobs=batch.behavior_logprobs[pack.token_index],
        advantage=batch.advantage[at],
        cu_seqlens=pack.cu_rows,
        loss_mask=torch.ones_like(pack.rows, dtype=torch.bool),
        loss_weight=weights[at],
        reference_logprobs=None if reference is None else reference[pack.token_index],
        importance_weight=batch.importance_weight[at],
        age=newest - batch.birth_step[at],
        age_buckets=age_buckets,
    )
