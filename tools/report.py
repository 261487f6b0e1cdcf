"""Write one HTML page of a run, or of several beside each other.

    python tools/report.py runs/quickstart                      # runs/quickstart/report.html
    python tools/report.py runs/replay runs/plain --out two.html

A RUN is a run folder (`--run-dir`); of several, the differences are from the first. The page is one file that needs no
network. Exit code 2, with one line that names the folder, for one that holds no run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import Parser
from reporting.page import page
from reporting.run_folder import ROLLOUTS_SHOWN, RunError, read_run

MOST_RUNS = 6  # colours that can be told apart


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="report.py", description="One HTML page of a run, or of several beside each other.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder; differences are from the first")
    parser.add_argument(
        "--out",
        type=Path,
        help="the page; by default report.html, of several runs comparison.html, in the first RUN",
    )
    args = parser.parse_args(argv)
    folders: list[Path] = args.runs
    if len(folders) > MOST_RUNS:
        parser.error(f"RUN must be given at most {MOST_RUNS} times, got {len(folders)}")
    twice = [f for i, f in enumerate(folders) if f.resolve() in [g.resolve() for g in folders[:i]]]
    if twice:
        parser.error(f"RUN {twice[0]} is given twice")
    out: Path = args.out or folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    try:
        runs = [read_run(f, n, ROLLOUTS_SHOWN // len(folders)) for f, n in zip(folders, names(folders), strict=True)]
        text = page(runs)
        out.write_text(text, encoding="utf-8")
    except RunError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {out}: {error.strerror}" if error.filename == str(out) else str(error))
    for run in runs:
        for note in run.notes:
            print(f"{run.name}: {note}", file=sys.stderr)
    print(f"{out}: {len(text.encode()) / 1e6:.1f} MB")


def names(folders: Sequence[Path]) -> list[str]:
    """Names of the folders, with those of their parents where two are the same."""
    short = [f.resolve().name for f in folders]
    return [n if short.count(n) == 1 else "/".join(f.resolve().parts[-2:]) for n, f in zip(short, folders, strict=True)]


if __name__ == "__main__":
    main()
