"""Make the quickstart's base model: a tiny Qwen3 that sorts five digits about one time in eight.

    python examples/quickstart/make_checkpoint.py [--out DIR] [--seed 0] [--target 0.12]

Next-token training on the answers of the task's training split, stopped when sampled accuracy on held-out problems
first reaches --target: good enough that groups of eight hold a right answer, and far from solved.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import sentencepiece
import torch
import torch.nn.functional as F
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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
    parser.add_argument("--max-steps", type=int, default=4000, help="updates after which not to reach --target is an error")
    args = parser.parse_args()
    if not ACCEPTED[0] <= args.target <= ACCEPTED[1]:
        parser.error(f"--target must be in [{ACCEPTED[0]}, {ACCEPTED[1]}], got {args.target}")

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizers(args.out)
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(args.out / "tokenizer.model"))
    train, heldout = SortDigits(split="train", seed=args.seed), SortDigits(split="heldout", seed=args.seed)
    model = Qwen3ForCausalLM(model_config())
    steps = fit(model, tokenizer, train, heldout, args)
    measured = accuracy(model, tokenizer, heldout, range(heldout.size - 4096, heldout.size), args.seed + 1)
    if not ACCEPTED[0] <= measured <= ACCEPTED[1]:
        sys.exit(f"--target {args.target} gave an accuracy of {measured:.3f}, outside {ACCEPTED}: try another --seed")

    model.generation_config = GenerationConfig(
        do_sample=True, temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=RESPONSE,
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model.save_pretrained(args.out)
    provenance = {
        "made_by": "examples/quickstart/make_checkpoint.py",
        "settings": {k: v for k, v in vars(args).items() if k != "out"},
        "steps": steps,
        "problems_seen": steps * args.batch_size,
        "sampled_heldout_accuracy": round(measured, 4),
        "measured_on": "one sample at temperature 1 of each of 4096 held-out problems",
        "versions": {x: version(x) for x in ("torch", "transformers", "tokenizers", "sentencepiece", "safetensors")},
    }
    (args.out / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
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
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        # pieces are numbered by falling frequency: "0" is in every line, "=" in one
        text.write_text("\n".join(alphabet[: n + 1] for n in range(len(alphabet))))
        sentencepiece.SentencePieceTrainer.train(
            input=str(text), model_prefix=str(Path(folder, "tokenizer")), model_type="char", vocab_size=len(PIECES),
            character_coverage=1.0, add_dummy_prefix=False, remove_extra_whitespaces=False,
            normalization_rule_name="identity", minloglevel=2,
            pad_id=PAD, unk_id=UNK, bos_id=BOS, eos_id=EOS, unk_surface=PIECES[UNK],
        )  # fmt: skip
        model = Path(folder, "tokenizer.model").read_bytes()
    (out / "tokenizer.model").write_bytes(model)

    twin = FastTokenizer(models.BPE(vocab={p: i for i, p in enumerate(PIECES)}, merges=[], unk_token=PIECES[UNK], fuse_unk=True))  # noqa: E501
    twin.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=twin, pad_token=PIECES[PAD], bos_token=PIECES[BOS], eos_token=PIECES[EOS]
    )
    fast.save_pretrained(out)


def fit(model: Qwen3ForCausalLM, tokenizer: Tokenizer, train: SortDigits, heldout: SortDigits, args: argparse.Namespace) -> int:
    """Train until the target; returns the number of updates."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)
    for step in range(1, args.max_steps + 1):
        first = (step - 1) * args.batch_size
        tokens = encode(tokenizer, train, range(first, first + args.batch_size))  # [B, prompt + response]
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
