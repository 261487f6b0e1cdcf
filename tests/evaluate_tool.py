"""tools/evaluate.py in this process, for tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch import ROOT

TOOL = ROOT / "tools" / "evaluate.py"
FLAGS = ROOT / "examples" / "quickstart" / "flags.txt"
HELDOUT = ["--benchmark", "heldout=task:sort-digits"]


def flags(*more: object, tp: int = 1, pp: int = 1) -> list[str]:
    layout = ["--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp]
    return [f"@{FLAGS}", *map(str, (*layout, *more))]


def load_tool() -> ModuleType:
    sys.path.insert(0, str(TOOL.parent))
    spec = importlib.util.spec_from_file_location("evaluate", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(TOOL.parent))
    return module


def message(tool: ModuleType, capsys: pytest.CaptureFixture[str], out: Path, *more: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        tool.main([*flags("--out", out, *more)])
    assert ended.value.code == 2
    return capsys.readouterr().err
