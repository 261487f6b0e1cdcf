"""KV-cached sampling on the training model itself, under any TP x PP.

The random number of a token is philox(seed, uid, position), so what is drawn does not depend on the batch,
the step or the layout. The vocabulary stays sharded: each rank finds its part of the cumulative probability.

Dims: B rows of a generation batch, V vocabulary, Vp its shard, L longest row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.utils import InferenceMode
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.utils import set_model_to_sequence_parallel
from torch import Tensor

from megatron_replay.config import SamplingConfig
from megatron_replay.ops.linear_grpo_loss import head_logits
from megatron_replay.ops.philox import STREAM_SAMPLING, uniform
from megatron_replay.trainer.model import head_weight
from megatron_replay.trainer.parallel import ParallelGroups


class ModelSampler:
    """Samples responses from a GPTModel that is otherwise being trained."""

    def __init__(
        self,
        model: GPTModel,
        groups: ParallelGroups,
        *,
        vocab_size: int,
        max_sequence_length: int,
        batch_size: int,
        logits_dtype: torch.dtype | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"--rl-generation-batch-size must be at least 1, got {batch_size}")
        self.model = model
        self.groups = groups
        self.vocab_size = vocab_size
        self.max_sequence_length = max_sequence_length
        self.batch_size = batch_size
        self.logits_dtype = logits_dtype  # None: that of the weights

    def __call__(
        self, prompts: Sequence[Sequence[int]], uids: Sequence[int], sampling: SamplingConfig, eos_id: int
    ) -> list[tuple[list[int], list[float]]]:
        """Response tokens (EOS included where it was drawn) and their log-probs, in the order of `prompts`.

        Log-probs are those of softmax(logits / temperature), on the kept tokens under top-p or top-k.
        """
        results: list[tuple[list[int], list[float]]] = [([], [])] * len(prompts)
        by_length = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        with inference(self.model):
            for at in range(0, len(by_length), self.batch_size):
                rows = by_length[at : at + self.batch_size]
                batch = self._generate([prompts[i] for i in rows], [uids[i] for i in rows], sampling, eos_id)
                for i, result in zip(rows, batch, strict=True):
                    results[i] = result
        return results

    def _generate(
        self, prompts: list[Sequence[int]], uids: list[int], sampling: SamplingConfig, eos_id: int
    ) -> list[tuple[list[int], list[float]]]:
        device = self.groups.device
        b = len(prompts)
        lengths = torch.tensor([len(p) for p in prompts])
        prompt_lengths = lengths.to(device)
        shortest, longest = len(prompts[0]), max(map(len, prompts))
        total = longest + sampling.max_response_length
        if total > self.max_sequence_length:
            raise ValueError(
                f"--seq-length must hold the longest prompt and --rl-max-response-length "
                f"{sampling.max_response_length}, got {self.max_sequence_length} for a prompt of {longest} tokens"
            )
        tokens = torch.full((b, total), eos_id, dtype=torch.int64, device=device)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
        logprobs = torch.zeros(b, total, device=device)
        ends = prompt_lengths + sampling.max_response_length  # one past each row's last token
        done = torch.zeros(b, dtype=torch.bool, device=device)
        uid = torch.tensor(uids, dtype=torch.int64)
        # equal prompts are read once: by the first of their rows, which [B] rows then continue
        first: dict[tuple[int, ...], int] = {}
        rows = torch.tensor([first.setdefault(tuple(prompt), row) for row, prompt in enumerate(prompts)], device=device)
        reads, continued = torch.unique(rows, return_inverse=True)

        context = StaticInferenceContext(b, total)
        wrapper = ShardedLogitsWrapper(self.model, context)
        wrapper.logits_dtype = self.logits_dtype
        wrapper.prep_model_for_inference()
        start, end = 0, shortest
        while True:
            read = tokens[reads, start:end] if start == 0 else tokens[:, start:end]
            position_ids = torch.arange(start, end, device=device)[None].expand(len(read), -1)
            logits = wrapper.run_one_forward_step(
                {"tokens": read, "position_ids": position_ids, "attention_mask": None}
            )
            if start == 0 and len(reads) < b:
                logits = None if logits is None else logits[continued]
                for memory in itertools.chain.from_iterable(context.key_value_memory_dict.values()):
                    memory[:end] = memory[:end, continued]
            u = uniform(sampling.seed, STREAM_SAMPLING, uid, (end - lengths).clamp(min=0), 0).to(device)
            drawn, drawn_logprob = self._draw(logits, u, sampling)
            # rows whose prompt is longer read their own next token, so one batch holds unequal prompts
            sampling_now = (end >= prompt_lengths) & ~done
            tokens[:, end] = torch.where(sampling_now, drawn, tokens[:, end])
            logprobs[:, end] = torch.where(sampling_now, drawn_logprob, 0.0)
            stopped = sampling_now & (drawn == eos_id)
            ends = torch.where(stopped, end + 1, ends)
            done |= stopped | (sampling_now & (ends == end + 1))
            if bool(done.all()):
                break
            start, end = end, end + 1
            context.enable_decode_mode()
        return [
            (tokens[i, n:e].tolist(), logprobs[i, n:e].tolist())
            for i, (n, e) in enumerate(zip(lengths.tolist(), ends.tolist(), strict=True))
        ]

    def _draw(self, logits: Tensor | None, u: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
        """(token [B] int64, log-prob [B] float32) on every rank; logits [B, Vp] exist on the last stage alone."""
        both = torch.zeros(2, u.numel(), dtype=torch.float64, device=u.device)
        if logits is not None:
            group = self.groups.tensor if self.groups.tensor_size > 1 else None
            both[0], both[1] = sample_tokens(
                logits,
                u,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                vocab_size=self.vocab_size,
                tp_group=group,
            )
        both = self.groups.from_last_stage(both)
        return both[0].long(), both[1].float()


def sample_tokens(
    logits: Tensor,
    u: Tensor,
    *,
    temperature: float,
    vocab_size: int,
    top_p: float = 1.0,
    top_k: int = 0,
    tp_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Inverse-CDF sampling over a sharded vocabulary.

    token = the first v with sum_{w <= v} p_w > u, p = softmax(logits / temperature); returns it and log p.

    logits [B, Vp] any float dtype, u [B] float64 in (0, 1) -> token [B] int64, log-prob [B] float64. Columns past
    `vocab_size` are never drawn. With top-p or top-k the shards are gathered, filtered and renormalised.
    """
    z = logits.float() / temperature
    if tp_group is not None and (top_p < 1 or top_k > 0):
        shards = [torch.empty_like(z) for _ in range(dist.get_world_size(tp_group))]
        dist.all_gather(shards, z.contiguous(), group=tp_group)
        z, tp_group = torch.cat(shards, 1), None
    rank, size = (0, 1) if tp_group is None else (dist.get_rank(tp_group), dist.get_world_size(tp_group))
    vp = z.size(1)
    start = rank * vp
    z = z.masked_fill(torch.arange(start, start + vp, device=z.device) >= vocab_size, -torch.inf)
    if top_p < 1 or top_k > 0:
        z = keep_likeliest(z, top_p, top_k)
    top = z.max(1).values
    if tp_group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=tp_group)
    cdf = (z - top[:, None]).exp().double().cumsum(1)  # [B, Vp], of this shard, not normalised
    mass = cdf[:, -1].contiguous()
    masses = [mass]
    if tp_group is not None:
        masses = [torch.empty_like(mass) for _ in range(size)]
        dist.all_gather(masses, mass, group=tp_group)
    bounds = torch.stack(masses, 1).cumsum(1)  # [B, TP]
    total = bounds[:, -1]
    goal = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    owner = torch.searchsorted(bounds, goal[:, None], right=True).squeeze(1)
    below = torch.cat([torch.zeros_like(bounds[:, :1]), bounds], 1)[:, rank]
    local = torch.minimum(goal - below, torch.nextafter(mass, torch.zeros_like(mass))).clamp(min=0)
    column = torch.searchsorted(cdf, local[:, None], right=True).clamp(max=vp - 1)
    mine = owner == rank
    found = torch.stack([(column.squeeze(1) + start).double(), z.gather(1, column).squeeze(1).double()])
    found = torch.where(mine, found, 0.0)
    if tp_group is not None:
        dist.all_reduce(found, group=tp_group)
    return found[0].long(), found[1] - top.double() - total.log()


def keep_likeliest(z: Tensor, top_p: float, top_k: int) -> Tensor:
    """z [B, V] with -inf outside the top_k largest and outside the smallest set whose probability reaches top_p."""
    ordered, order = z.sort(1, descending=True)
    dropped = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k > 0:
        dropped[:, top_k:] = True
    if top_p < 1:
        p = ordered.masked_fill(dropped, -torch.inf).softmax(1)
        dropped |= p.cumsum(1) - p >= top_p
    return z.masked_fill(torch.zeros_like(dropped).scatter(1, order, dropped), -torch.inf)


class ShardedLogitsWrapper(GPTInferenceWrapper):
    """Megatron's inference wrapper, returning the last position's logits shard [B, Vp] instead of a full gather."""

    logits_dtype: torch.dtype | None = None
    _logits: Tensor | None = None  # of the last stage's last pass

    def forward_pass_with_pipeline_parallel(
        self, inference_input: dict[str, Any], recv_buffer_seq_len: int | None = None
    ) -> Tensor | None:
        """Logits of `logits_dtype` on the last stage, None on others."""
        super().forward_pass_with_pipeline_parallel(inference_input, recv_buffer_seq_len)
        # Megatron returns them in the dtype of the weights
        logits, self._logits = self._logits, None
        return logits

    def _forward(self, inference_input: dict[str, Any]) -> Tensor:
        out: Tensor = self.model(
            inference_input["tokens"],
            inference_input["position_ids"],
            inference_input["attention_mask"],
            inference_context=self.inference_context,
            runtime_gather_output=True,
            output_processor=self._last_logits,
        )
        return out

    def _last_logits(
        self, *, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any
    ) -> Tensor:
        weight = head_weight(output_layer, output_weight)
        self._logits = head_logits(hidden_states[-1], weight, self.logits_dtype or weight.dtype)
        return self._logits


@contextmanager
def inference(model: GPTModel) -> Iterator[None]:
    """Inference mode: no gradients, evaluation mode, and sequence parallelism off (one token cannot be split)."""
    was_training, sequence_parallel = model.training, model.config.sequence_parallel
    if sequence_parallel:
        set_model_to_sequence_parallel(model, False)
    try:
        with torch.inference_mode(), InferenceMode.active():
            yield
    finally:
        model.train(was_training)
        if sequence_parallel:
            set_model_to_sequence_parallel(model, True)
