"""Every command in the pages is one that its program takes: parsed by the program's own parser, or run."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_replay.arguments import build_parser, parse_args
from tests.launch import ROOT
from tests.test_container import DOCKERFILE
from tests.test_docs import PAGES

ENTRY = "examples/pretrain_replay_grpo.py"
PYTHON = re.compile(r"(\.venv/(trl/)?bin/)?python")
STARTS = re.compile(r"(([A-Z_]+=\S*|\.venv/bin/\S+|python|torchrun|make|docker|sbatch|(tools|examples)/\S+)( |$))+")


@dataclass(frozen=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        named = (w.split("=", 1) for w in self.words if re.match(r"[A-Z_]+=", w))
        return dict(named)

    @property
    def program(self) -> tuple[str, ...]:
        """The words behind variables that stand before the program."""
        first = next(i for i, w in enumerate(self.words) if not re.match(r"[A-Z_]+=", w))
        return self.words[first:]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def commands(page: Path) -> list[Command]:
    """Those in indented and fenced blocks, continued lines joined and comments left out."""
    found, lines = [], page.read_text().splitlines()
    fenced = False
    for number, line in enumerate(lines, 1):
        fenced ^= line.startswith("```")
        text = line.strip()
        if not (fenced or line.startswith("    ")) or not STARTS.match(text) or lines[number - 2].endswith("\\"):
            continue
        at = number
        while text.endswith("\\"):
            text = text[:-1] + lines[at].strip()
            at += 1
        words = shlex.split(text, comments=True)
        found.append(Command(str(page.relative_to(ROOT)), number, tuple(words)))
    return found


COMMANDS = [command for page in PAGES for command in commands(page)]


def trainer_flags(words: tuple[str, ...]) -> argparse.Namespace:
    """Of a command of the entry script; `...` stands for what a reader fills in, and for what is required."""
    flags = [word for word in words if word != "..."]
    if len(flags) < len(words):
        lacking = [a for a in build_parser()._actions if a.required and not set(a.option_strings) & set(flags)]
        flags = [word for a in lacking for word in (a.option_strings[0], "9999")] + flags
    return parse_args([f"@{ROOT / word[1:]}" if word.startswith("@examples") else word for word in flags])


class ParsedError(Exception):
    """With the flags."""


def tool_takes(monkeypatch: pytest.MonkeyPatch, tool: str, flags: tuple[str, ...]) -> argparse.Namespace:
    """Start the tool in this process and stop it when it has parsed its flags."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        raise ParsedError(parse(self, *args, **kwargs))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", [tool, *flags])
    monkeypatch.syspath_prepend(str((ROOT / tool).parent))
    with pytest.raises(ParsedError) as parsed:
        runpy.run_path(str(ROOT / tool), run_name="__main__")
    found: argparse.Namespace = parsed.value.args[0]
    return found


def assert_layout(args: argparse.Namespace, processes: int) -> None:
    """Of a trainer or an evaluation; other tools have none."""
    parts = getattr(args, "tensor_model_parallel_size", 1) * getattr(args, "pipeline_model_parallel_size", 1)
    assert processes % parts == 0, f"{processes} processes of {parts} parts"


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one_that_its_program_takes(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *rest = command.program
    words = tuple(rest)
    if PYTHON.fullmatch(name) and words[0] != ENTRY:
        taken = tool_takes(monkeypatch, words[0], words[1:])
        if words[0] != "tools/plan.py":  # whose layout is of machines that are elsewhere
            assert_layout(taken, 1)
    elif name == "torchrun" or PYTHON.fullmatch(name):
        # a command that begins in the middle has no script to show where its flags begin
        args = trainer_flags(words[words.index(ENTRY) + 1 :] if ENTRY in words else words)
        if "--nproc-per-node" in words:
            assert_layout(args, int(words[words.index("--nproc-per-node") + 1]))
    elif name == "make":
        # these tests may run under a make of their own
        kept = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        if "train" in words:
            shown = shlex.split(done.stdout.replace("\\\n", " ").rpartition(ENTRY)[2])
            asked = shlex.split(command.variables.get("ARGS", ""))
            assert shown[len(shown) - len(asked) :] == asked
            trainer_flags(tuple(shown))
    elif name == "docker":
        stages = re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE, re.MULTILINE)
        declared = re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE)
        for flag, value in itertools.pairwise(words):
            assert flag != "--target" or value in stages
            assert flag != "--build-arg" or value.partition("=")[0] in declared
        assert words[0] in ("build", "run")
    elif name == "sbatch":
        script = next(i for i, word in enumerate(words) if word.endswith(".sh"))
        assert_script_reads(words[script], command.variables)
        trainer_flags((f"@examples/qwen3/qwen3-{words[script + 1]}.txt", *words[script + 2 :]))
    elif name.endswith("run_single_node.sh"):
        environment = os.environ | command.variables | {"DRY": "1", "PYTHON": sys.executable}
        done = subprocess.run(
            ["bash", name, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        shown = shlex.split(done.stdout)
        trainer_flags(tuple(shown[next(i for i, w in enumerate(shown) if w.endswith(ENTRY)) + 1 :]))
    elif name.endswith(".sh"):
        assert_script_reads(name, command.variables)
    else:
        assert name in (".venv/bin/pre-commit",), f"no rule for {shlex.join(command.words)}"
        assert (ROOT / ".pre-commit-config.yaml").exists()


def assert_script_reads(script: str, variables: dict[str, str]) -> None:
    """The script is there and reads the variables that are set for it; those of CUDA are not its own."""
    text = (ROOT / script).read_text() + "".join(p.read_text() for p in (ROOT / script).parent.glob("arguments.sh"))
    assert os.access(ROOT / script, os.X_OK)
    for variable in variables:
        assert variable.startswith("CUDA_") or re.search(rf"\b{variable}\b", text), variable


def test_each_program_is_shown_somewhere() -> None:
    """The rules above have something to hold: every tool and script that users start is in a page."""
    shown = {word for command in COMMANDS for word in command.words}
    started = {f"tools/{p.name}" for p in (ROOT / "tools").glob("*.py") if "__main__" in p.read_text()}
    inner = {"tools/run_steps.py", "tools/flags_page.py"}  # of gpu_check.sh, and of whoever changes a flag
    assert started - inner <= shown, sorted(started - inner - shown)
    assert {ENTRY, "examples/serve_vllm.sh", "tools/gpu_check.sh"} <= shown
