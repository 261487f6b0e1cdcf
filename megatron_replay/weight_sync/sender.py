"""WeightSender: the policy's shards to all engines: pause, push, verify, reset the prefix cache, resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_replay.weight_sync.engine_control import EngineControl
from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.message import TRAILER_BYTES, message_bytes, seal
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from megatron_replay.weight_sync.transfer_plan import TransferPlan, local_entries, make_plan
from megatron_replay.weight_sync.transports import Sender, open_sender
from megatron_replay.weight_sync.transports.addresses import address_towards

T = TypeVar("T")
CACHE_RESETS = 3  # times that a refused reset is asked for again


@dataclass(frozen=True)
class SyncReport:
    nbytes: int  # of the weights, once, however many engines took them
    seconds: float  # from pause to resume


class WeightSender:
    """One replica's end of every push. All ranks of `weights.replica` call every method together; its first rank
    drives the engines. `fp32_lm_head`: the trainer's logits are float32 whatever the weights are.

    A push that fails anywhere raises WeightSyncError on every rank and leaves the engines paused: they hold a mixture.
    `connect` to engines that are alive and push again; a whole push makes any of them good.
    """

    def __init__(
        self,
        weights: ShardedWeights,
        *,
        transport: str,
        bucket_bytes: int,
        device: torch.device,
        timeout: float,
        fp32_lm_head: bool = False,
    ) -> None:
        self.weights, self.transport, self.device, self.timeout = weights, transport, device, timeout
        self.rank = 0 if weights.replica is None else dist.get_rank(weights.replica)
        held = self._exchange(local_entries(weights, self.rank))
        self.plan: TransferPlan = make_plan(held, weights.shape, weights.padded_vocab, bucket_bytes, fp32_lm_head)
        self._engines: Sequence[EngineControl] = ()
        self._channel: Sender | None = None

    def connect(self, engines: Sequence[EngineControl], host: str = "127.0.0.1") -> None:
        """Open a channel from every rank to every worker of the engines (which the first rank alone passes).

        `host`: an address that leads to the engines' hosts; each rank finds out its own towards it.
        """
        self.close()
        self._engines = engines
        plan = {"plan": self.plan.to_json(), "timeout": self.timeout}
        with ThreadPoolExecutor(max(1, len(engines))) as calls:
            mine = self._together(lambda: _each(calls, engines, lambda e: e.world_size()))
            sizes = self._exchange(mine)[0]
            channel = self._together(lambda: self._open(host, workers=sum(sizes)))
            addresses = {"addresses": self._exchange(channel.address)}
            # first without addresses: an engine of another model says so while nobody waits to meet it
            self._together(lambda: _each(calls, engines, lambda e: _checked(e, e.init_weight_transfer, plan)))
            asked = [
                calls.submit(_checked, e, e.init_weight_transfer, plan | addresses | {"first_worker": sum(sizes[:i])})
                for i, e in enumerate(engines)
            ]
            # the workers answer when they have met every rank
            self._together(lambda: self._meanwhile(channel.connect, asked, engines))

    def push(self, version: int, weights: ShardedWeights | None = None) -> SyncReport:
        """All weights to all engines, tagged `version`; they sample with these and nothing else when it returns.

        `weights`: as they are now, where they are not in the tensors that were given at first.
        """
        self.weights = weights or self.weights
        if self._channel is None:
            raise WeightSyncError("a push needs engines: call connect first")
        began = time.perf_counter()
        channel, engines = self._channel, self._engines
        with ThreadPoolExecutor(max(1, len(engines))) as calls:
            self._together(lambda: _each(calls, engines, _begin))
            asked = [calls.submit(_checked, e, e.update_weights, {"version": version}) for e in engines]
            self._together(lambda: self._meanwhile(lambda: self._stream(channel, version), asked, engines))
            self._together(lambda: _each(calls, engines, lambda e: _commit(e, version)))
        return SyncReport(self.plan.nbytes, time.perf_counter() - began)

    def close(self) -> None:
        """Leave the engines; a worker that waits for a message raises."""
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    @torch.no_grad()
    def _stream(self, channel: Sender, version: int) -> None:
        for index, bucket in enumerate(self.plan.buckets):
            offsets = bucket.offsets(self.rank)
            if not offsets:
                continue
            message = channel.message(message_bytes(bucket, self.rank))
            for entry in bucket.entries:
                if entry.name in offsets:
                    shard = self.weights.parameters[entry.name]
                    found = (tuple(shard.shape), str(shard.dtype).removeprefix("torch."))
                    if found != (entry.shard_shape, entry.dtype):
                        raise WeightSyncError(f"{entry.name} is {found} now, was {(entry.shard_shape, entry.dtype)}")
                    at = offsets[entry.name]
                    place = message[at : at + entry.shard_bytes].view(shard.dtype).view(shard.shape)
                    place.copy_(shard)
            seal(message, version, index)
            channel.send()
        channel.flush()

    def _open(self, host: str, workers: int) -> Sender:
        self._channel = open_sender(
            self.transport,
            host=address_towards(host),
            workers=workers,
            largest=self.plan.largest_payload(self.rank) + TRAILER_BYTES,
            device=self.device,
            timeout=self.timeout,
        )
        return self._channel

    def _meanwhile(
        self, work: Callable[[], None], asked: Sequence[Future[Any]], engines: Sequence[EngineControl]
    ) -> None:
        """This rank's work while the engines are busy with their part; what either says of a failure is kept."""
        own: Exception | None = None
        channel, ended = self._channel, False
        first: list[str] = []  # the engine that failed before anything else did: it takes the others along

        def look(call: Future[Any], engine: EngineControl) -> None:
            if call.exception() is None:
                return
            if not ended and not first:
                first.append(engine.name)
            # it will not meet this rank: whoever waits for it is told
            if channel is not None:
                channel.close()

        for call, engine in zip(asked, engines, strict=True):
            call.add_done_callback(partial(look, engine=engine))
        try:
            work()
        except Exception as error:
            own, ended = error, True
            # tells the engines, whose calls then end
            self.close()
        try:
            _results(asked, engines)
        except WeightSyncError as theirs:
            raise type(theirs)(f"{theirs}; sender: {own}" if own else str(theirs), first) from own
        if own is not None:
            raise own

    def _exchange(self, value: T) -> list[T]:
        """Every rank's value, in the order of the senders."""
        if self.weights.replica is None:
            return [value]
        values: list[Any] = [None] * dist.get_world_size(self.weights.replica)
        dist.all_gather_object(values, value, group=self.weights.replica)
        return values

    def _together(self, work: Callable[[], T]) -> T:
        """Do this rank's part; what fails on one rank raises on all of them, in bounded time."""
        failure: str | None = None
        refused, named = False, tuple[str, ...]()
        try:
            result = work()
        except Exception as error:
            failure, refused = f"{type(error).__name__}: {error}", isinstance(error, PlanRefusedError)
            named = error.engines if isinstance(error, WeightSyncError) else ()
            # tells whoever still waits for this rank's messages
            self.close()
        outcomes = self._exchange((failure, refused, named))
        if any(f for f, _, _ in outcomes):
            self.close()
            said = "; ".join(f"rank {i}: {f}" for i, (f, _, _) in enumerate(outcomes) if f)
            kind = PlanRefusedError if any(r for _, r, _ in outcomes) else WeightSyncError
            engines = [name for _, _, names in outcomes for name in names]
            raise kind(f"the engines' weights were not updated ({said})", engines)
        return result


def _begin(engine: EngineControl) -> None:
    engine.pause()
    if any(status["open"] for status in engine.transfer_status()):
        # a push that stopped half-way
        engine.finish_weight_update(None)
    engine.start_weight_update()


def _checked(engine: EngineControl, call: Callable[..., None], *args: Any) -> None:
    """`call`, and then raise what a worker met in it."""
    call(*args)
    statuses = engine.transfer_status()
    if said := sorted({status["problem"] for status in statuses if status["problem"]}):
        raise (PlanRefusedError if any(s["refused"] for s in statuses) else WeightSyncError)("; ".join(said))


def _commit(engine: EngineControl, version: int) -> None:
    _checked(engine, engine.finish_weight_update, version)
    if (found := engine.weight_version()) != version:
        raise WeightSyncError(f"{engine.name} says weight version {found} after a push of version {version}")
    for attempt in range(CACHE_RESETS + 1):
        if engine.reset_prefix_cache():
            break
        if attempt == CACHE_RESETS:
            raise WeightSyncError(f"{engine.name} refuses to reset its prefix cache: it would mix weights")
        time.sleep(0.2 * 2**attempt)
    engine.resume()


def _each(calls: ThreadPoolExecutor, engines: Sequence[EngineControl], do: Callable[[EngineControl], T]) -> list[T]:
    return _results([calls.submit(do, e) for e in engines], engines)


def _results(asked: Sequence[Future[T]], engines: Sequence[EngineControl]) -> list[T]:
    """Wait for all; raise one error that names every engine that failed."""
    results: list[T] = []
    failed: dict[str, Exception] = {}
    for call, engine in zip(asked, engines, strict=True):
        try:
            results.append(call.result())
        except Exception as error:
            failed[engine.name] = error
    if failed:
        refused = any(isinstance(error, PlanRefusedError) for error in failed.values())
        said = ", ".join(f"{name}: {error}" for name, error in failed.items())
        raise (PlanRefusedError if refused else WeightSyncError)(said, list(failed))
    return results
