from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.cuda_emulation.toolchain import MODES, Toolchain, obstacle


@pytest.fixture(scope="session")
def toolchain(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    if (why := obstacle()) is not None:
        pytest.skip(why)
    return Toolchain(tmp_path_factory.mktemp("cuda_emulation"))


@pytest.fixture(scope="session")
def require(toolchain: Toolchain) -> Callable[[str], None]:
    """Skips a test of a mode that does not work here."""

    def skip_without(mode: str) -> None:
        if (why := toolchain.obstacle(MODES[mode])) is not None:
            pytest.skip(why)

    return skip_without
