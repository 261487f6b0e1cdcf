"""The policy network: a megatron-core GPTModel in the shape of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

from megatron_replay.config import ModelOptions, TransformerImpl
from megatron_replay.ops.checks import require_choice
from megatron_replay.trainer.attention import PackedSelfAttention, RMSNorm, SdpaCoreAttention
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.model_shape import ModelShape, layout_problems


def build_model(shape: ModelShape, options: ModelOptions, groups: ParallelGroups, max_sequence_length: int) -> GPTModel:
    """The GPTModel stage of this rank, weights not yet loaded."""
    _check_layout(shape, options, groups)
    impl = resolve_impl(options.transformer_impl, options.dtype)
    config = transformer_config(shape, options, groups, impl)
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, impl, groups.pipeline_rank),
        vocab_size=shape.padded_vocab_size(options.make_vocab_size_divisible_by, groups.tensor_size),
        max_sequence_length=max_sequence_length,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
        rope_scaling=shape.rope_scaling_factor is not None,
        rope_scaling_factor=shape.rope_scaling_factor or 1.0,
        share_embeddings_and_output_weights=shape.tied_embeddings,
    ).to(groups.device)


def transformer_config(
    shape: ModelShape, options: ModelOptions, groups: ParallelGroups, impl: str
) -> TransformerConfig:
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        normalization="RMSNorm",
        layernorm_epsilon=shape.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        perform_initialization=False,
        bf16=options.dtype == torch.bfloat16,
        params_dtype=options.dtype,
        pipeline_dtype=options.dtype,
        tensor_model_parallel_size=groups.tensor_size,
        pipeline_model_parallel_size=groups.pipeline_size,
        sequence_parallel=options.sequence_parallel and groups.tensor_size > 1,
        # the loss arrives divided by the global token count, so gradients are summed and never averaged
        calculate_per_token_loss=True,
        persist_layer_norm=False,
        apply_rope_fusion=impl == "transformer_engine",
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **(recompute if options.recompute_activations else {}),
    )


def resolve_impl(requested: str, dtype: torch.dtype) -> str:
    """`local` or `transformer_engine`; `auto` is Transformer Engine on CUDA where it is installed, but for float32.

    Of Transformer Engine's attention backends the flash and fused ones have no float32, and the unfused one is turned
    off for packs ("thd").
    """
    require_choice("--transformer-impl", requested, get_args(TransformerImpl))
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    usable = HAVE_TE and torch.cuda.is_available()
    if requested == "transformer_engine" and not usable:
        raise ValueError(
            "--transformer-impl must be local or auto here, got 'transformer_engine': "
            + ("there is no CUDA device" if HAVE_TE else "transformer-engine is not installed")
        )
    if requested == "auto":
        return "transformer_engine" if usable and dtype != torch.float32 else "local"
    return requested


def block_spec(config: TransformerConfig, impl: str, pipeline_rank: int) -> TransformerBlockSubmodules | ModuleSpec:
    """Layer specs of one pipeline stage."""
    if impl == "transformer_engine":
        layer = get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=config.qk_layernorm)
        return ModuleSpec(module=TransformerLayer, submodules=layer)
    layer = get_gpt_layer_local_submodules(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    attention = layer.self_attention
    attention.module = PackedSelfAttention
    attention.submodules.core_attention = SdpaCoreAttention
    if config.qk_layernorm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    spec = ModuleSpec(module=TransformerLayer, submodules=layer)
    count = get_num_layers_to_build(config, None, pipeline_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RMSNorm)


def global_parameters(model: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under names that do not depend on the pipeline stage (layer numbers count over the whole model)."""
    offset = get_transformer_layer_offset(model.config)
    for name, parameter in model.named_parameters():
        yield re.sub(r"(decoder\.layers\.)(\d+)", lambda m: f"{m[1]}{int(m[2]) + offset}", name), parameter


def head_weight(output_layer: Any, output_weight: Tensor | None) -> Tensor:
    """The LM head [Vp, H] as GPTModel hands it to an output processor: tied (`output_weight`), or the layer's own."""
    return output_layer.weight if output_weight is None else output_weight


def _check_layout(shape: ModelShape, options: ModelOptions, groups: ParallelGroups) -> None:
    sizes = (groups.tensor_size, groups.pipeline_size)
    for problem in layout_problems(shape, *sizes, sequence_parallel=options.sequence_parallel):
        raise ValueError(problem)
