"""Builds megatron_replay._C: g++ alone, with a CUDA object where nvcc is found.

MEGATRON_REPLAY_CUDA=0 never builds it, =1 demands it; MEGATRON_REPLAY_CUDA_ARCHS lists compute capabilities
("80;90;100", where a number may end in a or f). Every build starts anew, so a switch always takes effect.
No torch headers: torch's CUDAExtension refuses a CPU build of torch. cudart is linked statically, so the
module imports on a machine without a driver.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def architectures() -> list[str]:
    """Compute capabilities to compile for, lowest first. Ends the build where the list is malformed."""
    wanted = os.environ.get("MEGATRON_REPLAY_CUDA_ARCHS", "80;90;100")
    if not re.fullmatch(r"\d{2,3}[af]?(;\d{2,3}[af]?)*", wanted):
        raise SystemExit(f'MEGATRON_REPLAY_CUDA_ARCHS must be numbers like "80;90;100", got {wanted!r}')
    return sorted(set(wanted.split(";")), key=lambda arch: (int(arch.rstrip("af")), arch))


def find_nvcc() -> str | None:
    """The compiler, or None for a build without CUDA. Ends the build where one was demanded and there is none."""
    wanted = os.environ.get("MEGATRON_REPLAY_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise SystemExit(f"MEGATRON_REPLAY_CUDA must be 0, 1 or unset, got {wanted!r}")
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=str(Path(home, "bin"))) if home else shutil.which("nvcc")
    if wanted == "1" and nvcc is None:
        raise SystemExit(f"MEGATRON_REPLAY_CUDA=1 needs nvcc, and none is in {home or 'PATH'}")
    return nvcc


def cudart_folder(nvcc: str) -> Path:
    """The folder of libcudart_static.a that belongs to this nvcc."""
    said = subprocess.run([nvcc, "--dryrun", "x.cu"], capture_output=True, text=True, check=False).stderr
    named = re.search(r"TOP=(.+)", said)
    if named is None:
        raise SystemExit(f"{nvcc} --dryrun does not name its toolkit (TOP=), it says {said.strip()!r}")
    top = Path(named[1].strip()).resolve()
    for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
        if (top / folder / "libcudart_static.a").exists():
            return top / folder
    raise SystemExit(f"no libcudart_static.a under {top}, beside {nvcc}")


def cuda_command(nvcc: str, archs: list[str]) -> list[str]:
    """The compiler with its flags, for each architecture, and as PTX for later ones; takes -c SOURCE -o OBJECT."""
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    newest = archs[-1].rstrip("af")  # PTX with a suffix would run on that architecture alone
    codes.append(f"-gencode=arch=compute_{newest},code=compute_{newest}")
    # no fused multiply-add: keys have the same bits on every device (csrc/portable_log.h)
    flags = ["-O3", "-std=c++17", "-fmad=false", "-lineinfo"]
    define = f'-DMR_CUDA_ARCHS="{";".join(archs)}"'
    return [nvcc, *flags, "-Xcompiler", "-fPIC,-fvisibility=hidden", *codes, define, "-Icsrc"]


def compile_cuda(nvcc: str, folder: Path) -> list[str]:
    """Compile csrc/*.cu, side by side; returns the objects' paths."""
    folder.mkdir(parents=True, exist_ok=True)
    command = cuda_command(nvcc, architectures())
    started = []
    for source in sorted(ROOT.glob("csrc/*.cu")):
        target = folder / f"{source.stem}.o"
        whole = [*command, "-c", str(source.relative_to(ROOT)), "-o", str(target)]
        started.append((target, whole, subprocess.Popen(whole, cwd=ROOT)))
    failed = [(whole, status) for _, whole, process in started if (status := process.wait()) != 0]
    for whole, status in failed:
        switches = "MEGATRON_REPLAY_CUDA_ARCHS names other architectures, MEGATRON_REPLAY_CUDA=0 builds without"
        raise SystemExit(f"nvcc ended with {status}: {shlex.join(whole)}\n{switches}")
    return [str(target) for target, *_ in started]


class BuildExtension(build_ext):
    def finalize_options(self) -> None:
        super().finalize_options()
        # file times do not tell that a switch, or nvcc itself, has changed since the last build
        self.force = True

    def build_extension(self, ext: Extension) -> None:
        nvcc = find_nvcc()
        if nvcc is None:
            ext.sources.append("csrc/no_cuda.cpp")
        else:
            ext.extra_objects += compile_cuda(nvcc, Path(self.build_temp).resolve())
            ext.library_dirs.append(str(cudart_folder(nvcc)))
            ext.libraries += ["cudart_static", "rt", "pthread", "dl"]
        super().build_extension(ext)


# -ffp-contract=off: see -fmad=false above; -fno-trapping-math lets the compiler use vectors, and changes no result
CXX_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-trapping-math", "-fvisibility=hidden", "-Wall", "-Wextra"]

if __name__ == "__main__":
    setup(
        cmdclass={"build_ext": BuildExtension},
        ext_modules=[
            Extension(
                "megatron_replay._C",
                ["csrc/bindings.cpp", "csrc/priority_draw_cpu.cpp", "csrc/ragged_gather_cpu.cpp"],
                include_dirs=["csrc", pybind11.get_include()],
                depends=[str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("csrc/*"))],
                language="c++",
                extra_compile_args=[*CXX_FLAGS, "-pthread"],
                extra_link_args=["-pthread"],
            )
        ],
    )
