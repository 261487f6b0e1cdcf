"""Memory of this process, as Linux alone tells it."""

from __future__ import annotations

import re
from pathlib import Path


def host_memory(field: str) -> int:
    """Bytes: VmHWM is the peak, VmRSS what is resident now.

    getrusage's ru_maxrss is no peak of this program: it begins with the memory of the process that started it.
    """
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
