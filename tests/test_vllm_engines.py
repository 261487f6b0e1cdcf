"""Both vLLM engines as the loop uses them, on the real vLLM: whole weights or an error, whole groups or another try."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.child_process import free_port
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.require_api_key import KEY_VARIABLE
from megatron_replay.engines.vllm_child import VllmChild
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.engines.vllm_colocated import VllmColocatedEngine, replica_devices
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.engines.vllm_options import PINNED_VLLM, ServedModel
from megatron_replay.engines.vllm_server import VllmServerEngine, server_devices
from megatron_replay.rollout import Completion, Prompt
from megatron_replay.weight_sync import sender as sender_module
from megatron_replay.weight_sync import transfer_plan
from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.hf_mapping import megatron_names, to_megatron
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sender import WeightSender
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from tests.hf_models import CASES, load, logprobs, random_model
from tests.stub_server import StubServer
from tests.transfers import CPU, KeepingEngine
from tests.transfers import shape as transfers_shape
from tests.vllm_greedy import ENGINE_SIZES, PARAMS, Answers, answers, check_same, llm_options
from tests.vllm_greedy import prompts as greedy_prompts

real_engine = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
VOCAB, EOS, GROUP, TEMPERATURE = 61, 1, 4, 0.8
CONFIG = VllmConfig(
    max_num_seqs=16, memory_gib=0.1, startup_timeout=400, sync_timeout=30, request_timeout=120, retries=2, bucket_mib=1
)


class FolderPolicy:
    """A policy on one rank that holds the weights of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self.parameters: dict[str, torch.Tensor] = {}
        self.become(folder)

    def become(self, folder: Path) -> None:
        shape, tensors = ModelShape.from_folder(folder), load_file(folder / "model.safetensors")
        names = [n for n in megatron_names(shape) if n != "output_layer.weight" or not shape.tied_embeddings]
        padded = shape.padded_vocab_size(8, 1)
        self.parameters |= {n: to_megatron(n, tensors.__getitem__, shape, padded_vocab=padded) for n in names}

    def sharded_weights(self, shape: ModelShape) -> ShardedWeights:
        return ShardedWeights(shape, shape.padded_vocab_size(8, 1), self.parameters)


def engine(kind: type[VllmEngine], folder: Path, logs: Path, response: int = 12, **changes: Any) -> Any:
    sampling = SamplingConfig(max_response_length=response, temperature=TEMPERATURE, seed=5)
    served = ServedModel(folder, "float32", max_model_len=96, seed=0, device="cpu")
    config = VllmConfig(**(vars(CONFIG) | changes))
    ranks = EngineRanks(DataParallelGroup(), None, CPU)
    return kind(config, sampling, EOS, served, ModelShape.from_folder(folder), ranks, log_folder=logs)


def prompts(first: int, count: int = 6) -> list[Prompt]:
    g = torch.Generator().manual_seed(first)
    return [Prompt(tuple(torch.randint(2, VOCAB, (9,), generator=g).tolist()), first + i, i) for i in range(count)]


def check(completions: Sequence[Completion], models: dict[int, Any], asked: Sequence[Prompt]) -> None:
    """All there, in order, with the log-probs that transformers gives under the weights of their version."""
    assert [c.uid for c in completions] == [p.uid(i, GROUP) for p in asked for i in range(GROUP)]
    for c in completions:
        want = logprobs(models[c.weight_version], list(c.prompt.tokens), list(c.tokens), TEMPERATURE)
        assert (torch.tensor(c.logprobs) - want).abs().max() < 1e-4
        assert (c.finish_reason == "stop") == (c.tokens[-1] == EOS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, case, seed in (("m1", "qwen3-untied", 1), ("m2", "qwen3-untied", 2), ("qwen2", "qwen2-tied", 3),
                             ("llama", "llama-untied-scaled", 4)):  # fmt: skip
        made[name] = random_model(root / name, CASES[case], seed=seed, vocab_size=VOCAB, **ENGINE_SIZES)
    return made


def in_use(segment: str) -> bool:
    """Whether a living process has it mapped: tests of other files may run servers at the same time."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{segment}" in maps.read_text():
                return True
        except OSError:
            # it has ended meanwhile
            continue
    return False


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process of ours and no shared memory is left behind."""
    before = set(os.listdir("/dev/shm")), {p.pid for p in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 20
    while True:
        segments = {s for s in set(os.listdir("/dev/shm")) - before[0] if not in_use(s)}
        children = {p.pid for p in psutil.Process().children(recursive=True)} - before[1]
        if not segments and not children:
            return
        assert time.monotonic() < deadline, (segments, children)
        time.sleep(0.2)


def kill_server(of: VllmServerEngine) -> None:
    os.kill(of._servers[0].process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def server(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServerEngine]:
    made = engine(VllmServerEngine, models["m1"], tmp_path_factory.mktemp("server"))
    yield made
    made.close()


class TestServer:
    pytestmark = real_engine

    def test_samples_are_the_policys(self, server: VllmServerEngine, models: dict[str, Path]) -> None:
        policy = FolderPolicy(models["m1"])
        server.load_weights(policy, 0)
        asked = prompts(0)
        first = server.submit(asked, GROUP).result(0)
        check(first, {0: load(models["m1"])}, asked)
        assert len({c.tokens for c in first[:GROUP]}) > 1, "a group is not one answer"
        again = server.submit(asked, GROUP).result(0)
        assert [c.tokens for c in again] == [c.tokens for c in first], "seeds make a rerun the same"
        policy.become(models["m2"])
        server.load_weights(policy, 1)
        check(server.submit(asked, GROUP).result(1), {1: load(models["m2"])}, asked)
        found = server.metrics()
        assert found["engine/weight_version"] == 1 and found["engine/tokens"] > 0 < found["sync/seconds"]
        assert found["sync/bytes"] == sum(x.nbytes for x in policy.parameters.values())
        counted = {k: v for k, v in found.items() if k.startswith("engine/") and not k.endswith(("version", "tokens"))}
        assert counted and not any(counted.values()), counted

    def test_a_server_of_ours_refuses_whoever_has_no_key(
        self, server: VllmServerEngine, models: dict[str, Path]
    ) -> None:
        server.load_weights(FolderPolicy(models["m1"]), 5)
        stranger, process = VllmClient(server._servers[0].url), server._servers[0].process
        for call in (stranger.pause, stranger.transfer_status, lambda: stranger.update_weights({"version": 6})):
            with pytest.raises(EngineError, match=r"status 401 Unauthorized"):
                call()
        main = psutil.Process(process.pid)
        words = [word for p in (main, main.parent(), *main.children(recursive=True)) for word in p.cmdline()]
        assert words and not any(server._key in word for word in words)
        assert server._key not in process.log_path.read_text()

    def test_a_push_into_running_requests_mixes_nothing(
        self, models: dict[str, Path], server: VllmServerEngine
    ) -> None:
        policy = FolderPolicy(models["m2"])
        server.load_weights(policy, 10)
        server.sampling = SamplingConfig(max_response_length=80, temperature=TEMPERATURE, seed=5)
        server._pool.sampling = server.sampling
        server.metrics()
        asked = prompts(100, 24)
        running = server.submit(asked, GROUP)
        time.sleep(0.3)
        policy.become(models["m1"])
        server.load_weights(policy, 11)
        check(running.result(11), {10: load(models["m2"]), 11: load(models["m1"])}, asked)
        found = server.metrics()
        assert found["engine/aborted"] + found["engine/wrong_version"] > 0 and found["engine/retried"] > 0

    def test_another_model_is_refused_and_the_engine_goes_on(
        self, server: VllmServerEngine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = FolderPolicy(models["m1"])
        server.load_weights(policy, 20)
        missing = FolderPolicy(models["m1"])
        del missing.parameters["decoder.layers.2.self_attention.linear_qkv.weight"]
        wrong_shape, wrong_dtype = FolderPolicy(models["m1"]), FolderPolicy(models["m1"])
        wrong_shape.parameters["decoder.layers.1.mlp.linear_fc2.weight"] = torch.zeros(128, 90)
        wrong_dtype.parameters["decoder.final_layernorm.weight"] = torch.zeros(128, dtype=torch.bfloat16)
        for bad, words in (
            (missing, r"sends no model\.layers\.2\.self_attn\.k_proj\.weight, and 2 more are missing"),
            (wrong_shape, r"layers\.1\.mlp\.linear_fc2\.weight is \[128, 90\] in the trainer"),
            (wrong_dtype, r"final_layernorm\.weight is bfloat16 in the trainer and float32 in the engine"),
        ):
            server._sender = None
            with pytest.raises(PlanRefusedError, match=words):
                server.load_weights(bad, 21)
        for other, mode, words in (
            ({"rope_theta": 5e5}, "processed_logprobs", r"rope_theta must be 500000\.0, got 10000\.0"),
            ({"rms_norm_eps": 1e-3}, "processed_logprobs", r"rms_norm_eps must be 0\.001, got 1e-06"),
            ({}, "raw_logprobs", r"logprobs_mode must be raw_logprobs, got processed_logprobs"),
        ):
            server._sender = None
            with monkeypatch.context() as patch:
                patch.setattr(transfer_plan, "LOGPROBS_MODE", mode)
                patch.setattr(server, "shape", dataclasses.replace(server.shape, **other))
                with pytest.raises(PlanRefusedError, match=f"the engine's model is not the trainer's: {words}"):
                    server.load_weights(policy, 21)
        # an engine that took its part of a push that failed elsewhere is still good for the next one
        other = KeepingEngine(ModelShape.from_folder(models["m1"]), answers={"update": RuntimeError("no room")})
        both = WeightSender(
            policy.sharded_weights(other.of), transport="gloo", bucket_bytes=1 << 20, device=CPU, timeout=30
        )
        both.connect([server._servers[0].client, other])
        with pytest.raises(WeightSyncError, match=r"kept: no room"):
            both.push(21)
        server._sender = None
        server.load_weights(policy, 22)
        asked = prompts(200)
        check(server.submit(asked, GROUP).result(22), {22: load(models["m1"])}, asked)
        assert server.metrics()["engine/restarts"] == 0

    def test_an_error_has_the_servers_own_words(self, server: VllmServerEngine, models: dict[str, Path]) -> None:
        """One worker: where one of several raises, vLLM takes the others' answers for those to later calls."""
        policy = FolderPolicy(models["m1"])
        server.load_weights(policy, 25)
        client = server._servers[0].client
        with pytest.raises(EngineError, match=r"http://.*: POST /\w+: status 500 .*unexpected keyword argument 'a'"):
            client.init_weight_transfer({"a": 1})
        with pytest.raises(EngineError, match=r"status 500 .*start_weight_update must be called before"):
            client.update_weights({"a": 1})
        server._sender = None
        server.load_weights(policy, 26)

    def test_a_server_killed_while_it_samples_and_again_while_it_takes_weights(
        self, server: VllmServerEngine, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = FolderPolicy(models["m2"])
        server.load_weights(policy, 30)
        server.metrics()
        asked = prompts(300, 24)
        running = server.submit(asked, GROUP)
        kill_server(server)
        seal, kills = sender_module.seal, []

        def die_at_the_second_bucket(message: torch.Tensor, version: int, bucket: int) -> None:
            if bucket == 1 and not kills:
                kills.append(version)
                kill_server(server)
            seal(message, version, bucket)

        monkeypatch.setattr(sender_module, "seal", die_at_the_second_bucket)
        policy.become(models["m1"])
        check(running.result(31), {30: load(models["m2"]), 31: load(models["m1"])}, asked)
        found = server.metrics()
        assert kills == [31] and found["engine/restarts"] == 2 and found["engine/failed_syncs"] == 1
        assert found["engine/retried"] > 0 and server.weight_version == 31

    def test_a_users_server_that_takes_no_weights_is_left_out_until_it_is_started_again(
        self, server: VllmServerEngine, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy = FolderPolicy(models["m1"])
        server.load_weights(policy, 50)
        monkeypatch.setenv(KEY_VARIABLE, server._key)
        good, port = server._servers[0].url, free_port("127.0.0.1")
        bad = f"http://127.0.0.1:{port}"
        both = engine(VllmServerEngine, models["m1"], tmp_path, server_urls=(good, bad))
        asked = prompts(500)
        try:
            both.load_weights(policy, 51)
            assert both._urls == (good,)
            # what answers there now is healthy, of the right version, and knows no route of weight transfer
            pages = {"/health": "{}", "/version": json.dumps({"version": f"{PINNED_VLLM}.0"})}
            with StubServer(lambda number, body: (404, "{}"), port, pages):
                with pytest.warns(UserWarning, match=rf"{bad} is left out .* takes no weights: .*status 404"):
                    both.load_weights(policy, 52)
                assert both._urls == (good,) and both.metrics()["engine/failed_syncs"] == 2
                both.load_weights(policy, 53)
                assert both.metrics()["engine/failed_syncs"] == 0, "it is not tried again while it stays as it is"
            both.load_weights(policy, 54)
            assert both._servers[1].barred == ""
            check(both.submit(asked, GROUP).result(54), {54: load(models["m1"])}, asked)
        finally:
            both.close()
            server._sender, server.weight_version = None, -1

    def test_a_server_that_would_cut_samples_short_ends_the_run_at_once(
        self, server: VllmServerEngine, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.load_weights(FolderPolicy(models["m1"]), 60)
        monkeypatch.setenv(KEY_VARIABLE, server._key)
        longer = engine(VllmServerEngine, models["m1"], tmp_path, response=200, server_urls=(server._servers[0].url,))
        try:
            longer.load_weights(FolderPolicy(models["m1"]), 61)
            with pytest.raises(
                RuntimeError, match=r"no other attempt .* --rl-max-response-length 200 tokens, got 87: .*max-model-len"
            ):
                longer.submit(prompts(600), GROUP).result(61)
            assert longer.metrics()["engine/retried"] == 0
        finally:
            longer.close()
            server._sender, server.weight_version = None, -1

    def test_two_runs_on_one_host(
        self, server: VllmServerEngine, models: dict[str, Path], tmp_path: Path, nothing_left: None
    ) -> None:
        other = engine(VllmServerEngine, models["m2"], tmp_path)
        try:
            server.load_weights(FolderPolicy(models["m1"]), 40)
            server._sender = None
            server.load_weights(FolderPolicy(models["m1"]), 41)
            other.load_weights(FolderPolicy(models["m2"]), 7)
            assert server._urls != other._urls
            asked = prompts(400)
            mine, theirs = server.submit(asked, GROUP), other.submit(asked, GROUP)
            check(mine.result(41), {41: load(models["m1"])}, asked)
            check(theirs.result(7), {7: load(models["m2"])}, asked)
        finally:
            other.close()


class TestColocated:
    pytestmark = real_engine

    @pytest.mark.parametrize("name", ["qwen2", "llama"])
    def test_the_engine_samples_as_the_policy_and_survives_its_process(
        self, models: dict[str, Path], tmp_path: Path, name: str, nothing_left: None
    ) -> None:
        policy, model = FolderPolicy(models[name]), load(models[name])
        made = engine(VllmColocatedEngine, models[name], tmp_path)
        try:
            made.load_weights(policy, 0)
            asked = prompts(0)
            first = made.submit(asked, GROUP).result(0)
            check(first, {0: model}, asked)
            for parameter in policy.parameters.values():
                parameter.mul_(1.05)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            made.load_weights(policy, 1)
            check(made.submit(asked, GROUP).result(1), {1: model}, asked)
            if name == "llama":
                return
            os.kill(made._child._process.pid, signal.SIGKILL)
            check(made.submit(asked, GROUP).result(1), {1: model}, asked)
            found = made.metrics()
            assert (found["engine/restarts"], found["engine/server_failures"]) == (1, 1)
            assert found["engine/retried"] == len(asked)
        finally:
            made.close()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_engine_that_gets_its_own_weights_back_answers_as_before(
    models: dict[str, Path], tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways into vLLM: on a CPU it may pack float32 weights and take bfloat16 ones as they are. And what it keeps
    of prompts: of other weights it must go, which the last push shows by leaving it."""
    child = VllmChild(llm_options(models["m2"], dtype), tmp_path / "log", timeout=60, startup_timeout=400)
    shape = ModelShape.from_folder(models["m2"])
    versions = iter(range(9))

    def push(name: str, **head: bool) -> None:
        held = {n: x.to(getattr(torch, dtype)) for n, x in FolderPolicy(models[name]).parameters.items()}
        weights = ShardedWeights(shape, shape.padded_vocab_size(8, 1), held)
        sender = WeightSender(weights, transport="shared-memory", bucket_bytes=99_999, device=CPU, timeout=60, **head)
        sender.connect([child])
        sender.push(next(versions))
        sender.close()

    def ask() -> Answers:
        asked = greedy_prompts(VOCAB)
        return answers(child.generate(asked, [PARAMS] * len(asked)))

    try:
        fresh = ask()
        if dtype == "bfloat16":
            with pytest.raises(PlanRefusedError, match=r"head_dtype must be float32, got bfloat16"):
                push("m2", fp32_lm_head=True)
        push("m1")
        # whatever the push did: the answers of m1, and then its prompts in the cache
        assert child.reset_prefix_cache()
        other = ask()
        assert all(a["tokens"] != b["tokens"] for a, b in zip(other, fresh, strict=True))
        push("m2")
        check_same(ask(), fresh, 0.0)
        monkeypatch.setattr(child, "reset_prefix_cache", lambda: True, raising=False)
        push("m1")
        stale = ask()
        assert all(abs(s["logprobs"][0] - o["logprobs"][0]) > 1e-3 for s, o in zip(stale, other, strict=True))
    finally:
        child.close()


@pytest.mark.parametrize(
    ("kind", "transport", "words"),
    [
        (VllmServerEngine, "nccl", r"--rl-vllm-transport nccl needs GPUs; auto is gloo here"),
        (VllmColocatedEngine, "cuda-ipc", r"--rl-vllm-transport cuda-ipc needs GPUs; auto is shared-memory here"),
        (VllmColocatedEngine, "nccl", r"--rl-vllm-transport nccl needs GPUs"),
    ],
)
def test_a_transport_that_cannot_work_is_refused(
    models: dict[str, Path], tmp_path: Path, kind: type[VllmEngine], transport: str, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        engine(kind, models["m1"], tmp_path, transport=transport)
    assert engine(kind, models["m1"], tmp_path).transport == kind.AUTO["cpu"]


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_a_colocated_engine_could_not_read_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    ranks = EngineRanks(DataParallelGroup(), None, torch.device("cuda"))
    served = ServedModel(tmp_path, "float32", max_model_len=96, seed=0, device="cuda")
    given = (CONFIG, SamplingConfig(), EOS, served, transfers_shape(), ranks)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert VllmColocatedEngine(*given, log_folder=tmp_path).transport == "cuda-ipc"
    monkeypatch.setenv(variable, "expandable_segments:True")
    with pytest.raises(ValueError, match=r"expandable_segments .*, got 'expandable_segments:True'"):
        VllmColocatedEngine(*given, log_folder=tmp_path)
    # weights for a server do not travel through shared memory of a GPU
    assert VllmServerEngine(*given, log_folder=tmp_path).transport == "nccl"


def test_devices_of_spawned_servers_lie_behind_those_that_train(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert server_devices(0, 1, CPU) == {}
    assert server_devices(1, 1, cuda) == {"CUDA_VISIBLE_DEVICES": "3"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,4,6")
    assert server_devices(0, 2, cuda) == {"CUDA_VISIBLE_DEVICES": "4,6"}
    with pytest.raises(ValueError, match=r"--rl-vllm-servers and .* need GPUs 4 to 5 .* got 4 GPUs"):
        server_devices(1, 2, cuda)


def test_devices_of_a_colocated_engine_are_its_replicas() -> None:
    assert replica_devices([("a", "3"), ("a", "1")], 1) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    with pytest.raises(ValueError, match=r"--rl-vllm-tensor-parallel-size must be at most the 1 ranks .*, got 2"):
        replica_devices([("a", "0")], 2)
    with pytest.raises(ValueError, match=r"--rl-engine vllm-colocated needs each replica on one node, got one on a, b"):
        replica_devices([("a", "0"), ("b", "0")], 1)
