"""tools/compare_trl.py: what it computes from runs, what it refuses, and a short run against the real TRL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, run_script

sys.path.insert(0, str(ROOT / "tools"))

import compare_trl
from comparing_trl import runs, step_clock
from comparing_trl.our_run import flags
from comparing_trl.setting import ARMS, Setting
from comparing_trl.summary import KEYS, of_arm, of_run, table

from megatron_replay.arguments import grpo_config, parse_args

TOOL = ROOT / "tools" / "compare_trl.py"


def row(**changes: float) -> dict[str, float]:
    return {
        "wall": 1.0, "generate": 0.25, "reward": 0.25, "update": 0.5, "trained": 12, "informative": 6,
        "reward_mean": 0.5,
    } | changes  # fmt: skip


def setting(folder: Path, **changes: Any) -> Setting:
    given = {
        "arm": "ours", "seed": 1, "lr": 3e-4, "steps": 4, "warmup": 1, "prompts": 4, "group_size": 4, "threads": 1,
        "folder": str(folder / "run"),
    }  # fmt: skip
    return Setting(**(given | changes))


def test_rates_are_per_second_of_generation_and_update_after_the_warm_up() -> None:
    # steps 1 to 4 of five; the first has no row
    record = {"rows": [row(generate=100.0, trained=1000), row(), row(update=1.0), row(reward=9.0)], "peak_bytes": 7}
    run = of_run(record, warmup=2, fresh=8)
    assert run["generate_seconds"] == 0.75 and run["update_seconds"] == 2.0
    assert run["rollouts_per_second"] == 36 / 2.75
    assert run["fresh_per_second"] == 24 / 2.75
    assert run["informative_per_second"] == 18 / 2.75
    assert run["wall_seconds"] == 3 and run["peak_bytes"] == 7 and run["reward_last"] == 0.5
    assert of_run(record, warmup=1, fresh=8)["generate_seconds"] == 100.75
    with pytest.raises(ValueError, match="warmup must leave a step, got 5 of 5 steps"):
        of_run(record, warmup=5, fresh=8)


def test_an_arm_is_the_mean_over_seeds_with_the_largest_peak() -> None:
    first = of_run({"rows": [row(), row()], "peak_bytes": 7}, warmup=1, fresh=8) | {"accuracy": 0.5}
    second = of_run({"rows": [row(), row(update=2.0)], "peak_bytes": 9}, warmup=1, fresh=8) | {"accuracy": 0.7}
    arm, details = of_arm([first, second])
    assert tuple(arm) == KEYS
    assert arm["accuracy"] == pytest.approx(0.6) and arm["peak_bytes"] == 9
    assert arm["update_seconds"] == (1.0 + 2.5) / 2
    assert details["runs"] == [first, second]
    assert details["std_over_seeds"]["accuracy"] == pytest.approx(0.2 / 2**0.5)
    assert of_arm([first])[1]["std_over_seeds"]["accuracy"] is None
    lines = table({"ours": arm}, {"ours": details}, steps=2).splitlines()
    assert len(lines) == 2 and lines[1].split()[:2] == ["ours", f"{arm['rollouts_per_second']:.0f}"]
    assert lines[1].split()[4] == "875"


def test_a_step_lasts_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 13.0, 13.25, 14.25, 14.5])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(now))
    clock = step_clock.StepClock()
    for generate in (5.0, 1.0, 0.25):
        clock.end_step(generate=generate, reward=0.5, trained=3, informative=2, reward_mean=0.1)
    assert [(r["wall"], r["generate"], r["reward"], r["update"]) for r in clock.rows] == [
        (2.5, 1.0, 0.5, 1.0),
        (1.0, 0.25, 0.5, 0.25),
    ]
    assert clock.record(ties=2)["ties"] == 2 and clock.peak_bytes > 2**20


@pytest.mark.parametrize(("arm", "ratio"), [("ours", 0.5), ("ours_grpo", 0.0)])
def test_the_entry_takes_our_flags(arm: str, ratio: float, tmp_path: Path) -> None:
    args = parse_args(flags(setting(tmp_path, arm=arm, lr=2e-4, seed=9)))
    config = grpo_config(args)
    assert config.replay.replay_ratio == ratio and config.advantage_std == "sample"
    assert (config.prompts_per_step, config.group_size, config.train_iters, config.seed) == (4, 4, 4, 9)
    assert (args.lr, args.lr_decay_style, args.tensor_model_parallel_size) == (2e-4, "linear", 1)
    # as TRL's dapo loss, which the other side uses
    assert config.loss.aggregation == "token-mean" and config.loss.clip_eps_high == 0.28


def test_both_sides_are_told_the_same_prompts(tmp_path: Path) -> None:
    told = setting(tmp_path, seed=5)
    told.write(tmp_path / "setting.json")
    assert Setting.read(str(tmp_path / "setting.json")) == told
    prompts = told.prompt_source().take(3)
    task = told.task()
    assert [task.problem(p.prompt_id).prompt for p in prompts] == [
        "".join("0123456789="[t - 4] for t in p.tokens) for p in prompts
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--steps 1", "--steps must be at least 2, got 1"),
        ("--warmup 0", "--warmup must be at least 1, got 0"),
        ("--steps 5 --warmup 5", "--warmup must be below --steps 5, got 5"),
        ("--seeds 1 2 1", "--seeds must give each once, got 1 2 1"),
        ("--arms trl trl", "--arms must give each once, got trl trl"),
        ("--arms theirs", "invalid choice: 'theirs'"),
        ("--threads 0", "--threads must be at least 1, got 0"),
        ("--group-size 1", "--group-size must be at least 2, got 1"),
        ("--problems 0", "--problems must be at least 1, got 0"),
        ("--lr 0", "--lr must be positive and finite, got 0.0"),
        ("--lr inf", "--lr must be positive and finite, got inf"),
        ("--arms ours --arm-lr trl=1e-3", "an arm that runs and a positive rate, got 'trl=1e-3'"),
        ("--arm-lr trl=fast", "--arm-lr must be ARM=X with an arm that runs and a positive rate, got 'trl=fast'"),
        ("--json nowhere/c.json", "--json must be in a folder that exists, got nowhere/c.json"),
    ],
)  # fmt: skip
def test_a_flag_that_does_not_fit_is_named(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        compare_trl.arguments(["--json", "c.json", *given.split()])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and words in said and len(said.splitlines()) == 1


def test_an_arm_may_have_a_rate_of_its_own() -> None:
    args = compare_trl.arguments(["--json", "c.json", "--lr", "1e-3", "--arm-lr", "trl=5e-4"])
    assert args.rates == {"ours": 1e-3, "ours_grpo": 1e-3, "trl": 5e-4, "trl_replay": 1e-3}
    assert args.arms == list(ARMS)


def test_without_trl_it_says_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "TRL_PYTHON", tmp_path / "python")
    assert compare_trl.main(["--json", str(tmp_path / "c.json")]) == 1
    said = capsys.readouterr().err
    assert said == "compare_trl.py: TRL is not here: `make trl` installs it into .venv/trl\n"
    assert not (tmp_path / "c.json").exists()
    # one that is there and has no TRL
    (tmp_path / "python").symlink_to("/bin/false")
    assert compare_trl.main(["--json", str(tmp_path / "c.json")]) == 1
    assert "TRL in .venv/trl does not start" in capsys.readouterr().err


def test_a_run_that_dies_ends_the_comparison_with_its_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "HERE", tmp_path)
    given = ["--json", str(tmp_path / "c.json"), "--arms", "ours", "--seeds", "7", "--steps", "3", "--warmup", "1"]
    for program, words in (
        (
            "import sys; print('no memory left'); sys.exit(3)",
            "ours with seed 7 ended with exit code 3:\nno memory left\n",
        ),
        ("print('all is well')", "ours with seed 7 ended with exit code 0:\nall is well\n"),
        (
            "import sys; open(sys.argv[2], 'w').write('{\"rows\": [1]}')",
            "ours with seed 7 must have 2 measured steps, got 1",
        ),
    ):
        (tmp_path / "our_run.py").write_text(program)
        assert compare_trl.main(given) == 1
        assert f"compare_trl.py: {words}" in capsys.readouterr().err
        assert not (tmp_path / "c.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not runs.TRL_PYTHON.exists(), reason="there is no .venv/trl: `make trl` makes it")
def test_a_short_comparison_with_the_real_trl(tmp_path: Path) -> None:
    out = tmp_path / "c.json"
    given = "--arms ours trl_replay --seeds 3 --steps 4 --warmup 1 --prompts 4 --group-size 4 --threads 1"
    said = run_script(TOOL, "--json", out, *given.split(), "--problems", 16, "--samples", 2)
    found = json.loads(out.read_text())
    assert set(found) == {"ours", "trl_replay", "details", "settings", "environment"}
    for arm in ("ours", "trl_replay"):
        assert set(found[arm]) == set(KEYS)
        details = found["details"][arm]
        (run,) = details["runs"]
        assert 0 <= found[arm]["accuracy"] <= 0.5 and found[arm]["accuracy"] * 32 % 1 == 0
        assert min(run[name] for name in ("rollouts_per_second", "generate_seconds", "update_seconds")) > 0
        assert run["generate_seconds"] + run["update_seconds"] < run["wall_seconds"]
        assert 100 * 2**20 < found[arm]["peak_bytes"] < 4 * 2**30
        assert details["seeds"] == [3] and details["lr"] == 3e-4 and details["threads"] == 1
        assert f"{arm}, seed 3" in said
    assert found["details"]["trl_replay"]["versions"]["trl"] == "1.13.0"
    assert found["settings"]["steps"] == 4 and found["environment"]["commit"]
    # TRL trains all 16 rollouts of a step, this project those of groups that differ and as many again by half
    trl = found["details"]["trl_replay"]["runs"][0]
    assert trl["rollouts_per_second"] == pytest.approx(trl["fresh_per_second"])


def test_the_committed_figures_are_of_the_contract() -> None:
    found = json.loads((ROOT / "tools" / "baselines" / "compare_trl_cpu.json").read_text())
    for arm in ARMS:
        assert set(found[arm]) == set(KEYS)
        assert len(found["details"][arm]["runs"]) >= 3
    assert found["settings"]["problems"] == 512 and found["settings"]["samples"] == 8
