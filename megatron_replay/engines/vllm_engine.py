"""What both vLLM engines share: weights pushed until they are whole, samples asked again until they are all there."""

from __future__ import annotations

import os
import warnings
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Protocol

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.group_request import MissingGroup
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.rollout import Completion
from megatron_replay.weight_sync.engine_control import EngineControl
from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sender import SyncReport, WeightSender
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from megatron_replay.weight_sync.transports.cuda_ipc import refuse_expandable_segments


class ShardedPolicy(Protocol):
    def sharded_weights(self, shape: ModelShape) -> ShardedWeights:
        """What this rank holds of the weights."""


class VllmEngine:
    """Engine over vLLM. All ranks call every method together, each with its data-parallel shard of the prompts.

    An engine that dies, hangs or refuses is replaced and given the whole weight set; after config.retries more attempts
    the failure is raised, in the engine's own words. A prompt whose group was lost is sampled again, config.retries
    times in all; then the group is dropped and counted, and where no other is left the failure is raised.
    """

    # what --rl-vllm-transport auto is on a CPU and on a GPU, and what cannot work there
    AUTO: ClassVar[dict[str, str]]
    IMPOSSIBLE: ClassVar[dict[str, str]] = {}
    # how often each of these happened since the last `metrics`; all are reported, also at 0
    COUNTS = (
        "restarts",
        "failed_syncs",
        "retried",
        "dropped_groups",
        "timed_out",
        "aborted",
        "server_failures",
        "wrong_version",
    )

    def __init__(
        self,
        config: VllmConfig,
        sampling: SamplingConfig,
        eos_id: int,
        model: ServedModel,
        shape: ModelShape,
        ranks: EngineRanks,
    ) -> None:
        self.config, self.sampling, self.eos_id, self.model, self.shape = config, sampling, eos_id, model, shape
        self.ranks = ranks
        self.transport = self._transport()
        self.weight_version = -1
        self.counts: Counter[str] = Counter()
        self._policy: ShardedPolicy | None = None
        self._sender: WeightSender | None = None
        self._report: SyncReport | None = None
        self._fed = False  # whether a push has succeeded
        self._sampled_by = -1  # weight version of the newest completions handed out
        self._hopeless = False  # on a leader: prompts failed in a way that no other attempt changes
        # by the engine's name: why pushes failed at it, since the last that did not fail
        self._strikes: defaultdict[str, list[str]] = defaultdict(list)

    def load_weights(self, policy: ShardedPolicy, version: int) -> None:
        """Push the policy's weights. Raises WeightSyncError when no attempt left whole weights on every engine."""
        self._policy = policy
        if version != self.weight_version:
            self._sync(version)

    def metrics(self) -> dict[str, float]:
        """Sums over all ranks since the last call: what went wrong, tokens handed out and the version of the weights
        that sampled them; and the last push."""
        names = [*self.COUNTS, "discarded_samples", "tokens"]
        sums = self.ranks.sum_of_leaders([float(self.counts[name]) for name in names])
        totals = dict(zip(names, sums, strict=True))
        self.counts.clear()
        found = {f"engine/{name}": value for name, value in totals.items()}
        found |= {"engine/weight_version": float(self._sampled_by)}
        if (report := self._report) is not None:
            found |= {
                "sync/bytes": float(report.nbytes),
                "sync/seconds": report.seconds,
                "sync/gigabytes_per_second": report.nbytes / 1e9 / max(1e-9, report.seconds),
            }
        return found

    def close(self) -> None:
        """End what this rank started."""
        if self._sender is not None:
            self._sender.close()

    # What the two engines differ in.

    def feeds(self) -> bool:
        """Whether this rank's replica sends weights."""
        raise NotImplementedError

    def make_room(self) -> None:
        """On every rank of the run, once for each attempt: give up memory that engines share. It may be a collective of
        the whole run, so replicas that have nothing to push take part."""

    def revive(self, suspect: bool) -> bool:
        """On a leader of a replica that feeds: replace engines that are gone, and with `suspect` those that may be.

        True if they are not the same as before, so that channels must be opened. Raises what starting one raises.
        """
        raise NotImplementedError

    def controls(self) -> Sequence[EngineControl]:
        """The engines that this leader's replica feeds."""
        raise NotImplementedError

    def host(self) -> str:
        """An address on the way to those engines."""
        return "127.0.0.1"

    def sample(self, asked: Sequence[MissingGroup], group_size: int) -> tuple[list[Completion], list[MissingGroup]]:
        """On a leader: completions, and what is still missing. Counts what went wrong."""
        raise NotImplementedError

    # What they share.

    def _transport(self) -> str:
        device, asked = self.ranks.device.type, self.config.transport
        why = "" if device == "cuda" else {"nccl": "needs GPUs", "cuda-ipc": "needs GPUs"}.get(asked, "")
        if why := why or self.IMPOSSIBLE.get(asked, ""):
            raise ValueError(f"--rl-vllm-transport {asked} {why}; auto is {self.AUTO[device]} here")
        chosen = self.AUTO[device] if asked == "auto" else asked
        if chosen == "cuda-ipc":
            for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                refuse_expandable_segments(os.environ.get(variable, ""))
        return chosen

    def _sync(self, version: int, suspect: bool = False) -> None:
        """Push until every engine holds the whole set. `suspect`: engines that look alive may not be."""
        connected, failure, report = self._sender is not None, "", None
        for attempt in range(self.config.retries + 1):
            self.make_room()
            if attempt == 0 or failure:
                failure, report = self._try_sync(version, connected, suspect or attempt > 0)
            if not self.ranks.any(bool(failure)):
                self.weight_version, self._report = version, self.ranks.from_first(report)
                self._fed = True
                self._strikes.clear()
                return
            connected = False
            self.counts["failed_syncs"] += int(bool(failure))
        self.weight_version = -1
        raise WeightSyncError(
            f"weights of version {version} did not reach the engines in {self.config.retries + 1} attempts: "
            f"{failure or 'another replica failed'}"
        )

    def _try_sync(self, version: int, connected: bool, suspect: bool) -> tuple[str, SyncReport | None]:
        """One attempt of one replica: ("", what it took) or (why it failed, None), the same on all its ranks."""
        if not self.feeds():
            return "", None
        new, failure = False, ""
        if self.ranks.leads:
            try:
                new = self.revive(suspect)
            except (RuntimeError, TimeoutError, OSError) as error:
                failure = f"{type(error).__name__}: {error}"
        new, failure, host, fed = self.ranks.from_leader((new, failure, self.host(), len(self.controls())))
        if failure:
            return failure, None
        assert self._policy is not None
        weights = replace(self._policy.sharded_weights(self.shape), replica=self.ranks.replica)
        try:
            if self._sender is None:
                self._sender = WeightSender(
                    weights,
                    transport=self.transport,
                    bucket_bytes=self.config.bucket_mib << 20,
                    device=self.ranks.device,
                    timeout=self.config.sync_timeout,
                    fp32_lm_head=self.model.fp32_lm_head,
                )
            if new or not connected:
                self._sender.connect(self.controls() if self.ranks.leads else (), host)
            return "", self._sender.push(version, weights)
        except WeightSyncError as error:
            # the same on every rank of the replica
            for name in error.engines:
                self._strikes[name].append(str(error))
            # a plan would be refused again; one engine of several may have been restarted with another model
            if isinstance(error, PlanRefusedError) and not (self._fed and len(error.engines) < fed):
                raise
            return str(error), None

    def _complete(
        self, done: list[Completion], missing: list[MissingGroup], group_size: int, version: int
    ) -> list[Completion]:
        """A replica's completions on all its ranks. What is missing is sampled again with weights of `version`.

        A prompt has one try more than the retries, those of its first `sample` included; then its group is dropped and
        counted. Raises RuntimeError where none of the run's is left, or another attempt would not help.
        """
        tries, rounds = self.config.retries + 1, 0
        dropped: list[MissingGroup] = []
        # an engine that is lost before it has taken a prompt costs it a try too, or there would be no end
        missing = [replace(m, failures=max(m.failures, 1)) for m in missing]
        while True:
            refused = self._hopeless
            if not refused:
                dropped += [m for m in missing if m.failures >= tries]
                missing = [m for m in missing if m.failures < tries]
            sums = self.ranks.sum_of_leaders(list(map(float, (refused, len(missing), len(dropped), len(done)))))
            if sums[0]:
                raise RuntimeError(
                    f"prompts could not be sampled, and no other attempt would help: {self._said(missing)}"
                )
            if not sums[1]:
                break
            rounds += 1
            self._sync(version, suspect=rounds > 1)
            if self.ranks.leads and missing:
                self.counts["retried"] += len(missing)
                before = {m.prompt.counter: m.failures for m in missing}
                more, missing = self.sample(missing, group_size)
                done = done + more
                missing = [replace(m, failures=max(m.failures, before[m.prompt.counter] + 1)) for m in missing]
        if sums[2] and not sums[3]:
            raise RuntimeError(
                f"no group of the step could be sampled in {tries} tries (--rl-vllm-retries {self.config.retries}): "
                f"{self._said(dropped)}"
            )
        if dropped:
            self.counts["dropped_groups"] += len(dropped)
            warnings.warn(
                f"{len(dropped)} groups were dropped, not sampled in {tries} tries: {_reasons(dropped)}", stacklevel=2
            )
        done = sorted(self.ranks.from_leader(done), key=lambda c: c.uid)
        self._sampled_by = max((c.weight_version for c in done), default=self._sampled_by)
        self.counts["tokens"] += sum(len(c.tokens) for c in done)
        return done

    def _said(self, missing: list[MissingGroup]) -> str:
        return self.ranks.from_leader(_reasons(missing)) or "another replica failed"


def _reasons(missing: Sequence[MissingGroup]) -> str:
    return "; ".join(sorted({m.reason for m in missing}))
