"""Where metrics go: a progress bar, metrics.jsonl, TensorBoard, curves.png, summary.json. Rank 0 writes."""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from megatron_replay.run.lock import RunLock

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
VERSIONS = ("megatron-replay", "torch", "megatron-core", "transformer-engine", "triton", "transformers", "vllm")


class PhaseTimer:
    """Seconds spent in the named parts of a step since the last `drain`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def drain(self) -> dict[str, float]:
        """{"time/NAME": seconds}; the counts start again."""
        out = {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.seconds = {}
        return out


def set_aside(folder: Path) -> Path | None:
    """Rename the folder of an earlier run to FOLDER.1, .2, ...: a new run overwrites nothing. None if there is none."""
    if not (folder / METRICS_FILE).exists():
        return None
    number = next(n for n in itertools.count(1) if not folder.with_name(f"{folder.name}.{n}").exists())
    return folder.rename(folder.with_name(f"{folder.name}.{number}"))


class RunLog:
    """The run folder of one run. A resumed run drops the rows its checkpoint has not seen and goes on; a new run
    sets an earlier one in the same place aside, unless that one still runs: it holds the lock."""

    def __init__(self, folder: str | Path, *, start_step: int, total_steps: int, enabled: bool = True) -> None:
        self.folder = Path(folder)
        self.enabled = enabled
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        lock = self._lock = RunLock()
        lock.take(self.folder, "--run-dir")
        earlier = set_aside(self.folder) if start_step == 0 else None
        if earlier is not None:
            # the lock went along
            lock.release()
            lock.take(self.folder, "--run-dir")
        drop_rows_from(self.folder / METRICS_FILE, start_step)
        self._file = open(self.folder / METRICS_FILE, "a", buffering=1)  # noqa: SIM115 - closed in close()
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=start_step)
        self._bar = tqdm(total=total_steps, initial=start_step, desc="replay GRPO", unit="step", dynamic_ncols=True)
        if earlier is not None:
            self.say(f"the run that was in {self.folder} is now in {earlier}")

    def describe(self, flags: dict[str, Any]) -> None:
        """run.json: what this run was started with, and the versions of what runs it."""
        if not self.enabled:
            return
        text = json.dumps({"flags": flags, "versions": versions()}, indent=1, default=str)
        (self.folder / RUN_FILE).write_text(text + "\n")

    def hold(self, folder: str | Path, flag: str) -> None:
        """Lock another folder of this run too, named by `flag`."""
        if self.enabled:
            self._lock.take(folder, flag)

    def update(self, step: int, iteration: int, metrics: dict[str, Any]) -> None:
        """One row: an update of the policy."""
        if not self.enabled:
            return
        self._file.write(json.dumps(_finite({"step": step, "iteration": iteration, **metrics})) + "\n")
        self._to_board({name: value for name, value in metrics.items() if isinstance(value, (int, float))}, step)
        self._bar.update(step + 1 - self._bar.n)
        self._bar.set_postfix_str(progress_text(metrics))

    def say(self, text: str) -> None:
        """A line above the progress bar."""
        if self.enabled:
            self._bar.write(text)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Numbers beside the updates, such as held-out accuracy, in TensorBoard alone."""
        if self.enabled:
            self._to_board(values, step)

    def _to_board(self, values: dict[str, float], step: int) -> None:
        """In one event of TensorBoard; add_scalar would check and queue one for each value."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._board._get_file_writer().add_summary(Summary(value=found), step)

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """Finish the files; with a summary, write summary.json and draw curves.png."""
        if not self.enabled:
            return
        self._bar.close()
        self._file.close()
        self._board.close()
        if summary is not None:
            draw_curves(read_metrics(self.folder), summary, self.folder / "curves.png")
            (self.folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        self._lock.release()


def drop_rows_from(path: Path, start_step: int) -> None:
    """Leave the rows of steps before `start_step`; a line cut off by a kill goes too, any other bad line raises."""
    if not path.exists():
        return
    # beside its place: a run killed in this moment keeps its rows
    short = path.with_name(f"{path.name}.tmp")
    with open(path, "rb") as old, open(short, "wb") as new:
        for number, line in enumerate(old, 1):
            if not line.endswith(b"\n"):
                break
            try:
                keep = json.loads(line)["step"] < start_step
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} is no row with a step: {line[:80]!r}") from error
            if keep:
                new.write(line)
    os.replace(short, path)


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of FOLDER/metrics.jsonl; a last line cut off by a kill is left out, any other bad line raises."""
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        return []
    lines = path.read_text().splitlines()
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise ValueError(f"{path}:{number} is not JSON: {line[:80]!r}") from error
    return rows


def versions() -> dict[str, str | None]:
    """Of Python and the packages that decide what a run computes; None for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in VERSIONS}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    """NaN and infinity as null, since JSON has neither."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}


def progress_text(metrics: dict[str, Any]) -> str:
    """reward, share of replayed rollouts, their mean age, and seconds per phase."""
    seconds = " ".join(
        f"{name[5:]} {value:.2f}" for name, value in metrics.items() if name.startswith("time/") and value >= 0.005
    )
    share, age = metrics.get("replay/fraction", 0.0), metrics["replay/age_mean"]
    return f"reward {metrics['reward_mean']:.3f}, replay {share:.0%}, age {age:.1f}, seconds: {seconds}"


def accuracy_text(value: float | None) -> str:
    """A held-out accuracy; there is none where nothing was evaluated, or nothing could be judged."""
    return "none" if value is None else f"{value:.3f}"


def draw_curves(rows: list[dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Six small plots over the steps: reward, loss and gradient norm, ages, ratios, clipping, time."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def series(name: str) -> tuple[list[int], list[float]]:
        # before the first draw the replay numbers are 0 for want of a rollout
        drawn = [r for r in rows if name in r and (not name.startswith("replay/") or r["replay/draw_size"] > 0)]
        return [r["step"] for r in drawn], [r[name] for r in drawn]

    figure, axes = plt.subplots(2, 3, figsize=(13, 7), constrained_layout=True)
    plots = [
        ("reward", [("reward_mean", "fresh rollouts, training prompts")]),
        ("gradient norm", [("grad_norm", "before clipping")]),
        ("replay", [("replay/age_mean", "mean age [steps]"), ("replay/age_max", "oldest [steps]")]),
        ("effective sample size", [("fresh/ess", "fresh"), ("replay/ess", "replay")]),
        ("clipped tokens", [("fresh/clip_fraction", "fresh"), ("replay/clip_fraction", "replay")]),
        ("seconds per step", [(f"time/{p}", p) for p in ("generate", "reward", "draw", "train", "sync")]),
    ]
    for axis, (title, lines) in zip(axes.flat, plots, strict=True):
        for name, label in lines:
            steps, values = series(name)
            axis.plot(steps, values, label=label, linewidth=1.0)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    accuracy = ""
    before, after = summary["accuracy_before"], summary["accuracy_after"]
    last = max((r["step"] for r in rows), default=0)
    ends = [(step, value) for step, value in ((0, before), (last, after)) if value is not None]
    if ends:
        axes[0, 0].scatter(*zip(*ends, strict=True), color="black", zorder=3, label="held out")
        axes[0, 0].legend(fontsize=8)
        accuracy = f"held-out accuracy {accuracy_text(before)} -> {accuracy_text(after)}, "
    figure.suptitle(
        f"{accuracy}{summary['fresh_rollouts']} fresh and "
        f"{summary['replayed_rollouts']} replayed rollouts, TP{summary['tensor_parallel']} "
        f"PP{summary['pipeline_parallel']} DP{summary['data_parallel']}, {summary['seconds']:.0f} s"
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)
