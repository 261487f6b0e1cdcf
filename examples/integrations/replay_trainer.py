"""ReplayGRPOTrainer: rollout-level replay inside TRL's GRPOTrainer; written for TRL 1.13.

Dims: N rollouts of a generation batch, P and C positions of the longest prompt and completion, B rows of a microbatch,
L positions of its longest row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOConfig, GRPOTrainer

from megatron_replay import (
    DataParallelGroup,
    Draw,
    GrpoLossInputs,
    GrpoLossOptions,
    ReplayConfig,
    RolloutBatch,
    RolloutReplayBuffer,
    compose,
    grpo_loss,
    informative,
    pack_padded,
    pad_packed,
    rollout_loss_weights,
    summarize_stats,
    with_group_advantages,
)

BUFFER_FILE = "replay_buffer.pt"
AGGREGATION = {"dapo": "token-mean", "grpo": "sequence-mean", "dr_grpo": "fixed-length"}
ADVANTAGE_STD = {"group": "sample", "none": "none"}
ADVANTAGE_EPS = 1e-4  # TRL's
# options that change the loss or the sampling distribution in a way that is not replayed -> the value that does not
LEFT_OUT = {
    "beta": 0.0,
    "use_liger_kernel": False,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "off_policy_mask_threshold": None,
    "multi_objective_aggregation": "sum_then_normalize",
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
}
# what TRL returns of a generation batch of text
TEXT = {
    "prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages", "num_items_in_batch",
    "old_per_token_logps", "sampling_per_token_logps", "importance_sampling_ratio",
}  # fmt: skip


class ReplayGRPOTrainer(GRPOTrainer):
    """TRL's trainer, whose updates train all informative fresh rollouts and, beside them, rollouts drawn again.

    A generation batch is one update, or `num_iterations` of them. Ages count generation batches. Rollouts of groups
    whose rewards are all equal are neither trained, nor stored, nor counted. `arena_tokens` bounds the buffer: the
    oldest rollouts go first. Everything else is TRL's. Raises ValueError for an option that is not replayed.
    """

    def __init__(self, *args: Any, replay: ReplayConfig | None = None, arena_tokens: int = 1 << 22, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.loss_options = loss_options(self.args)
        if self.accelerator.num_processes > 1 or self.aux_loss_enabled:
            raise ValueError(
                f"replay needs one process and no auxiliary loss of experts, got {self.accelerator.num_processes} and "
                f"router_aux_loss_coef {self.router_aux_loss_coef}"
            )
        self.buffer = RolloutReplayBuffer(replay or ReplayConfig(), seed=self.args.seed, arena_tokens=arena_tokens)
        self.add_callback(_AfterUpdate(self))
        self._fresh = RolloutBatch.empty()  # trained now, stored after the update
        self._trained_rows = 0
        self._stats: list[tuple[Tensor, Tensor]] = []  # of the microbatches of this update

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_function = super()._calculate_rewards(*args, **kwargs)  # [N, functions], NaN: no reward
        return self._rewards_per_function

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        if unknown := sorted(set(output) - TEXT):
            raise ValueError(f"replay takes rollouts of text alone, got {', '.join(unknown)}")
        step = self.state.global_step // self.num_iterations
        std = ADVANTAGE_STD[self.args.scale_rewards]
        rollouts = with_group_advantages(self._rollouts(output, step), std=std, eps=ADVANTAGE_EPS)
        self._fresh = informative(rollouts)
        self.buffer.evict(step)
        batch, draw = compose(self._fresh, self.buffer, step, DataParallelGroup())
        self._trained_rows = len(batch)
        ages = (step - batch.birth_step[draw.fresh :]).double()
        sizes = {"draw_size": len(ages), "size": len(self.buffer)}
        found = sizes | ({"age_mean": float(ages.mean()), "age_max": float(ages.max())} if len(ages) else {})
        for name, value in found.items():
            self._metrics["train"][f"replay/{name}"].append(value)
        return self._rows(batch, draw)

    def _rollouts(self, output: dict[str, Any], step: int) -> RolloutBatch:
        """The generation batch as it was sampled; without a finite reward or log-prob a rollout is left out."""
        completion_mask = output["completion_mask"]
        trained = (completion_mask * output.get("tool_mask", 1)).bool()  # [N, C]
        tokens = torch.cat([output["prompt_ids"], output["completion_ids"]], 1)  # [N, P + C]
        attention_mask = torch.cat([output["prompt_mask"], completion_mask], 1)
        logprobs = self._behavior_logprobs(output, tokens, attention_mask)  # [N, C]
        per_function = self._rewards_per_function
        reward = (per_function * self.reward_weights.to(per_function.device)).nansum(1)  # [N]
        usable = ~per_function.isnan().all(1) & reward.isfinite() & trained.any(1)
        usable &= torch.where(trained, logprobs, 0).isfinite().all(1)
        uid = step * len(tokens) + torch.arange(len(tokens), device=tokens.device)
        prompt = (tokens.shape[1] - trained.shape[1], 0)
        rows = {
            "reward": reward,
            "group_ids": uid // self.num_generations,
            "birth_step": torch.full_like(uid, step),
            "uid": uid,
            "prompt_id": uid // self.num_generations,
        }
        matrices = (tokens, attention_mask, F.pad(trained, prompt), F.pad(logprobs, prompt))
        batch = pack_padded(*(x[usable] for x in matrices), **{name: x[usable] for name, x in rows.items()})
        return batch.to("cpu")

    def _behavior_logprobs(self, output: dict[str, Any], tokens: Tensor, attention_mask: Tensor) -> Tensor:
        """[N, C] of the distribution that was sampled: the engine's own, or the policy's before it is updated."""
        for name in ("sampling_per_token_logps", "old_per_token_logps"):
            if name in output:
                return output[name]
        keep, size = output["completion_ids"].shape[1], self.args.per_device_train_batch_size
        with torch.no_grad():
            return self._get_per_token_logps_and_entropies(self.model, tokens, attention_mask, keep, size)[0]

    def _rows(self, batch: RolloutBatch, draw: Draw) -> dict[str, Tensor]:
        """What TRL shuffles and splits into microbatches. Denominators are those of the whole update."""
        count, n = self.args.steps_per_generation, len(batch)
        rows = max(1, -(-n // count)) * count
        matrices = pad_packed(batch, self._tokenizer.pad_token_id, rows=rows)._asdict()
        weight = rollout_loss_weights(batch.response_lengths, int(batch.loss_mask.sum()), n, self.loss_options)
        vectors = {
            "advantage": batch.advantage,
            "importance_weight": batch.importance_weight,
            "loss_weight": weight,
            "replayed": (torch.arange(n) >= draw.fresh).long(),
        }
        found = matrices | {name: F.pad(x, (0, rows - n)) for name, x in vectors.items()}
        return {name: x.to(self.accelerator.device) for name, x in found.items()}

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        if "loss_weight" not in inputs:  # an evaluation
            return super()._compute_loss(model, inputs)
        mask = inputs["loss_mask"]  # [B, L]
        columns = mask.any(0).nonzero()
        keep = mask.shape[1] - (int(columns[0]) if len(columns) else 1)
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(
            model, inputs["tokens"], inputs["attention_mask"].long(), keep, compute_entropy=True
        )
        trained = mask[:, -keep:]
        found = grpo_loss(
            logprobs[trained],
            GrpoLossInputs(
                behavior_logprobs=inputs["behavior_logprobs"][:, -keep:][trained],
                advantage=inputs["advantage"],
                cu_seqlens=F.pad(trained.sum(1).cumsum(0), (1, 0)).int(),
                loss_mask=trained[trained],
                loss_weight=inputs["loss_weight"],
                importance_weight=inputs["importance_weight"],
                age=inputs["replayed"],  # two rows of statistics: fresh, drawn
                age_buckets=2,
            ),
            self.loss_options,
            entropy=entropy[trained],
        )
        self._stats.append((found.stats, found.maxima))
        if self.accelerator.sync_gradients:
            self._log_update()
        return found.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._trained_rows == 0:
            # without gradients the optimizer leaves the weights; with gradients of 0 its momentum would move them
            self.model.zero_grad(set_to_none=True)
        return loss

    def _log_update(self) -> None:
        sums, largest = (torch.stack(x) for x in zip(*self._stats, strict=True))
        self._stats = []
        stats, maxima = sums.sum(0), largest.amax(0)
        whole, drawn = summarize_stats(stats, maxima), summarize_stats(stats[1], maxima[1])
        found = {
            "entropy": whole["entropy_mean"],
            "clip_ratio/low_mean": whole["clip_fraction_low"],
            "clip_ratio/high_mean": whole["clip_fraction_high"],
            "clip_ratio/region_mean": whole["clip_fraction"],
        }
        if drawn["rollouts"]:
            found |= {f"replay/{name}": drawn[name] for name in ("clip_fraction", "ratio_mean", "ess")}
        for name, value in found.items():
            self._metrics["train"][name].append(value)
        self.buffer.draw_size.observe(drawn["ess"] if drawn["rollouts"] else None)

    def store_fresh(self) -> None:
        config = self.buffer.config
        if config.enabled and config.composition == "fresh-anchored":
            self.buffer.push(self._fresh)
        self._fresh = RolloutBatch.empty()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        torch.save(self.buffer.state_dict(), folder / BUFFER_FILE)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.buffer.load_state_dict([torch.load(Path(checkpoint, BUFFER_FILE), weights_only=True)])


class _AfterUpdate(TrainerCallback):
    def __init__(self, trainer: ReplayGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._trainer.num_iterations == 0:
            self._trainer.store_fresh()


def loss_options(args: GRPOConfig) -> GrpoLossOptions:
    """TRL's options as this project's. Raises ValueError that names an option which is not replayed."""
    for name, needed in LEFT_OUT.items():
        if (given := getattr(args, name)) != needed:
            raise ValueError(f"{name} must be {needed} with replay, got {given}")
    for name, known in (("loss_type", AGGREGATION), ("scale_rewards", ADVANTAGE_STD)):
        if (given := getattr(args, name)) not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)} with replay, got {given}")
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise ValueError(
            f"steps_per_generation must be gradient_accumulation_steps {args.gradient_accumulation_steps} with replay: "
            f"a generation batch is one update, got {args.steps_per_generation}"
        )
    aggregation = AGGREGATION[args.loss_type]
    return GrpoLossOptions(
        clip_eps_low=args.epsilon,
        clip_eps_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        dual_clip=args.delta,
        ratio_level=args.importance_sampling_level,
        aggregation=aggregation,
        fixed_length=args.max_completion_length if aggregation == "fixed-length" else None,
    )
