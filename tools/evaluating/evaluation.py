"""Evaluation: one checkpoint on its benchmarks, from the flags to the files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.environment import environment
from benchmarks.json_file import write_json
from tqdm import tqdm

from megatron_replay import arguments
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.evaluation.accuracy_efficiency import AccuracyEfficiency
from megatron_replay.evaluation.benchmark_result import BenchmarkResult
from megatron_replay.evaluation.benchmark_run import BenchmarkRun
from megatron_replay.evaluation.sample_file import SampleFile
from megatron_replay.rollout import Completion
from megatron_replay.run.checks import flag_problems
from megatron_replay.run.lock import RunLock
from megatron_replay.run.parts import build_graders, make_engine
from megatron_replay.tasks.reward import Reward
from megatron_replay.telemetry import versions
from megatron_replay.tokenizer import Tokenizer, build_tokenizer
from megatron_replay.trainer.parallel import ParallelGroups, from_first_rank
from megatron_replay.weight_sync.model_shape import ModelShape

from .baseline import Baseline
from .benchmark import Benchmark, build_benchmark, parse_sources
from .report import draw, table
from .settings import sample_settings
from .weights import build_frozen, find_weights, weights_identity

# sequences for each that vLLM decodes at once: while a long response ends, others are there to be started
IN_FLIGHT = 4


class Evaluation:
    """One evaluation, from its flags. Raises ValueError for what does not fit, before anything is sampled."""

    def __init__(self, own: argparse.Namespace, args: argparse.Namespace, groups: ParallelGroups) -> None:
        self.own, self.args, self.groups = own, args, groups
        self.score = _score(own)
        sources = parse_sources(own.benchmark)
        self.shape = ModelShape.from_folder(Path(args.load_hf))
        self.tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model or args.load_hf)
        for problem in flag_problems(args, self.shape, self.tokenizer, None):
            raise ValueError(problem)
        made = (build_benchmark(n, x, args, self.tokenizer, own.problems) for n, x in sources.items())
        self.benchmarks = {b.name: b for b in made}
        self.iteration, self.step = find_weights(args, own.step, self.shape)
        # a second start must have the same
        self.settings = weights_identity(args, self.iteration)
        self.settings |= sample_settings(own, args, self.shape, self.tokenizer, self.benchmarks.values())
        self.identities = {name: b.identity for name, b in self.benchmarks.items()}
        self.baseline = None
        if own.baseline is not None:
            self.baseline = Baseline.load(own.baseline, self.identities, self.settings, own.correct_at)
        self.policy = build_frozen(args, self.shape, groups, self.iteration)
        self.lock = RunLock()
        self.file: SampleFile | None = None
        # before the file: a reward that cannot be used must not leave its name there
        self.graders = build_graders(args, groups, [b.task for b in self.benchmarks.values()])
        self.engine = make_engine(args, arguments.grpo_config(args), self.policy, self.shape, self.tokenizer)
        try:
            self.done = self._open()
        except ValueError:
            self.close()
            raise

    def _open(self) -> dict[str, int]:
        """Take the folder and read what an earlier start has left: problems that are done, of each benchmark."""

        def first() -> tuple[dict[str, int], str]:
            plan = {name: b.problems for name, b in self.benchmarks.items()}
            try:
                self.lock.take(self.own.out, "--out")
                self.file = SampleFile(self.own.out / "samples.jsonl", self.settings, plan, self.own.samples)
            except (ValueError, RuntimeError, OSError) as error:
                self.lock.release()
                return {}, str(error)
            return {name: self.file.done(name) for name in plan}, ""

        done, refused = from_first_rank(first)
        if refused:
            raise ValueError(refused if refused.startswith("--") else f"--out {refused}")
        return done

    def sample(self) -> None:
        """All that is not done yet."""
        ranks = EngineRanks.build(self.groups.data_parallel(), self.groups.replica, self.groups.device)
        total = sum(len(b.prompts) for b in self.benchmarks.values()) * self.own.samples
        done = sum(self.done.values()) * self.own.samples
        quiet = self.file is None or not sys.stderr.isatty()
        with tqdm(total=total, initial=done, unit="sample", dynamic_ncols=True, disable=quiet) as bar:
            for name, b in self.benchmarks.items():
                bar.set_description(name)
                for records in self._run(b, ranks).chunks(self.done[name], self.step or 0):
                    if self.file is not None:
                        self.file.append(name, records)
                    bar.update(len(records))

    def _run(self, benchmark: Benchmark, ranks: EngineRanks) -> BenchmarkRun:
        args, samples = self.args, self.own.samples
        rows = args.rl_generation_batch_size if args.rl_engine == "embedded" else IN_FLIGHT * args.rl_vllm_max_num_seqs
        return BenchmarkRun(
            prompts=benchmark.prompts,
            samples=samples,
            chunk=self.own.chunk or -(-rows // samples) * ranks.data.size,
            engine=self.engine,
            policy=self.policy,
            reward=Reward(benchmark.task, self.tokenizer, self.graders),
            ranks=ranks,
            text=(lambda c: response_text(self.tokenizer, c)) if self.own.keep_text else None,
        )

    def write(self) -> None:
        """On the first rank: evaluation.json, the picture, the table."""
        if self.file is None:
            return
        own, seed = self.own, self.args.seed
        results = {
            name: {"identity": self.identities[name]}
            | BenchmarkResult(records, own.samples, own.correct_at).to_json(seed=seed, resamples=own.resamples)
            for name, records in self.file.records.items()
        }
        aes = None
        if self.baseline is not None:
            aes = self.baseline.compare(results, self.score, seed=seed, resamples=own.resamples)
        machine = environment()
        evaluation = {
            "settings": self.settings,
            "run": {
                "load_hf": self.args.load_hf,
                "load": None if self.iteration is None else str(self.iteration),
                "step": self.step,
                "sources": parse_sources(own.benchmark),
                "tensor_parallel": self.groups.tensor_size,
                "pipeline_parallel": self.groups.pipeline_size,
                "data_parallel": self.groups.data_size,
                "device": self.groups.device.type,
            },
            "benchmarks": results,
            "aes": aes,
            "versions": versions(),
            "commit": machine["commit"],
            "changed_files": machine["changed_files"],
        }
        for path in (own.out / "evaluation.json", own.json):
            if path is not None:
                write_json(path, evaluation)
        draw(evaluation, own.out / "pass_at_k.png")
        print(table(evaluation), flush=True)
        for name, r in results.items():
            if r["unjudged"]:
                print(f"{name}: {r['unjudged']} samples have no reward; they are neither right nor wrong", flush=True)

    def close(self) -> None:
        """End what was started, and leave the folder."""
        self.engine.close()
        if self.graders is not None:
            self.graders.close()
        if self.file is not None:
            self.file.close()
            self.lock.release()


def response_text(tokenizer: Tokenizer, completion: Completion) -> str:
    """What the reward sees: no final EOS."""
    tokens = completion.tokens
    return tokenizer.decode(tokens[:-1] if completion.finish_reason == "stop" else tokens)


def _score(own: argparse.Namespace) -> AccuracyEfficiency:
    try:
        return AccuracyEfficiency(own.aes_alpha, own.aes_beta, own.aes_gamma)
    except ValueError as error:
        raise ValueError(f"--aes-{error}") from error
