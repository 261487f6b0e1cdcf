"""Train the quickstart's tiny Qwen3 by TRL's GRPOTrainer with this project's replay.

    .venv/trl/bin/python examples/integrations/trl_replay.py --steps 100 --replay-ratio 0.5

`make trl` makes that interpreter. The trainer itself is replay_trainer.py beside this file; in a script of one's own it
takes the place of trl.GRPOTrainer. With --replay-ratio 0 it is GRPO without replay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_replay.config import ReplayConfig
from megatron_replay.tasks.sort_digits import SortDigits
from megatron_replay.tasks.task import Split

MODEL = Path(__file__).parents[1] / "quickstart" / "model"


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--steps", type=int, default=100, help="updates; each has a generation batch of its own")
    p.add_argument("--replay-ratio", type=float, default=0.5, help="rollouts drawn again for each fresh one")
    p.add_argument("--replay-warmup-steps", type=int, default=20, help="updates before the first draw")
    p.add_argument("--tau-max", type=int, default=10, help="a rollout that is older is dropped, in updates")
    p.add_argument("--prompts-per-step", type=int, default=16)
    p.add_argument("--group-size", type=int, default=8, help="completions of each prompt")
    p.add_argument("--microbatches", type=int, default=1, help="gradient accumulation steps of an update")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--eval-prompts", type=int, default=256, help="held-out problems, before and after training")
    p.add_argument("--seed", type=int, default=1234)
    p.add_argument("--out", type=Path, default=Path("runs/trl_replay"), help="where TRL writes checkpoints")
    args = p.parse_args(argv)
    for name, least in (("steps", 1), ("prompts_per_step", 1), ("group_size", 2), ("microbatches", 1)):
        if getattr(args, name) < least:
            p.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if not 1 <= args.eval_prompts <= SortDigits(split="heldout", seed=0).size:
        p.error(f"--eval-prompts must be in [1, 10000], the held-out problems, got {args.eval_prompts}")
    if args.prompts_per_step * args.group_size % args.microbatches:
        p.error(
            f"--microbatches must divide the {args.prompts_per_step * args.group_size} rollouts of a step, "
            f"got {args.microbatches}"
        )
    if not args.lr > 0:
        p.error(f"--lr must be positive, got {args.lr}")
    try:
        args.replay = ReplayConfig(
            replay_ratio=args.replay_ratio, warmup_steps=args.replay_warmup_steps, tau_max=args.tau_max
        )
    except ValueError as error:
        p.error(f"--replay-ratio, --replay-warmup-steps and --tau-max: {error}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        import trl
    except ImportError as error:
        print(f"trl_replay.py: TRL is not here ({error}); `make trl` makes .venv/trl/bin/python", file=sys.stderr)
        return 1
    import torch
    from datasets import Dataset
    from replay_trainer import ReplayGRPOTrainer

    task = SortDigits(split="train", seed=args.seed)
    heldout = SortDigits(split="heldout", seed=args.seed)

    def problems(source: SortDigits, split: Split, n: int) -> Dataset:
        rows = [{"prompt": source.problem(i % source.size).prompt, "split": split, "index": i} for i in range(n)]
        return Dataset.from_list(rows)

    def sorted_digits(completions: list[str], split: list[str], index: list[int], **_: object) -> list[float]:
        sources = [task if name == "train" else heldout for name in split]
        return [
            source.score(source.problem(i % source.size), text)
            for source, i, text in zip(sources, index, completions, strict=True)
        ]

    trainer = ReplayGRPOTrainer(
        model=str(MODEL),
        reward_funcs=sorted_digits,
        replay=args.replay,
        train_dataset=problems(task, "train", args.steps * args.prompts_per_step),
        eval_dataset=problems(heldout, "heldout", args.eval_prompts),
        args=trl.GRPOConfig(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.prompts_per_step * args.group_size // args.microbatches,
            per_device_eval_batch_size=32 * args.group_size,
            gradient_accumulation_steps=args.microbatches,
            num_generations=args.group_size,
            max_completion_length=6,
            learning_rate=args.lr,
            epsilon_high=0.28,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            seed=args.seed,
        ),
    )
    before = trainer.evaluate()["eval_reward"]
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    print(f"held-out accuracy: {before:.3f} before, {after:.3f} after {args.steps} updates")
    return 0


if __name__ == "__main__":
    sys.exit(main())
