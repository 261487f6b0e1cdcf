"""RolloutLog: what a step trains on, for people to read.

rollouts.jsonl holds a few rollouts of a step with their text and log-probs; draws.jsonl what was drawn against what was
stored. Which rollouts are logged follows from the step and their uids, so it does not depend on the layout.

Dims: N rollouts of a rank's batch, k rollouts that are logged of one kind, R data-parallel ranks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.ops.philox import uniform
from megatron_replay.replay_buffer import Draw, RolloutReplayBuffer
from megatron_replay.rollout import RolloutBatch
from megatron_replay.telemetry import drop_rows_from
from megatron_replay.tokenizer import NO_TEXT, Tokenizer

ROLLOUTS_FILE = "rollouts.jsonl"
DRAWS_FILE = "draws.jsonl"
# lower edges of the bins; the last bin has no upper edge
ADVANTAGE_EDGES = tuple(i / 4 for i in range(17))
AGE_EDGES = (*range(17), 32, 64)
KINDS = ("fresh", "replay")
STREAM_ROLLOUT_LOG = 0x524C
# a character has at most 4 bytes, and a token of a byte-level tokenizer at least one
TOKENS_OF_A_CHARACTER = 4


class RolloutLog:
    """The two files in the run folder `path`, written by the rank that is `enabled`.

    Every `every_steps`-th step logs up to `per_step` rollouts: half of them, rounded down, from the draw where there is
    one, the others fresh. Every step whose buffer holds a rollout adds a row of draws. Rows of steps from `start_step`
    on, which a resumed run takes again, are dropped first.
    """

    def __init__(
        self,
        path: str | Path,
        every_steps: int,
        per_step: int,
        *,
        tokenizer: Tokenizer,
        start_step: int = 0,
        group: DataParallelGroup | None = None,
        enabled: bool = True,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("per_step", per_step)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        self.every_steps, self.per_step = every_steps, per_step
        self.tokenizer = tokenizer
        self.group = group or DataParallelGroup()
        self.files: dict[str, Path] = {}
        if enabled:
            Path(path).mkdir(parents=True, exist_ok=True)
            self.files = {name: Path(path, name) for name in (ROLLOUTS_FILE, DRAWS_FILE)}
            for file in self.files.values():
                drop_rows_from(file, start_step)

    def record(
        self,
        step: int,
        batch: RolloutBatch,
        draw: Draw,
        buffer: RolloutReplayBuffer,
        logprobs: Callable[[RolloutBatch], Tensor],
    ) -> None:
        """Log step `step`, after its draw and before its update. Every rank calls it, with its part of the batch.

        `logprobs(rollouts)` gives the policy's log-probs [T] of now, as `Policy.logprobs` does; it is called, by every
        rank, in the steps whose rollouts are logged, on those of this rank alone.
        """
        row = self._draws(step, draw, buffer)
        if row["stored"]["rollouts"]:
            self._append(DRAWS_FILE, [json.dumps(row)])
        if step % self.every_steps == 0:
            chosen, mine = self._choose(step, batch, draw)
            picked = batch.select(torch.tensor([i for _, i in mine], dtype=torch.int64, device=batch.device))
            kinds = [kind for kind, _ in mine]
            lines = rollout_lines(step, kinds, picked, logprobs(picked), self.tokenizer)
            self._append(ROLLOUTS_FILE, self._merge(chosen, lines))

    def _choose(self, step: int, batch: RolloutBatch, draw: Draw) -> tuple[list[int], list[tuple[str, int]]]:
        """The ranks that own what is logged, in the order of the lines; kind and place of this rank's own."""
        drawn = draw.uids.numel() > 0
        # where nothing is drawn all is fresh, whatever the composition
        first = draw.fresh if drawn else len(batch)
        replay = self.per_step // 2 if drawn else 0
        owners, mine = [], []
        parts = (range(first), self.per_step - replay), (range(first, len(batch)), replay)
        for number, (places, count) in enumerate(parts):
            uid = batch.uid[places.start : places.stop].cpu()
            key = uniform(0, STREAM_ROLLOUT_LOG, uid, step, number)
            winners = smallest_of_all(key, uid, count, self.group)
            at = dict(zip(uid.tolist(), places, strict=True))
            owners += [owner for owner, _ in winners]
            mine += [(KINDS[number], at[u]) for owner, u in winners if owner == self.group.rank]
        return owners, mine

    def _merge(self, owners: Sequence[int], lines: Sequence[str]) -> list[str]:
        """On rank 0 the lines of all ranks, in the order of `owners`; nothing on the others."""
        if self.group.size == 1:
            return list(lines)
        # never empty, so that every rank sends a block
        sent = torch.frombuffer(bytearray("".join(f"{line}\n" for line in lines).encode() + b"\n"), dtype=torch.uint8)
        sizes = self.group.all_gather(torch.tensor([sent.numel()]))[:, 0].tolist()
        first = self.group.rank == 0
        blocks = [sent if rank == 0 else sent[:0] for rank in range(self.group.size)]
        received = self.group.all_to_all(blocks, sizes if first else [0] * self.group.size)
        if not first:
            return []
        of_rank = [iter(block.numpy().tobytes().decode().splitlines()) for block in received]
        return [next(of_rank[owner]) for owner in owners]

    def _draws(self, step: int, draw: Draw, buffer: RolloutReplayBuffer) -> dict[str, Any]:
        """Counts of |advantage| and age, over what is stored and what was drawn on all ranks."""
        ring, drawn = buffer.ring, draw.batch
        parts = [
            (ring.live(ring.fields["advantage"]), ring.live(ring.fields["birth_step"])),
            (drawn.advantage[draw.fresh :].cpu(), drawn.birth_step[draw.fresh :].cpu()),
        ]
        counted = [
            (counts(advantage.abs(), ADVANTAGE_EDGES), counts(step - birth, AGE_EDGES), advantage.double().abs().sum())
            for advantage, birth in parts
        ]
        bins = len(ADVANTAGE_EDGES)
        flat = torch.cat([torch.cat([a, b, total[None]]) for a, b, total in counted])
        rows = self.group.sum(flat).view(len(parts), -1).tolist()
        row: dict[str, Any] = {"step": step, "advantage_edges": ADVANTAGE_EDGES, "age_edges": AGE_EDGES}
        for name, values in zip(("stored", "drawn"), rows, strict=True):
            number = [int(v) for v in values[:-1]]
            rollouts = sum(number[:bins])
            row[name] = {
                "rollouts": rollouts,
                "advantage": number[:bins],
                "age": number[bins:],
                "advantage_abs_mean": values[-1] / rollouts if rollouts else None,
            }
        return row

    def _append(self, name: str, lines: Sequence[str]) -> None:
        """Add lines and hand them to the system at once: a step is in the file or is not."""
        if name in self.files and lines:
            with open(self.files[name], "a") as file:
                file.write("".join(f"{line}\n" for line in lines))


def smallest_of_all(key: Tensor, uid: Tensor, k: int, group: DataParallelGroup) -> list[tuple[int, int]]:
    """(rank, uid) of the k smallest keys of all ranks, in order; a uid that is there twice counts once.

    key [N] float64, uid [N] int64, of this rank.
    """
    own = dict(zip(uid.tolist(), key.tolist(), strict=True))
    best = sorted(own, key=lambda u: (own[u], u))[:k]
    # keys are below 1, so 2 stands for a place that is not used
    keys, uids = torch.full((k,), 2.0, dtype=torch.float64), torch.zeros(k, dtype=torch.int64)
    keys[: len(best)] = torch.tensor([own[u] for u in best], dtype=torch.float64)
    uids[: len(best)] = torch.tensor(best, dtype=torch.int64)
    gathered = group.all_gather(torch.stack([keys.view(torch.int64), uids]))  # [R, 2, k]
    found = zip(gathered[:, 0].contiguous().view(torch.float64).tolist(), gathered[:, 1].tolist(), strict=True)
    candidates = sorted((x, u, rank) for rank, (xs, us) in enumerate(found) for x, u in zip(xs, us, strict=True))
    winners: dict[int, int] = {}
    for x, u, rank in candidates:
        if x < 2 and len(winners) < k:
            winners.setdefault(u, rank)
    return [(rank, u) for u, rank in winners.items()]


def rollout_lines(
    step: int, kinds: Sequence[str], batch: RolloutBatch, logprobs: Tensor, tokenizer: Tokenizer
) -> list[str]:
    """One JSON line for each rollout of the batch. Log-probs [T] have 5 decimals; what is not finite is null."""
    lines, bounds = [], batch.cu_seqlens.tolist()
    rollout = {name: getattr(batch, name).tolist() for name in ("uid", "birth_step", "reward", "advantage")}
    for i, kind in enumerate(kinds):
        at = slice(bounds[i], bounds[i + 1])
        ids, trained = batch.tokens[at].tolist(), batch.loss_mask[at]
        prompt_length = len(ids) - int(trained.sum())
        row = {
            "step": step,
            "kind": kind,
            "uid": rollout["uid"][i],
            "birth_step": rollout["birth_step"][i],
            "age": step - rollout["birth_step"][i],
            "reward": finite(rollout["reward"][i]),
            "advantage": finite(rollout["advantage"][i]),
            "prompt": tokenizer.decode(ids[:prompt_length]),
            "tokens": token_texts(tokenizer, ids[prompt_length:]),
            "logprobs_birth": [finite(x) for x in batch.behavior_logprobs[at][trained].tolist()],
            "logprobs_now": [finite(x) for x in logprobs[at][trained].tolist()],
        }
        lines.append(json.dumps(row, allow_nan=False))
    return lines


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds. Tokens that each hold a part of one character give it to the last of them."""
    texts, window, done = [], 0, 0
    for end in range(1, len(ids) + 1):
        before = tokenizer.decode(ids[window:done])
        after = tokenizer.decode(ids[window:end])
        if after.endswith(NO_TEXT) and end < len(ids) and end - done < TOKENS_OF_A_CHARACTER:
            texts.append("")
            continue
        texts.append(after[len(before) :])
        window, done = done, end
    return texts


def counts(values: Tensor, edges: Sequence[float]) -> Tensor:
    """float64, one for each bin: how many values are at or above its edge and below the next."""
    bins = torch.bucketize(values.double(), torch.tensor(edges, dtype=torch.float64), right=True) - 1
    return bins.bincount(minlength=len(edges)).double()


def finite(value: float) -> float | None:
    """`value` to 5 decimals, or None where it is not a finite number."""
    return round(value, 5) if math.isfinite(value) else None
