"""What importing costs, who imports whom, and both ways to build the extension."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.launch import ROOT

PACKAGE = ROOT / "megatron_replay"


def test_importing_the_package_needs_torch_only() -> None:
    code = (
        "import sys; import torch; before = set(sys.modules)\n"
        "import megatron_replay\n"
        "top = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)\n"
        "print(sorted(top))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['megatron_replay']"


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return found


def starts(names: set[str], prefix: str) -> set[str]:
    return {n for n in names if n == prefix or n.startswith(prefix + ".")}


def files(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def test_only_the_trainer_imports_megatron_and_only_what_runs_inside_vllm_imports_that() -> None:
    inside_vllm = {"vllm_child.py", "vllm_weight_transfer.py"}
    for path in files("."):
        inside = (PACKAGE / "trainer") in path.parents
        assert inside or not starts(imports(path), "megatron"), path
        assert path.name in inside_vllm or not starts(imports(path), "vllm"), path


def test_vllm_finds_the_receiving_end_by_its_entry_point() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "megatron_replay"]
    assert found.value == "megatron_replay.engines.vllm_weight_transfer:register"


def arrows() -> dict[str, set[str]]:
    """folder -> what CONTRIBUTING.md lets it import of the package."""
    rows = re.findall(r"^\| `(\w+)/` \| [^|]* \| ([^|]*) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    return {folder: set(re.findall(r"\w+", may.partition(";")[0])) for folder, may in rows}


@pytest.mark.parametrize(
    "folder", sorted({p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()} - {"run"})
)
def test_arrows_between_folders(folder: str) -> None:
    for path in files(folder):
        of_package = {name.split(".")[1] for name in imports(path) if name.startswith("megatron_replay.")}
        more = {"planning"} if path.name == "dry_run.py" else set()
        assert of_package - arrows()[folder] - more <= {folder}, path


def test_the_loop_knows_no_framework() -> None:
    assert not starts(imports(PACKAGE / "algorithm.py"), "torch.distributed")
    assert not starts(imports(PACKAGE / "replay_buffer.py"), "torch.distributed")
    knows_flags = [PACKAGE / "arguments.py", *files("run")]
    assert [p for p in files(".") if starts(imports(p), "argparse") and p not in knows_flags] == []


def build(target: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Build the extension in a copy of the sources."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "csrc", target / "csrc", dirs_exist_ok=True)
    (target / "megatron_replay").mkdir(exist_ok=True)
    (target / "megatron_replay" / "__init__.py").touch()
    return subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=target, env=os.environ | env, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def architectures(target: Path) -> str:
    code = "from megatron_replay import _C; print(_C.cuda_architectures())"
    return subprocess.run(
        [sys.executable, "-c", code], cwd=target, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture(scope="module")
def built_without_cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("source")
    done = build(target, MEGATRON_REPLAY_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert "warning:" not in done.stderr
    return target


@pytest.mark.slow
def test_building_without_cuda(built_without_cuda: Path) -> None:
    assert architectures(built_without_cuda) == ""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_a_switch_takes_effect_on_sources_that_have_not_changed(built_without_cuda: Path) -> None:
    done = build(built_without_cuda, MEGATRON_REPLAY_CUDA="1", MEGATRON_REPLAY_CUDA_ARCHS="90a;80")
    assert done.returncode == 0, done.stderr
    assert architectures(built_without_cuda) == "80;90a"


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("wanted", ["", "90;", "sm_90", "90,100", "9.0"])
def test_a_malformed_list_of_architectures_ends_the_build(tmp_path: Path, wanted: str) -> None:
    done = build(tmp_path, MEGATRON_REPLAY_CUDA="1", MEGATRON_REPLAY_CUDA_ARCHS=wanted)
    assert done.returncode != 0
    assert f'MEGATRON_REPLAY_CUDA_ARCHS must be numbers like "80;90;100", got {wanted!r}' in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_an_architecture_that_nvcc_does_not_know_ends_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, MEGATRON_REPLAY_CUDA="1", MEGATRON_REPLAY_CUDA_ARCHS="11")
    assert done.returncode != 0
    assert "nvcc ended with 1" in done.stderr and "MEGATRON_REPLAY_CUDA=0 builds without" in done.stderr


def test_versions_are_pinned_and_agree() -> None:
    makefile, dockerfile = (ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    pins: dict[str, str] = {}
    for name in ("cpu", "dev"):
        lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
        for line in (x for x in lines if x and not x.startswith(("#", "-r "))):
            package, exact, version = line.partition("==")
            assert exact and version, f"{name}.txt does not pin {line}"
            assert package not in pins, f"{package} is pinned twice"
            pins[package] = version
    assert set(re.findall(r"megatron-core==([\d.]+)", makefile + dockerfile + project)) == {"0.19.2"}
    for package in ("pybind11", "reasoning-gym"):
        assert set(re.findall(rf"\b{package}==([\d.]+)", project)) == {pins[package]}
    container = (ROOT / "requirements" / "container.txt").read_text()
    for package, version in re.findall(r"^([\w-]+)==(\S+)$", container, re.MULTILINE):
        assert pins[package] == version, f"container.txt pins another {package}"
    assert not re.search(r"^torch\b", container, re.MULTILINE)


def test_cuda_demanded_and_missing_ends_the_build(tmp_path: Path) -> None:
    done = build(tmp_path, MEGATRON_REPLAY_CUDA="1", CUDA_HOME=str(tmp_path))
    assert done.returncode != 0 and "MEGATRON_REPLAY_CUDA=1 needs nvcc" in done.stderr
    done = build(tmp_path, MEGATRON_REPLAY_CUDA="yes")
    assert done.returncode != 0 and "MEGATRON_REPLAY_CUDA must be 0, 1 or unset, got 'yes'" in done.stderr
