"""Make the quickstart's base model: a tiny Qwen3 that sorts five digits about one time in eight.

    python examples/quickstart/make_checkpoint.py [--out DIR] [--seed 0] [--target 0.12]

Next-token training on the answers of the task's training split, stopped when sampled accuracy on held-out problems
first reaches --target: good enough that most groups of eight hold a right answer, and far from solved. A share of
the answers has its digits shuffled, so that the model trains longer before it gets there: 125 updates, not 65.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from megatron_replay.tasks.sort_digits import DIGITS, SortDigits
from megatron_replay.tokenizer import Tokenizer, build_tokenizer

PIECES = ("<pad>", "<unk>", "<s>", "</s>", *"0123456789=")  # an id is a position here
PAD, UNK, BOS, EOS = range(4)
ACCEPTED = (0.10, 0.18)  # measured accuracy of a base that may be saved
RESPONSE = DIGITS + 1  # tokens of an answer, EOS included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and samples")
    parser.add_argument("--target", type=float, default=0.12, help="sampled accuracy at which training stops")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW")
    parser.add_argument("--batch-size", type=int, default=128, help="problems of an update")
    parser.add_argument("--shuffled", type=float, default=0.65, help="share of training answers in random order")
    parser.add_argument("--max-steps", type=int, default=2000, help="updates after which the target must be reached")
    args = parser.parse_args()
    if not ACCEPTED[0] <= args.target <= ACCEPTED[1]:
        parser.error(f"--target must be in [{ACCEPTED[0]}, {ACCEPTED[1]}], got {args.target}")
    if not 0 <= args.shuffled < 1:
        parser.error(f"--shuffled must be in [0, 1), got {args.shuffled}")
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    logging.disable_progress_bar()
    # written elsewhere first: a run that misses the target leaves the old model as it was
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args)
        args.out.mkdir(parents=True, exist_ok=True)
        for path in sorted(Path(folder).iterdir()):
            shutil.copyfile(path, args.out / path.name)


def make(out: Path, args: argparse.Namespace) -> None:
    """Train the model and write every file of its folder to `out`."""
    save_tokenizers(out)
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(out / "tokenizer.model"))
    heldout = SortDigits(split="heldout", seed=args.seed)
    model = Qwen3ForCausalLM(model_config())
    steps = fit(model, tokenizer, heldout, args)
    measured = accuracy(model, tokenizer, heldout, range(heldout.size), args.seed + 1)
    if not ACCEPTED[0] <= measured <= ACCEPTED[1]:
        sys.exit(f"--target {args.target} gave an accuracy of {measured:.3f}, outside {ACCEPTED}: try another --seed")

    # every sampling option is written down: a reader of this file must not truncate by its own defaults
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=RESPONSE,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model.save_pretrained(out)
    provenance = {
        "made_by": "examples/quickstart/make_checkpoint.py",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "steps": steps,
        "problems_seen": steps * args.batch_size,
        "sampled_heldout_accuracy": round(measured, 4),
        "measured_on": f"one sample at temperature 1 of each of the {heldout.size} held-out problems",
        "versions": {x: version(x) for x in ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors")},
    }
    (out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
    print(f"{args.out}: {steps} steps, sampled held-out accuracy {measured:.4f}")


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=len(PIECES),
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # not hidden_size / heads, as in the Qwen3 models that people train
        intermediate_size=160,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="float32",
    )


def save_tokenizers(out: Path) -> None:
    """tokenizer.model, and its Hugging Face twin: one id for each character, the same ids."""
    alphabet = "".join(PIECES[4:])
    # pieces are numbered by falling frequency: "0" is in every line, "=" in one
    lines = [alphabet[: n + 1] for n in range(len(alphabet))]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="char", vocab_size=len(PIECES),
        character_coverage=1.0, add_dummy_prefix=False, remove_extra_whitespaces=False,
        normalization_rule_name="identity", minloglevel=2,
        pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS, unk_surface=PIECES[UNK],
    )  # fmt: skip
    (out / "tokenizer.model").write_bytes(model.getvalue())

    vocab = {piece: i for i, piece in enumerate(PIECES)}
    twin = FastTokenizer(models.BPE(vocab=vocab, merges=[], unk_token=PIECES[UNK], fuse_unk=True))
    twin.decoder = decoders.Fuse()
    # <unk> stays an ordinary piece here: as a special token it would vanish from decoded text
    special = {"pad_token": PIECES[PAD], "bos_token": PIECES[BOS], "eos_token": PIECES[EOS]}
    PreTrainedTokenizerFast(tokenizer_object=twin, **special).save_pretrained(out)


def fit(model: Qwen3ForCausalLM, tokenizer: Tokenizer, heldout: SortDigits, args: argparse.Namespace) -> int:
    """Train until the target; returns the number of updates."""
    task = SortDigits(split="train", seed=args.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(1, args.max_steps + 1):
        first = (step - 1) * args.batch_size
        tokens = encode(tokenizer, task, range(first, first + args.batch_size))
        tokens = shuffle_answers(tokens, args.shuffled, generator)
        logits = model(tokens[:, :-1]).logits[:, -RESPONSE:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, -RESPONSE:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 5 == 0:
            rate = accuracy(model, tokenizer, heldout, range(1000), args.seed + step)
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.3f}, sampled held-out accuracy {rate:.3f}", flush=True)
            if rate >= args.target:
                return step
    sys.exit(f"--target {args.target} was not reached in --max-steps {args.max_steps}")


def shuffle_answers(tokens: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """`tokens` [B, L] with the answer digits of about `share` of the rows in random order."""
    answers = tokens[:, -RESPONSE:-1]
    order = torch.rand(answers.shape, generator=generator).argsort(1)
    chosen = torch.rand(len(tokens), 1, generator=generator) < share
    mixed = torch.where(chosen, answers.gather(1, order), answers)
    return torch.cat([tokens[:, :-RESPONSE], mixed, tokens[:, -1:]], 1)


def encode(tokenizer: Tokenizer, task: SortDigits, indices: range) -> Tensor:
    """[B, prompt + answer + EOS] ids of problems; past the last one it starts again."""
    problems = [task.problem(i % task.size) for i in indices]
    return torch.tensor([[*tokenizer.encode(p.prompt + p.answer), EOS] for p in problems])


@torch.no_grad()
def accuracy(model: Qwen3ForCausalLM, tokenizer: Tokenizer, task: SortDigits, indices: range, seed: int) -> float:
    """Share of problems whose one sample at temperature 1 is the answer and EOS."""
    tokens = encode(tokenizer, task, indices)
    generator = torch.Generator().manual_seed(seed)
    cache, step = DynamicCache(), tokens[:, :-RESPONSE]
    drawn = []
    for _ in range(RESPONSE):
        logits = model(step, past_key_values=cache, use_cache=True).logits[:, -1]
        step = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        drawn.append(step)
    return (torch.cat(drawn, 1) == tokens[:, -RESPONSE:]).all(1).double().mean().item()


if __name__ == "__main__":
    main()
