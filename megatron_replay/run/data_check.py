"""The data and the reward of a run: what can be said of them before it starts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

from megatron_replay import arguments
from megatron_replay.engines.child_process import clean_environment
from megatron_replay.planning.findings import Findings
from megatron_replay.rollout import Completion, Prompt
from megatron_replay.run.parts import task_of
from megatron_replay.tasks.prompts import PromptSource, heldout_prompts
from megatron_replay.tasks.reward import Graders, Reward, needs_graders
from megatron_replay.tasks.task import Task
from megatron_replay.tokenizer import Tokenizer

T = TypeVar("T")
SCORED = 16  # gold answers
LISTED = 10  # prompts that do not fit, one line each


class _ThisProcess:
    """The one rank there is, for the graders."""

    leads = True

    def from_leader(self, value: T) -> T:
        return value


def check_data(found: Findings, args: Any, tokenizer: Tokenizer | None, count: int) -> None:
    """Parse the data, encode the run's first `count` prompts and the held-out ones, score gold answers."""
    task = found.attempt(lambda: task_of(args, "train"))
    heldout = found.attempt(lambda: task_of(args, "heldout")) if args.eval_prompts else None
    if tokenizer is None:
        found.skipped.append("prompts and reward: there is no tokenizer to check them with")
        return
    limit = args.seq_length - args.rl_max_response_length
    options = {"chat_template": args.rl_chat_template, "filter_long": args.rl_filter_long_prompts}
    if heldout is not None:
        found.attempt(lambda: heldout_prompts(heldout, tokenizer, args.eval_prompts, limit, **options))
    if task is None:
        found.skipped.append("prompts and reward: there is no task to take them from")
        return
    source = found.attempt(lambda: PromptSource(task, tokenizer, seed=args.seed, max_prompt_length=limit, **options))
    if source is None:
        return
    if said := source.report():
        found.checked += said.splitlines()
    taken = _first_prompts(found, args, source, min(count, source.size or count), limit)
    _check_reward(found, args, task, tokenizer, taken[:SCORED])


def _first_prompts(found: Findings, args: Any, source: PromptSource, count: int, limit: int) -> list[Prompt]:
    taken, refused = [], []
    where = f"--data-path {args.data_path}" if args.data_path else f"--rl-task {args.rl_task}"
    for cursor in range(count):
        # a prompt that is refused is not passed by
        source.load_state_dict({"cursor": cursor})
        try:
            taken += source.take(1)
        except ValueError as error:
            refused.append(f"{where}: {error}")
    found.problems += refused[:LISTED]
    if len(refused) > LISTED:
        found.problems.append(f"{where}: {len(refused) - LISTED} more of the first {count} prompts do not fit")
    if not refused:
        longest = max(len(p.tokens) for p in taken)
        found.checked.append(f"{where}: the first {count} prompts have at most {longest} tokens of {limit}")
    return taken


def _check_reward(found: Findings, args: Any, task: Task, tokenizer: Tokenizer, prompts: list[Prompt]) -> None:
    """Score each gold answer as a response that says it: that must not fail, and must give a finite number."""
    flag = f"--rl-reward {args.rl_reward} of --rl-task {args.rl_task}"
    graders = None
    if needs_graders(args.rl_reward, task):
        options = replace(arguments.grader_options(args), workers=1)
        try:
            graders = Graders(options, clean_environment(), _ThisProcess())
        except (ValueError, RuntimeError) as error:
            found.problems.append(f"{flag}: {error}")
            return
    reward = Reward(task, tokenizer, graders)
    scores = []
    try:
        for prompt in prompts:
            answer = task.problem(prompt.prompt_id).answer
            if not answer:
                continue
            tokens = tuple(tokenizer.encode(answer))
            said = Completion(prompt, prompt.counter, tokens, (0.0,) * len(tokens), "length", 0)
            try:
                (score,) = reward([said])
            # whatever a reward raises would end the run
            except Exception as error:
                found.problems.append(f"{flag}: problem {prompt.prompt_id} raises {type(error).__name__}: {error}")
                continue
            # a response that breaks the score has a reward all the same
            failed = sum(reward.counters().values())
            if score is None or not math.isfinite(score):
                found.problems.append(f"{flag}: problem {prompt.prompt_id} must have a finite reward, got {score}")
            elif failed:
                found.problems.append(f"{flag}: problem {prompt.prompt_id}: the score fails on the gold answer")
            else:
                scores.append(score)
    finally:
        if graders is not None:
            graders.close()
    if scores:
        found.checked.append(
            f"{flag}: {len(scores)} gold answers have a mean reward of {sum(scores) / len(scores):.3f}"
        )
    else:
        found.skipped.append(f"{flag}: no gold answer was there to be scored")
