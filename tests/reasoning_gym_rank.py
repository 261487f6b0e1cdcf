"""One of two ranks of a replica: problems of Reasoning Gym, and rewards of texts that upset its scoring, to a file."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.rollout import Completion, Prompt
from megatron_replay.tasks.grader_pool import GraderOptions
from megatron_replay.tasks.prompts import PromptSource
from megatron_replay.tasks.reward import Graders, Reward
from megatron_replay.tasks.task import build_task

# the order of a set shows in their problems
SETS = ("isomorphic_strings", "ransom_note", "knight_swap", "polynomial_multiplication", "word_ladder")
# draws from a generator that everybody shares, in problem 7
SHARED = ("list_functions", 7)
RIGHT = "(the right answer)"
PLANT = '__import__("os").environ.__setitem__("PLANTED", "1") or [1]'
TEXTS = {
    "spiral_matrix": (RIGHT, PLANT, "exit(0)", '__import__("os")._exit(0)', RIGHT),
    "prime_factorization": (RIGHT, "The answer is 7"),
    "boxnet": ("[1]", "1", "nonsense", "{}"),
    "coin_flip": (RIGHT, "1e999", "nan", "x"),
    "game_of_life": (RIGHT, "1", "[1]", "{}", "[[1]]", "null"),
    "countdown": (RIGHT, "9**9**9**9"),
}
TIMEOUT = 8.0


class Texts:
    """A tokenizer whose ids are places in a list of texts."""

    eos_id = 0
    vocab_size = 256

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str) -> list[int]:
        self.texts.append(text)
        return [len(self.texts) - 1]

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self.texts[i] for i in ids)


def main(rank: int, store: str, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = DataParallelGroup(None, device=torch.device("cpu"))
    ranks = EngineRanks.build(alone, dist.group.WORLD, torch.device("cpu"))
    found = {"problems": {}, "rewards": {}, "counters": {}}
    for name in SETS:
        task = build_task(f"reasoning-gym:{name}", split="train", seed=3)
        found["problems"][name] = [(task.problem(i).prompt, task.problem(i).answer) for i in (0, 1)]
        if name == SETS[0]:
            found["identity"] = PromptSource(task, Texts(), seed=3, max_prompt_length=9).identity
    name, index = SHARED
    task = build_task(f"reasoning-gym:{name}", split="train", seed=3)
    # the ranks come to it by other ways
    for i in range(rank):
        task.problem(i)
    found["problems"][name] = task.problem(index).prompt
    graders = Graders(GraderOptions("exact", workers=1, timeout=TIMEOUT), os.environ, ranks)
    for name, texts in TEXTS.items():
        task, tokenizer = build_task(f"reasoning-gym:{name}", split="heldout", seed=3), Texts()
        reward = Reward(task, tokenizer, graders)
        asked = []
        for text in texts:
            tokens = tuple(tokenizer.encode(task.problem(0).answer if text == RIGHT else text))
            asked.append(Completion(Prompt((1,), 0, 0), 0, tokens, (0.0,), "length", 0))
        found["rewards"][name], found["counters"][name] = reward(asked), reward.counters()
    found["planted"] = "PLANTED" in os.environ
    graders.close()
    out.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
