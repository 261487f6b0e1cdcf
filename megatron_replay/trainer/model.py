"""The policy network: a megatron-core GPTModel in the shape of a Hugging Face checkpoint, and its weights."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
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
from safetensors import safe_open
from torch import Tensor

from megatron_replay.config import ModelOptions, TransformerImpl
from megatron_replay.ops.checks import require_choice
from megatron_replay.trainer.attention import PackedSelfAttention, RMSNorm, SdpaCoreAttention
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.hf_mapping import hf_names, to_megatron
from megatron_replay.weight_sync.model_shape import ModelShape


def build_model(shape: ModelShape, options: ModelOptions, groups: ParallelGroups, max_sequence_length: int) -> GPTModel:
    """The GPTModel stage of this rank, weights not yet loaded."""
    _check_layout(shape, options, groups)
    impl = resolve_impl(options.transformer_impl)
    config = transformer_config(shape, options, groups, impl)
    return GPTModel(
        config=config,
        transformer_layer_spec=block_spec(config, impl, groups.pipeline_rank),
        vocab_size=shape.padded_vocab_size(options.make_vocab_size_divisible_by, groups.tensor_size),
        max_sequence_length=max_sequence_length,
        pre_process=groups.is_first_stage,
        post_process=groups.is_last_stage,
        position_embedding_type="rope",
        rotary_base=int(shape.rope_theta),
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
        qk_layernorm=True,
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


def resolve_impl(requested: str) -> str:
    """`local` or `transformer_engine`; `auto` is Transformer Engine on CUDA where it is installed."""
    require_choice("--transformer-impl", requested, get_args(TransformerImpl))
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE

    usable = HAVE_TE and torch.cuda.is_available()
    if requested == "transformer_engine" and not usable:
        raise ValueError(
            "--transformer-impl must be local or auto here, got 'transformer_engine': "
            + ("there is no CUDA device" if HAVE_TE else "transformer-engine is not installed")
        )
    return "transformer_engine" if usable and requested != "local" else "local"


def block_spec(config: TransformerConfig, impl: str, pipeline_rank: int) -> TransformerBlockSubmodules | ModuleSpec:
    """Layer specs of one pipeline stage."""
    if impl == "transformer_engine":
        return ModuleSpec(
            module=TransformerLayer, submodules=get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=True)
        )
    layer = get_gpt_layer_local_submodules(qk_layernorm=True, normalization="RMSNorm")
    attention = layer.self_attention
    attention.module = PackedSelfAttention
    attention.submodules.core_attention = SdpaCoreAttention
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


@torch.no_grad()
def load_hf_weights(model: GPTModel, folder: str | Path, shape: ModelShape, groups: ParallelGroups) -> None:
    """Fill this rank's shard from FOLDER's safetensors, tensor by tensor.

    Raises ValueError when the folder's names or shapes are not those of config.json: nothing is left random.
    """
    with ExitStack() as stack:
        where = {}
        for path in _safetensors_files(Path(folder)):
            file = stack.enter_context(safe_open(path, framework="pt"))
            where.update(dict.fromkeys(file.keys(), file))
        expected = hf_names(shape)
        extra = set(where) - expected - ({"lm_head.weight"} if shape.tied_embeddings else set())
        if missing := expected - set(where):
            raise ValueError(f"--load-hf {str(folder)!r} lacks {len(missing)} tensors, the first is {min(missing)}")
        if extra:
            raise ValueError(f"--load-hf {str(folder)!r} has {len(extra)} unknown tensors, the first is {min(extra)}")
        for name, parameter in global_parameters(model):
            value = to_megatron(
                name,
                lambda x: where[x].get_tensor(x),
                shape,
                padded_vocab=model.vocab_size,
                tensor_rank=groups.tensor_rank,
                tensor_size=groups.tensor_size,
            )
            if value.shape != parameter.shape:
                raise ValueError(
                    f"--load-hf {str(folder)!r} does not fit its config.json: {name} is {list(value.shape)}, "
                    f"the model needs {list(parameter.shape)}"
                )
            parameter.copy_(value)


def head_weight(output_layer: Any, output_weight: Tensor | None) -> Tensor:
    """The LM head [Vp, H] as GPTModel hands it to an output processor: tied (`output_weight`), or the layer's own."""
    return output_layer.weight if output_weight is None else output_weight


def checkpoint_identity(folder: str | Path) -> str:
    """sha256 over the names and bytes of a Hugging Face checkpoint's weights: what a reference model is."""
    digest = hashlib.sha256()
    for path in _safetensors_files(Path(folder)):
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({folder / x for x in json.loads(index.read_text())["weight_map"].values()})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"--load-hf must name a folder with safetensors weights, got {str(folder)!r}")
    return files


def _check_layout(shape: ModelShape, options: ModelOptions, groups: ParallelGroups) -> None:
    tp, pp = groups.tensor_size, groups.pipeline_size
    for what, size in (
        ("attention heads", shape.num_heads),
        ("key-value heads", shape.num_kv_heads),
        ("ffn rows", shape.ffn_size),
    ):
        if size % tp:
            raise ValueError(f"--tensor-model-parallel-size must divide the {size} {what}, got {tp}")
    if shape.num_layers % pp:
        raise ValueError(f"--pipeline-model-parallel-size must divide the {shape.num_layers} layers, got {pp}")
    if options.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1, got 1")
