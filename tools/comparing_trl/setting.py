"""Setting: what one run of the comparison trains, in words that both programs can be told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_replay.tasks.prompts import PromptSource
from megatron_replay.tasks.sort_digits import DIGITS, SortDigits
from megatron_replay.tokenizer import SentencePieceTokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "quickstart" / "model"
RESPONSE = DIGITS + 1  # tokens, the final EOS included
PROMPT = DIGITS + 1
# arm -> what it is
ARMS = {
    "ours": "this project, replay ratio 0.5",
    "ours_grpo": "this project without replay",
    "trl": "TRL's GRPOTrainer",
    "trl_replay": "TRL's experimental GRPOWithReplayBufferTrainer",
}
# of both: no decay of weights; the rate falls to 0 in a line
ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "clip_grad": 1.0}
CLIP_LOW, CLIP_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Setting:
    """`folder` gets the trained weights; `warmup` steps are not measured."""

    arm: str
    seed: int
    lr: float
    steps: int
    warmup: int
    prompts: int  # a step
    group_size: int
    threads: int
    folder: str

    @classmethod
    def read(cls, path: str) -> Setting:
        return cls(**json.loads(Path(path).read_text()))

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)) + "\n")

    @property
    def rollouts(self) -> int:
        """Sampled in a step."""
        return self.prompts * self.group_size

    @property
    def weights(self) -> Path:
        """A Hugging Face folder."""
        return Path(self.folder, "weights")

    def task(self) -> SortDigits:
        return SortDigits(split="train", seed=self.seed)

    def prompt_source(self) -> PromptSource:
        """The prompts of the run, in the order in which this project's own entry takes them."""
        tokenizer = SentencePieceTokenizer(str(MODEL / "tokenizer.model"))
        return PromptSource(self.task(), tokenizer, seed=self.seed, max_prompt_length=PROMPT)
