"""Write docs/flags.md from the parser of examples/pretrain_replay_grpo.py; --check says whether it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_replay.arguments import build_parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "flags.md"
HEAD = """# Flags

Every flag of `examples/pretrain_replay_grpo.py`. Names are Megatron-LM's where it has them. Flags may stand in a file,
one or more a line, `#` begins a comment: `@FILE`; later flags win. `python tools/flags_page.py` writes this page.
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the page differs")
    args = parser.parse_args(argv)
    page = text()
    if not args.check:
        PAGE.write_text(page)
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    print(f"{PAGE} is not what the parser says: run tools/flags_page.py", file=sys.stderr)
    return 1


def text() -> str:
    lines = [HEAD]
    for group in build_parser()._action_groups:
        actions = [a for a in group._group_actions if a.option_strings and a.dest != "help"]
        if not actions:
            continue
        lines += [f"## {(group.title or '').capitalize()}\n", "| flag | default | meaning |", "|---|---|---|"]
        lines += [f"| {_name(a)} | {_default(a)} | {(a.help or '').replace('|', '/')} |" for a in actions]
        lines.append("")
    return "\n".join(lines)


def _name(action: argparse.Action) -> str:
    values = ""
    if action.choices:
        values = " " + ", ".join(map(str, action.choices))
    elif action.nargs == "*":
        values = " ..."
    return f"`{action.option_strings[0]}`{values}"


def _default(action: argparse.Action) -> str:
    if action.required:
        return "required"
    if action.nargs == 0:
        return "off"
    return f"{action.default}" if action.default not in (None, (), "") else "-"


if __name__ == "__main__":
    sys.exit(main())
