"""Megatron's optimizer and learning-rate schedule around one GPTModel stage."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module

from megatron_replay.config import OptimizerOptions
from megatron_replay.trainer.adam_state import mend_distributed_load


def wrap_for_training(
    model: GPTModel, options: OptimizerOptions
) -> tuple[DistributedDataParallel, MegatronOptimizer, OptimizerParamScheduler]:
    """DistributedDataParallel with summed float32 gradients, Adam, and the schedule counted in updates."""
    config = model.config
    if options.use_distributed_optimizer:
        mend_distributed_load()
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=options.use_distributed_optimizer,
            # it would end the run; the policy looks itself, and skips the update
            check_for_nan_in_grad=False,
        ),
        Float16Module(config, model) if config.bf16 else model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            use_distributed_optimizer=options.use_distributed_optimizer,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        ),
        [ddp],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters,
        lr_decay_steps=options.decay_updates,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.decay_updates,
        wd_incr_style="constant",
    )
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = _finalize_summed_grads
    return ddp, optimizer, scheduler


def unwrap(model: torch.nn.Module) -> GPTModel:
    """The GPTModel inside DistributedDataParallel and Float16Module."""
    inner: Any = model
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def _finalize_summed_grads(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **kwargs: object
) -> None:
    """finalize_model_grads without its division: the loss weights hold the global denominators already."""
    finalize_model_grads(model, None, **kwargs)
