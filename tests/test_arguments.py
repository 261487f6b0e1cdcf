from __future__ import annotations

import dataclasses

import pytest

from megatron_replay.arguments import FLAGS, build_parser, grpo_config, model_options, optimizer_options, parse_args

GOOD = [
    "--run-dir",
    "r",
    "--train-iters",
    "5",
    "--load-hf",
    "m",
    "--seq-length",
    "64",
    "--rl-max-response-length",
    "8",
    "--grpo-prompts-per-step",
    "4",
    "--grpo-group-size",
    "4",
    "--lr",
    "1e-3",
]


def test_flags_become_the_dataclasses() -> None:
    more = "--rl-replay-alpha 1 --rl-replay-tau-max 3 --grpo-clamp-eps-upper 0.3 --bf16 --grpo-iterations 2 --seed 7"
    args = parse_args([*GOOD, *more.split()])
    config = grpo_config(args)
    assert (config.replay.priority_alpha, config.replay.tau_max, config.loss.clip_eps_high) == (1.0, 3, 0.3)
    assert config.seed == config.sampling.seed == 7
    assert str(model_options(args).dtype) == "torch.bfloat16"
    assert optimizer_options(args).total_updates == 10


def test_defaults_are_the_dataclasses_own() -> None:
    config = grpo_config(parse_args(GOOD))
    assert (config.replay.replay_ratio, config.replay.tau_max, config.replay.warmup_steps) == (0.5, 10, 20)
    assert (config.replay.priority_alpha, config.replay.priority_eps, config.replay.capacity) == (0.5, 1e-6, 30_000)
    assert (config.loss.clip_eps_low, config.loss.clip_eps_high, config.loss.kl_beta) == (0.2, 0.28, 0.0)


def test_every_table_row_names_a_real_field_once() -> None:
    rows = [f for flags in FLAGS.values() for f in flags]
    assert len({f.name for f in rows}) == len({(f.target, f.field) for f in rows}) == len(rows)
    for f in rows:
        assert f.field in {x.name for x in dataclasses.fields(f.target)}, f


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--grpo-group-size 1", "--grpo-group-size: group_size must be at least 2 .*got 1"),
        ("--rl-replay-tau-max 0", "--rl-replay-tau-max: tau_max must be at least 1 step, got 0"),
        ("--rl-replay-tau-max -4", "--rl-replay-tau-max: tau_max must be at least 1 step, got -4"),
        ("--rl-replay-ratio -0.1", "--rl-replay-ratio: replay_ratio must be at least 0 and finite, got -0.1"),
        ("--rl-replay-priority rank", "--rl-replay-priority: invalid choice: 'rank'"),
        ("--grpo-clamp-eps-lower 1.5", "--grpo-clamp-eps-lower: clip_eps_low .*got 1.5"),
        ("--rl-dual-clip 0.5", "--rl-dual-clip: dual_clip .*got 0.5"),
        ("--rl-loss-aggregation fixed-length", "--rl-loss-fixed-length: fixed_length"),
        ("--rl-default-top-p 0.9", "--rl-default-top-p: top_p .*allow_truncated_sampling.*got 0.9"),
        ("--rl-default-temperature 0", "--rl-default-temperature: temperature must be positive and finite, got 0"),
        ("--rl-inference-logprobs-is-correction", "--rl-replay-old-logprobs: old_logprobs must be recomputed"),
        ("--min-lr 1", "--min-lr: min_lr must be between 0 and lr 0.001, got 1.0"),
        ("--lr-warmup-iters 5", "--lr-warmup-iters: lr_warmup_iters must be below the 5 updates .*got 5"),
        ("--train-iters -1", "--train-iters: train_iters must be at least 0, got -1"),
        ("--seq-length 8", "--seq-length must hold a prompt and --rl-max-response-length 8, got 8"),
        ("--context-parallel-size 2", "--context-parallel-size must be 1, got 2"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size must be at least 1, got 0"),
        (
            "--rl-replay-composition pool --rl-replay-ratio 0",
            "--rl-replay-ratio: replay_ratio must be above 0 with composition pool, which has no ratio .*got 0.0",
        ),
        (
            "--rl-engine vllm-server --rl-generation-lag 1 --rl-replay-old-logprobs recomputed",
            r"--rl-generation-lag: generation_lag must be 0 with .*\(--rl-replay-old-logprobs\).*got 1",
        ),
        ("--adam-beta1 1", r"--adam-beta1: adam_beta1 must be in \[0, 1\), got 1.0"),
        ("--adam-beta2 1.5", r"--adam-beta2: adam_beta2 must be in \[0, 1\), got 1.5"),
        ("--adam-eps 0", "--adam-eps: adam_eps must be positive and finite, got 0.0"),
        ("--rl-replay-tau 3", "unrecognized arguments: --rl-replay-tau"),
    ],
)
def test_a_bad_value_ends_the_program_and_names_the_flag(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    with pytest.raises(SystemExit) as stopped:
        parse_args([*GOOD, *flags.split()])
    assert stopped.value.code == 2
    assert re.search(words, capsys.readouterr().err.replace("\n", " "))


REALS = sorted(a.option_strings[0] for a in build_parser()._actions if a.type is float)
EITHER_SIGN = ("--grpo-entropy-term-weight",)
assert {"--lr", "--exit-duration-in-mins", "--rl-dual-clip"} <= set(REALS)


@pytest.mark.parametrize("flag", REALS)
def test_no_real_number_is_infinite_or_none_and_few_are_negative(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("inf", "-inf", "nan", "-0.5"):
        words = [*GOOD, f"{flag}={value}"]
        if value == "-0.5" and flag in EITHER_SIGN:
            parse_args(words)
            continue
        with pytest.raises(SystemExit) as stopped:
            parse_args(words)
        assert stopped.value.code == 2
        said = capsys.readouterr().err.splitlines()[0]
        assert f" {flag}" in said and said.endswith(f"got {float(value)}"), said


def test_a_pool_takes_any_ratio_above_zero_and_a_lag_the_engines_logprobs() -> None:
    pool = parse_args([*GOOD, "--rl-replay-composition", "pool", "--rl-replay-ratio", "0.5"])
    assert grpo_config(pool).replay.enabled
    assert not grpo_config(parse_args([*GOOD, "--rl-replay-ratio", "0"])).replay.enabled
    lag = parse_args([*GOOD, "--rl-engine", "vllm-server", "--rl-generation-lag", "1"])
    assert grpo_config(lag).generation_lag == 1


def test_one_rank_speaks_and_only_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, lines in (("0", 2), ("1", 0)):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            parse_args([*GOOD, "--grpo-group-size", "1"])
        assert stopped.value.code == 2 and len(capsys.readouterr().err.splitlines()) == lines


def test_flags_from_a_file_and_later_ones_win(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "flags.txt"
    file.write_text("--lr 5e-4  # a comment\n\n--rl-replay-alpha 1\n" + " ".join(GOOD[:-2]))
    args = parse_args([f"@{file}", "--rl-replay-alpha", "2"])
    assert args.lr == 5e-4 and args.rl_replay_alpha == 2.0


def test_help_names_every_flag() -> None:
    text = build_parser().format_help()
    assert all(f.name in text for flags in FLAGS.values() for f in flags)
