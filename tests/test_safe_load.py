"""A checkpoint that somebody else wrote runs nothing here."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from megatron_replay.trainer.safe_load import WEIGHTS_ONLY, nothing_is_run


class Harm:
    """Pickled it is a call."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call = (call, args)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda at: Harm(os.system, f"touch {at}"), "it names posix.system"),
        (lambda at: Harm(eval, f"open({str(at)!r}, 'w')"), "it names builtins.eval"),
        (lambda at: Harm(torch.load, str(at)), "it names torch.serialization.load"),
        (lambda at: Metadata(state_dict_metadata={"x": Harm(os.mkdir, str(at))}), "it names posix.mkdir"),
    ],
)
def test_an_index_that_names_more_than_an_index_does_is_refused(tmp_path: Path, harm: Any, words: str) -> None:
    touched = tmp_path / "touched"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(harm(touched)))
    refused = pytest.raises(ValueError, match=rf"--load .*\.metadata is no index of tensors: .*{words}")
    with refused, nothing_is_run(tmp_path):
        raise AssertionError("not reached")
    assert not touched.exists()


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps({})[:-3]])
def test_a_damaged_index_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(ValueError, match=r"--load .*\.metadata is no index of tensors"), nothing_is_run(tmp_path):
        raise AssertionError("not reached")


def test_objects_in_the_shards_are_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(state_dict_metadata={})))
    touched = tmp_path / "touched"
    shard = io.BytesIO()
    torch.save({"extra_state": Harm(os.mkdir, str(touched))}, shard)
    for before in (None, "0"):
        monkeypatch.delenv(WEIGHTS_ONLY, raising=False)
        if before is not None:
            monkeypatch.setenv(WEIGHTS_ONLY, before)
        shard.seek(0)
        with nothing_is_run(tmp_path), pytest.raises(pickle.UnpicklingError, match="Weights only"):
            torch.load(shard, weights_only=False)
        assert os.environ.get(WEIGHTS_ONLY) == before and not touched.exists()
