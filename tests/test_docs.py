"""The pages say what the program does: flags exist, links lead somewhere, and the flags page is the parser's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_replay.arguments import build_parser
from tests.launch import ROOT
from tools import flags_page

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
TRAINER_FLAGS = {option for action in build_parser()._actions for option in action.option_strings}
LINK = re.compile(r"\]\(([^)#]+)(#[^)]*)?\)")


def names(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_flags_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert flags_page.main(["--check"]) == 0
    monkeypatch.setattr(flags_page, "PAGE", tmp_path / "flags.md")
    assert flags_page.main(["--check"]) == 1
    flags_page.main([])
    assert flags_page.main(["--check"]) == 0
    assert TRAINER_FLAGS - {"-h", "--help"} == set(re.findall(r"^\| `(--[a-z0-9-]+)`", flags_page.text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_links_lead_to_files(page: Path) -> None:
    for target, _ in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_flags_of_the_trainer_exist(page: Path) -> None:
    """Those that only the trainer can mean: --rl-*, --grpo-*."""
    for flag in re.findall(r"(?<![\w-])--(?:rl|grpo)-[a-z0-9-]+", page.read_text()):
        assert flag.rstrip("-") in TRAINER_FLAGS or any(f.startswith(flag.rstrip("-")) for f in TRAINER_FLAGS), flag


def test_the_readmes_table_of_features_is_the_pages() -> None:
    def verdicts(page: Path) -> list[list[str]]:
        """Of the other projects, row by row, behind the column of our own."""
        lines = page.read_text().splitlines()
        start = next(i for i, line in enumerate(lines) if "| TRL | verl |" in line)
        table = lines[start : lines.index("", start)]
        return [line.strip("| ").split(" | ")[2:] if i > 1 else [] for i, line in enumerate(table)]

    assert len(verdicts(ROOT / "docs" / "features.md")) == 13
    assert verdicts(ROOT / "README.md") == verdicts(ROOT / "docs" / "features.md")
