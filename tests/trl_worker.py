"""Cases of tests/test_trl_replay.py, run by an interpreter that has TRL: prints one JSON line for each that is named.

.venv/trl/bin/python -m tests.trl_worker FOLDER CASE ...
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megatron_replay import Draw, ReplayConfig, RolloutBatch, RolloutReplayBuffer
from tests.launch import ROOT

sys.path.insert(0, str(ROOT / "examples" / "integrations"))

from replay_trainer import BUFFER_FILE, ReplayGRPOTrainer

MODEL = str(ROOT / "examples" / "quickstart" / "model")
PROMPTS, GROUP = 4, 4
NO_REPLAY = ReplayConfig(replay_ratio=0.0)
REPLAY = ReplayConfig(replay_ratio=1.0, warmup_steps=1, tau_max=2, priority_alpha=1.0)


def spread(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Differs within every group of responses that are not all the same."""
    return [sum(t * (i + 1) for i, t in enumerate(ids)) / 100 for ids in completion_ids]


def first_digit(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """0 or 1, and the same within many groups."""
    return [float(ids[0] == 4) for ids in completion_ids]


def options(folder: Path, **changes: Any) -> GRPOConfig:
    rows = PROMPTS * GROUP
    given = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": rows // 2,
        "gradient_accumulation_steps": 2, "num_generations": GROUP, "max_completion_length": 6, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "epsilon_high": 0.28, "shuffle_dataset": False,
        "gradient_checkpointing": False, "bf16": False, "use_cpu": True, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "seed": 5,
    }  # fmt: skip
    return GRPOConfig(**(given | changes))


def prompts(n: int = 64) -> Dataset:
    return Dataset.from_list([{"prompt": f"{(7919 * i) % 100000:05d}="} for i in range(n)])


def trainer(
    kind: type[GRPOTrainer], folder: Path, reward: Any = spread, extra: dict[str, Any] | None = None, **changes: Any
) -> GRPOTrainer:
    return kind(
        model=MODEL, reward_funcs=reward, train_dataset=prompts(), args=options(folder, **changes), **(extra or {})
    )


def weights(t: GRPOTrainer) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in t.model.parameters()])


def losses(t: GRPOTrainer) -> list[float]:
    return [row["loss"] for row in t.state.log_history if "loss" in row]


def logprobs_of(model: torch.nn.Module, batch: RolloutBatch) -> list[Tensor]:
    """One rollout at a time, without padding, in float64: log-probs of its trained tokens."""
    found = []
    for start, stop in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True):
        ids, mask = batch.tokens[start:stop], batch.loss_mask[start:stop]
        all_of_them = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        found.append(all_of_them.gather(1, ids[1:, None]).squeeze(1)[mask[1:]])
    return found


def copied(model: torch.nn.Module) -> torch.nn.Module:
    copy = AutoModelForCausalLM.from_pretrained(MODEL)
    copy.load_state_dict(model.state_dict())
    return copy.double()


class Recorder(ReplayGRPOTrainer):
    """Keeps what each step drew and trained, and float64 copies of the model."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, Any]] = []
        self.add_callback(_Gradients(self))

    def _rows(self, batch: RolloutBatch, draw: Draw) -> dict[str, Tensor]:
        rewards = self._rewards_per_function[:, 0].view(-1, self.num_generations).tolist()
        step = self.state.global_step // self.num_iterations
        first = step * len(rewards) * self.num_generations
        informative = [len({*group}) > 1 for group in rewards]
        expected = [
            first + i for i in range(len(rewards) * self.num_generations) if informative[i // self.num_generations]
        ]
        self.steps.append(
            {
                "step": step, "expected": expected, "batch": batch, "draw": draw, "model": copied(self.model),
                "inputs": [], "stored": self.buffer.ring.live(self.buffer.ring.fields["uid"]).tolist(),
            }
        )  # fmt: skip
        return super()._rows(batch, draw)

    def _compute_loss(self, model: Any, inputs: dict[str, Tensor]) -> Tensor:
        self.steps[-1]["inputs"].append(inputs)
        return super()._compute_loss(model, inputs)


class _Gradients(TrainerCallback):
    def __init__(self, t: Recorder) -> None:
        self._trainer = t

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        named = self._trainer.model.named_parameters()
        self._trainer.steps[-1]["gradient"] = {n: p.grad.clone() for n, p in named if p.grad is not None}


def same_as_trl(folder: Path) -> dict[str, Any]:
    """Losses and weights of both trainers after some steps, for each loss that both have."""
    found = {}
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        theirs = trainer(GRPOTrainer, folder, loss_type=loss_type)
        start = weights(theirs)
        theirs.train()
        ours = trainer(ReplayGRPOTrainer, folder, extra={"replay": NO_REPLAY}, loss_type=loss_type)
        ours.train()
        moved = (weights(theirs) - start).norm()
        rows = ("entropy", "clip_ratio/region_mean", "grad_norm", "reward", "completions/mean_length")
        found[loss_type] = {
            "trl": losses(theirs),
            "ours": losses(ours),
            "weights_apart": float((weights(ours) - weights(theirs)).norm() / moved),
            "logged": {
                name: [[row[name] for row in t.state.log_history if name in row] for t in (theirs, ours)]
                for name in rows
            },
            "stored": len(ours.buffer),
        }
    return found


def more_updates_of_a_batch(folder: Path) -> dict[str, Any]:
    """num_iterations 2: the second update of a batch has ratios other than 1."""
    theirs = trainer(GRPOTrainer, folder, num_iterations=2, learning_rate=1e-2)
    start = weights(theirs)
    theirs.train()
    ours = trainer(Recorder, folder, extra={"replay": NO_REPLAY}, num_iterations=2, learning_rate=1e-2)
    ours.train()
    return {
        "trl": losses(theirs),
        "ours": losses(ours),
        "weights_apart": float((weights(ours) - weights(theirs)).norm() / (weights(theirs) - start).norm()),
        "births": [s["batch"].birth_step.unique().tolist() for s in ours.steps],
        "clipped": [row["clip_ratio/region_mean"] for row in ours.state.log_history if "loss" in row],
    }


def one_factor(folder: Path) -> dict[str, Any]:
    """Plain SGD: with groups of zero variance a step is TRL's, times all tokens over those of the other groups."""
    given = {"optim": "sgd", "max_grad_norm": 0.0, "max_steps": 1, "learning_rate": 1.0}
    theirs = trainer(GRPOTrainer, folder, first_digit, **given)
    start = weights(theirs)
    theirs.train()
    ours = trainer(Recorder, folder, first_digit, {"replay": NO_REPLAY}, **given)
    ours.train()
    batch = ours.steps[0]["batch"]
    whole = PROMPTS * GROUP * theirs.state.log_history[0]["completions/mean_length"]
    factor = whole / int(batch.loss_mask.sum())
    moved = weights(theirs) - start
    return {
        "factor": factor,
        "loss": [losses(theirs)[0] * factor, losses(ours)[0]],
        "weights_apart": float((weights(ours) - start - factor * moved).norm() / (factor * moved).norm()),
        "groups": [len(batch) // GROUP, PROMPTS],
    }


def composition(folder: Path) -> dict[str, Any]:
    """Which rollouts were trained, and from where."""
    # 0.9: so that the rows of some step do not divide into the microbatches
    replay = dataclasses.replace(REPLAY, replay_ratio=0.9)
    t = trainer(Recorder, folder, first_digit, {"replay": replay}, max_steps=7)
    t.train()
    found = []
    for s in t.steps:
        batch, draw = s["batch"], s["draw"]
        trained = [x for inputs in s["inputs"] for x in rows_of(inputs)]
        found.append(
            {
                "step": s["step"],
                "expected": s["expected"],
                "fresh": batch.uid[: draw.fresh].tolist(),
                "drawn": batch.uid[draw.fresh :].tolist(),
                "ages": (s["step"] - batch.birth_step[draw.fresh :]).tolist(),
                "stored_before": s["stored"],
                "rows_are_those_of_the_batch": sorted(trained) == sorted(rollouts_of(batch)),
                "weights": sorted({round(float(w), 9) for i in s["inputs"] for w in i["loss_weight"] if w > 0}),
                "one_over_tokens": 1 / int(batch.loss_mask.sum()),
                "marked_as_drawn": sum(int(i["replayed"].sum()) for i in s["inputs"]),
            }
        )
    logged = [row for row in t.state.log_history if "loss" in row]
    return {"steps": found, "logged": [{k: v for k, v in row.items() if k.startswith("replay/")} for row in logged]}


def rows_of(inputs: dict[str, Tensor]) -> list[tuple[Any, ...]]:
    """(tokens, advantage, behavior log-probs) of the rows that train something."""
    found = []
    for i in range(len(inputs["tokens"])):
        real, mask = inputs["attention_mask"][i], inputs["loss_mask"][i]
        if bool(mask.any()):
            ids, logprobs = inputs["tokens"][i][real], inputs["behavior_logprobs"][i][mask]
            found.append((*ids.tolist(), float(inputs["advantage"][i]), *logprobs.tolist()))
    return found


def rollouts_of(batch: RolloutBatch) -> list[tuple[Any, ...]]:
    parts = [batch.select(torch.tensor([i])) for i in range(len(batch))]
    return [(*p.tokens.tolist(), float(p.advantage), *p.behavior_logprobs[p.loss_mask].tolist()) for p in parts]


def birth_and_gradient(folder: Path) -> dict[str, Any]:
    """Every update against float64: its gradient, and its rollouts' log-probs under the weights of their birth."""
    t = trainer(Recorder, folder, extra={"replay": REPLAY}, max_steps=5, max_grad_norm=0.0, learning_rate=3e-3)
    t.train()
    gradient, birth, now, clipped = [], [], [], []
    models = {s["step"]: s["model"] for s in t.steps}
    for s in t.steps:
        batch, model = s["batch"], s["model"]
        policy = logprobs_of(model, batch)
        total, loss = int(batch.loss_mask.sum()), torch.zeros((), dtype=torch.float64)
        behavior = [batch.select(torch.tensor([i])) for i in range(len(batch))]
        for new, rollout in zip(policy, behavior, strict=True):
            ratio = (new - rollout.behavior_logprobs[rollout.loss_mask].double()).exp()
            a = rollout.advantage.double()
            loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a).sum() / total
        model.zero_grad()
        loss.backward()
        reference = {n: p.grad for n, p in model.named_parameters()}
        apart = sum(float((s["gradient"][n] - g).square().sum()) for n, g in reference.items())
        size = sum(float(g.square().sum()) for g in reference.values())
        gradient.append(math.sqrt(apart / size))
        with torch.no_grad():
            for i, rollout in enumerate(behavior):
                stored = rollout.behavior_logprobs[rollout.loss_mask]
                true = logprobs_of(models[int(rollout.birth_step)], rollout)[0]
                birth.append(float((stored - true).abs().max()))
                if i >= s["draw"].fresh:
                    now.append(float((stored - policy[i].detach()).abs().max()))
        clipped.append(len(batch) - s["draw"].fresh)
    return {"gradient": gradient, "birth": birth, "drawn_now": now, "drawn": clipped}


def nothing_to_train(folder: Path) -> dict[str, Any]:
    """Two steps with groups that differ, then two without: the weights stay where they were."""
    t = trainer(Recorder, folder, _only_first_steps, {"replay": NO_REPLAY}, max_steps=4, weight_decay=0.1)
    t.train()
    at = [torch.cat([p.flatten() for p in s["model"].parameters()]) for s in t.steps]
    moved = [float((b - a).norm()) for a, b in zip(at, [*at[1:], weights(t)], strict=True)]
    return {"moved": moved, "rollouts": [len(s["batch"]) for s in t.steps], "loss": losses(t)}


def _only_first_steps(completion_ids: list[list[int]], trainer_state: Any, **_: Any) -> list[float]:
    return spread(completion_ids) if trainer_state.global_step < 2 else [0.0] * len(completion_ids)


def resumed(folder: Path) -> dict[str, Any]:
    """A run stopped at its checkpoint and gone on with, and the same run in one go."""
    given = {"extra": {"replay": REPLAY}, "max_steps": 5, "save_strategy": "steps", "save_steps": 3}
    whole = trainer(Recorder, folder / "whole", **given)
    whole.train()
    checkpoint = folder / "whole" / "checkpoint-3"
    later = trainer(Recorder, folder / "later", **given)
    later.train(resume_from_checkpoint=str(checkpoint))
    Path(checkpoint, BUFFER_FILE).unlink()
    without = trainer(Recorder, folder / "without", **given)
    try:
        without.train(resume_from_checkpoint=str(checkpoint))
        error = "none"
    except FileNotFoundError as found:
        error = str(found)
    return {
        "whole": [s["batch"].uid.tolist() for s in whole.steps[3:]],
        "later": [s["batch"].uid.tolist() for s in later.steps],
        "weights_apart": float((weights(whole) - weights(later)).norm()),
        "without": error,
    }


def engine_logprobs(folder: Path) -> dict[str, Any]:
    """A rollout function's own log-probs are the behavior; a rollout with one that is not finite is left out."""

    def roll(asked: list[str], t: GRPOTrainer) -> dict[str, Any]:
        sampled = [[4 + (i + j) % 10 for j in range(5)] + [3] for i in range(len(asked))]
        logprobs = [[-0.5 - i / 100] * 6 for i in range(len(asked))]
        logprobs[1] = [float("nan"), *logprobs[1][1:]]
        ids = t.processing_class(text=asked)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": sampled, "logprobs": logprobs}

    t = trainer(Recorder, folder, extra={"replay": NO_REPLAY, "rollout_func": roll}, max_steps=1)
    t.train()
    batch = t.steps[0]["batch"]
    first = [float(batch.select(torch.tensor([i])).behavior_logprobs[-1]) for i in range(len(batch))]
    return {"uid": batch.uid.tolist(), "logprob": first}


def refusals(folder: Path) -> dict[str, Any]:
    """What each unfit option says."""
    cases: dict[str, dict[str, Any]] = {
        "beta": {"beta": 0.1},
        "top_p": {"top_p": 0.9},
        "top_k": {"top_k": 5},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "loss_type": {"loss_type": "sapo"},
        "scale_rewards": {"scale_rewards": "batch"},
        "steps_per_generation": {"steps_per_generation": 4},
        "entropy_coef": {"entropy_coef": 0.01},
        "generation_kwargs": {"generation_kwargs": {"top_p": 0.5}},
    }
    found = {}
    for name, changes in cases.items():
        try:
            trainer(ReplayGRPOTrainer, folder, **changes)
            found[name] = "taken"
        except ValueError as error:
            found[name] = str(error)
    return found


def learns(folder: Path) -> dict[str, Any]:
    """The program, on its task."""
    import contextlib
    import io

    import trl_replay

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = trl_replay.main(
            [
                "--steps",
                "40",
                "--replay-warmup-steps",
                "2",
                "--lr",
                "5e-4",
                "--out",
                str(folder),
                "--eval-prompts",
                "128",
            ]
        )
    return {"code": code, "said": said.getvalue().splitlines()[-1]}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        same_as_trl, more_updates_of_a_batch, one_factor, composition, birth_and_gradient, nothing_to_train, resumed,
        engine_logprobs, refusals, learns,
    )
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    assert RolloutReplayBuffer.__module__.startswith("megatron_replay")
    for name in sys.argv[2:]:
        try:
            found = CASES[name](Path(sys.argv[1], name))
        except Exception:
            found = {"error": traceback.format_exc()}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
