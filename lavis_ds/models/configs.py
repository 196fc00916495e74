"""Options of the built-in models and their parts. No torch here, so that a configuration is checked in no time."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from lavis_ds import registry
from lavis_ds.config.base import ComponentOf, Config, LocalPath, NamedConfig
from lavis_ds.config.schema import ModelConfig
from lavis_ds.models.moe.configs import MoEConfig

AttentionKernel = Literal[
    "auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "flex", "sdpa", "eager"
]
TowerAttentionKernel = Literal[
    "auto", "flash_attention_4", "flash_attention_3", "flash_attention_2", "varlen", "sdpa", "eager"
]


def _check_one_source(path: str | None, config: dict[str, Any] | None) -> None:
    """Raises:
    ValueError: not exactly one of the two is given.
    """
    if (path is None) == (config is None):
        raise ValueError("give either `path` (a hub id or folder) or `config` (a shape with random weights)")


class LoraConfig(Config):
    """Low-rank adapters inside a part, under PEFT's names; the part's own weights do not train."""

    r: int = Field(16, ge=1, description="rank")
    lora_alpha: float = Field(32, gt=0, description="the adapters' output is scaled by this over r")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of the adapters' input")
    target_modules: Literal["all-linear"] | list[str] = Field(
        "all-linear",
        description="linear layers that get adapters: all but the output layer, or ends of names (q_proj) and regular "
        "expressions for whole names",
    )
    exclude_modules: list[str] = Field(default_factory=list, description="layers left out, named in the same way")
    target_parameters: list[str] = Field(
        default_factory=list, description="parameters that are no layer's weight, such as mlp.experts.gate_up_proj"
    )
    also_train: list[str] = Field(
        default_factory=list, description="parameters of the part that train in full: modules or patterns inside it"
    )
    use_dora: bool = Field(False, description="learn the norms of weights apart (DoRA)")
    use_rslora: bool = Field(False, description="scale by lora_alpha over the root of r")
    init_lora_weights: bool | Literal["gaussian"] = Field(
        True, description="true: uniform as PEFT does; gaussian; false: random, so that the start differs from the base"
    )


class AdaptedConfig(Config):
    """Options of a part that can be trained through adapters."""

    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="number format of the part's weights where they are frozen and the run would keep float32: with "
        "precision fp32, or bf16 and engine torch",
    )
    lora: LoraConfig | None = Field(None, description="train low-rank adapters in place of the weights")
    quantize: Literal["nf4", "fp4"] | None = Field(
        None, description="store the frozen weights of linear layers in 4 bits (QLoRA); needs `lora` to train"
    )


def _in_words(value: object) -> object:
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


def _check_recomputation(value: str) -> str:
    if re.fullmatch(r"none|full|selective|every_([2-9]|[1-9]\d+)", value) is None:
        raise ValueError("should be none, full, selective, or every_2, every_3, ... (every n-th layer)")
    return value


class LayersConfig(AdaptedConfig):
    """Options of a part that is made of transformer layers."""

    gradient_checkpointing: Annotated[str, BeforeValidator(_in_words), AfterValidator(_check_recomputation)] = Field(
        "none",
        description="activations that are computed again in the backward pass, to save memory: none, full (those of "
        "all layers), every_2 (of every second layer; any number), or selective (all but attention and matrix "
        "products); true is full",
    )
    offload_activations: bool = Field(
        False, description="what is recomputed from, a tensor a layer, waits in host memory; needs full or every_n"
    )
    fp8: Literal["none", "tensorwise", "rowwise"] = Field(
        "none",
        description="matrix products of large linear layers in 8 bits, with a scale for each tensor or for each row "
        "(torchao; GPUs from compute capability 8.9, rowwise from 9.0)",
    )

    @model_validator(mode="after")
    def _check_layers(self) -> LayersConfig:
        if self.offload_activations and self.gradient_checkpointing in ("none", "selective"):
            raise ValueError("offload_activations needs gradient_checkpointing: full or every_n")
        if self.fp8 != "none" and (self.quantize or self.lora):
            raise ValueError("fp8 is for weights that train: leave `lora` and `quantize` out, or fp8")
        return self


class VisionEncoderConfig(NamedConfig, LayersConfig):
    """Options that every vision encoder has."""


class TimmViTConfig(VisionEncoderConfig):
    """A Vision Transformer of timm, by name or by shape."""

    name: str = "timm_vit"
    model_name: str = Field("vit_base_patch16_224", description="timm model name; its mean and std normalise pixels")
    image_size: int = Field(224, ge=1, description="height and width of the pictures, in pixels")
    pretrained: bool = Field(False, description="load timm's weights for model_name (from its hub or cache)")
    weights: LocalPath | None = Field(None, description="file to load instead, such as LAVIS's eva_vit_g.pth")
    model_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of timm's model, such as patch_size, embed_dim, depth, num_heads"
    )
    mean: tuple[float, float, float] | None = Field(
        None, description="mean of pixels in [0, 1]; model_name's if left out"
    )
    std: tuple[float, float, float] | None = Field(None, description="deviation of pixels; model_name's if left out")
    drop_path_rate: float = Field(0.0, ge=0, lt=1, description="stochastic depth rate")
    select_layer: int = Field(
        -1, description="block whose output is used, counted as in Python; -1 is the last; later blocks are not built"
    )
    final_norm: bool = Field(True, description="apply the encoder's own final layer norm")
    layer_norm: bool = Field(False, description="add a layer norm of its own after the encoder (BLIP-2's ln_vision)")
    select_tokens: Literal["patch", "all"] = Field(
        "patch", description="patch tokens only, or with class and register tokens"
    )

    @model_validator(mode="after")
    def _one_source(self) -> TimmViTConfig:
        if self.pretrained and self.weights is not None:
            raise ValueError("`pretrained: true` and `weights` are both given; keep one")
        return self


class HFVisionConfig(VisionEncoderConfig):
    """A vision tower of transformers (CLIP, SigLIP, DINOv2, ...) from a hub id or folder, or by shape."""

    name: str = "hf_vision"
    path: str | None = Field(None, description="hub id or local folder with config.json and weights")
    config: dict[str, Any] | None = Field(
        None, description="config.json's content, with model_type: random weights of this shape"
    )
    image_size: int | None = Field(None, ge=1, description="height and width in pixels; the model's own where left out")
    select_layer: int = Field(
        -1, description="hidden state used, as in Python: 0 is the embeddings, -1 the last; later layers are not built"
    )
    final_norm: bool = Field(False, description="apply the tower's own final layer norm to that hidden state")
    select_tokens: Literal["patch", "all"] = Field(
        "patch", description="patch tokens only, or with class and register tokens"
    )

    @model_validator(mode="after")
    def _one_source(self) -> HFVisionConfig:
        _check_one_source(self.path, self.config)
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` must hold `model_type`, such as siglip_vision_model")
        return self


class Siglip2NaFlexConfig(VisionEncoderConfig):
    """SigLIP 2 with NaFlex from a hub id or folder, or by shape: pictures at their own size and shape, in patches."""

    name: str = "siglip2_naflex"
    path: str | None = Field(None, description="hub id or local folder with config.json and weights")
    config: dict[str, Any] | None = Field(
        None, description="config.json's content, with model_type: random weights of this shape"
    )
    select_layer: int = Field(
        -1, description="hidden state used, as in Python: 0 is the embeddings, -1 the last; later layers are not built"
    )
    final_norm: bool = Field(False, description="apply the tower's own final layer norm to that hidden state")

    @model_validator(mode="after")
    def _one_source(self) -> Siglip2NaFlexConfig:
        _check_one_source(self.path, self.config)
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` must hold `model_type`: siglip2_vision_model")
        return self


class ProjectorConfig(NamedConfig):
    """Options that every projector has."""


class LinearProjectorConfig(ProjectorConfig):
    """One linear layer."""

    name: str = "linear"


class MLPProjectorConfig(ProjectorConfig):
    """Linear layers with GELU between (LLaVA-1.5), optionally merging neighbouring patches first (pixel shuffle)."""

    name: str = "mlp"
    depth: int = Field(2, ge=1, description="number of linear layers")
    merge_size: int = Field(1, ge=1, description="merge squares of this many patches a side into one token")
    layer_norm: bool = Field(False, description="a layer norm before the layers (InternVL)")


class AveragePoolProjectorConfig(ProjectorConfig):
    """Averages of neighbouring patches, then linear layers with GELU between (DeCo)."""

    name: str = "average_pool"
    kernel_size: int = Field(2, ge=1, description="average squares of this many patches a side into one token")
    grid_size: int | None = Field(
        None, ge=1, description="average to this many tokens a side instead, whatever the number of patches"
    )
    depth: int = Field(2, ge=1, description="number of linear layers")

    @model_validator(mode="after")
    def _one_size(self) -> AveragePoolProjectorConfig:
        if self.grid_size is not None and "kernel_size" in self.model_fields_set:
            raise ValueError("`kernel_size` and `grid_size` are both given; keep one")
        return self


class PerceiverProjectorConfig(ProjectorConfig):
    """The perceiver resampler of Idefics2: learned latents look at the patches, at the language model's width."""

    name: str = "perceiver"
    num_latents: int = Field(64, ge=1, description="tokens an image becomes")
    num_hidden_layers: int = Field(3, ge=1, description="layers of attention to the patches")
    num_attention_heads: int = Field(16, ge=1, description="attention heads")
    num_key_value_heads: int = Field(4, ge=1, description="heads of keys and values")
    head_dim: int = Field(96, ge=1, description="width of an attention head")
    intermediate_size: int | None = Field(
        None, ge=1, description="inner width of the MLP before it; four times the language model's where left out"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout probability of attention")


class CAbstractorProjectorConfig(ProjectorConfig):
    """Honeybee's C-Abstractor: convolutions, an adaptive average pool, convolutions, linear layers."""

    name: str = "c_abstractor"
    grid_size: int = Field(12, ge=1, description="tokens a side that an image becomes")
    depth: int = Field(3, ge=1, description="convolution blocks before the pool, and as many after it")
    hidden_size: int = Field(1024, ge=1, description="width of the blocks")
    mlp_depth: int = Field(2, ge=1, description="number of linear layers, with SiLU between")
    num_positions: int | None = Field(
        None, ge=1, description="patches an image has, to give each a learned position (Honeybee's own has them)"
    )


class QFormerProjectorConfig(ProjectorConfig):
    """BLIP-2's Q-Former with learned queries, and a linear layer to the language model."""

    name: str = "qformer"
    num_query_tokens: int = Field(32, ge=1, description="tokens an image becomes")
    num_hidden_layers: int = Field(12, ge=1, description="transformer layers")
    hidden_size: int = Field(768, ge=1, description="width")
    num_attention_heads: int = Field(12, ge=1, description="attention heads")
    intermediate_size: int = Field(3072, ge=1, description="width of the feed-forward layers")
    cross_attention_frequency: int = Field(2, ge=1, description="every n-th layer looks at the image")
    dropout: float = Field(0.1, ge=0, lt=1, description="dropout probability of hidden states and attention")


class LanguageModelConfig(NamedConfig, LayersConfig):
    """Options that every language model has."""


_TILES = (
    "feed-forward layers take a row's tokens in so many pieces, and compute each again in the backward pass: for rows "
    "so long that one layer's inner activations fill the memory"
)


class HFCausalLMConfig(LanguageModelConfig):
    """Any causal language model of transformers, from a hub id or folder, or by shape."""

    name: str = "hf_causal_lm"
    path: str | None = Field(None, description="hub id or local folder with config.json, weights and tokenizer")
    config: dict[str, Any] | None = Field(
        None, description="config.json's content, with model_type: random weights of this shape"
    )
    tokenizer: str | None = Field(None, description="hub id or folder of the tokenizer; that of `path` where left out")
    attention: AttentionKernel = Field(
        "auto", description="attention kernel; auto is the fastest that is there, and the run's start names it"
    )
    loss_chunk_gib: float = Field(
        4.0, gt=0, description="memory for logits in training, in GiB: the loss is made of so many targets at a time"
    )
    experts: Literal["auto", "grouped", "eager"] = Field(
        "auto", description="how experts run: grouped into one product, or one after the other; auto is grouped"
    )
    mlp_tiles: int | None = Field(None, ge=2, description=_TILES)

    @model_validator(mode="after")
    def _one_source(self) -> HFCausalLMConfig:
        _check_one_source(self.path, self.config)
        if self.path is None and self.tokenizer is None:
            raise ValueError("`tokenizer` must be given, since `config` names no folder that holds one")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError("`config` must hold `model_type`, such as qwen3")
        return self


class VlmConfig(ModelConfig):
    """A vision encoder, a projector and a language model."""

    arch: str = "vlm"
    vision: Annotated[VisionEncoderConfig, ComponentOf(registry.vision_encoders)] = Field(
        description="pixels to patch features"
    )
    projector: Annotated[ProjectorConfig, ComponentOf(registry.projectors)] = Field(
        description="patch features to tokens"
    )
    language: Annotated[LanguageModelConfig, ComponentOf(registry.language_models)] = Field(
        description="the language model"
    )
    moe: MoEConfig | None = Field(None, description="balance of experts; makes a dense language model sparse")


class MiniGPT4QwenConfig(VlmConfig):
    """EVA-CLIP ViT-g, Q-Former and linear layer, Qwen (MiniGPT4Qwen, https://github.com/Coobiw/MPP-LLaVA)."""

    arch: str = "minigpt4qwen"


class LlavaQwenConfig(VlmConfig):
    """CLIP or SigLIP, two-layer MLP, Qwen (LLaVA-1.5, https://arxiv.org/abs/2310.03744)."""

    arch: str = "llava_qwen"


class QwenVLVisionConfig(LayersConfig):
    """Options of Qwen-VL's vision tower, whose shape the whole model gives."""

    attention: TowerAttentionKernel = Field(
        "auto", description="attention kernel; auto is the fastest that is there, and the run's start names it"
    )


class QwenVLLanguageConfig(QwenVLVisionConfig):
    """Options of Qwen-VL's language model, whose shape the whole model gives."""

    attention: AttentionKernel = Field(  # type: ignore[assignment]
        "auto", description="attention kernel; auto is the fastest that is there, and the run's start names it"
    )
    tokenizer: str | None = Field(None, description="hub id or folder of the tokenizer; that of `path` where left out")
    loss_chunk_gib: float = Field(
        4.0, gt=0, description="memory for logits in training, in GiB: the loss is made of so many targets at a time"
    )
    experts: Literal["auto", "grouped", "eager"] = Field(
        "auto", description="how experts run: grouped into one product, or one after the other; auto is grouped"
    )
    mlp_tiles: int | None = Field(None, ge=2, description=_TILES)


class QwenVLConfig(ModelConfig):
    """A Qwen-VL of transformers, from a hub id or folder, or by shape."""

    path: str | None = Field(None, description="hub id or local folder with config.json, weights and tokenizer")
    config: dict[str, Any] | None = Field(
        None, description="config.json's content, with text_config and vision_config: random weights of this shape"
    )
    vision: QwenVLVisionConfig = Field(default_factory=QwenVLVisionConfig, description="the vision tower")
    language: QwenVLLanguageConfig = Field(default_factory=QwenVLLanguageConfig, description="the language model")
    moe: MoEConfig | None = Field(None, description="balance of experts; makes a dense language model sparse")

    @model_validator(mode="after")
    def _one_source(self) -> QwenVLConfig:
        _check_one_source(self.path, self.config)
        if self.path is None and self.language.tokenizer is None:
            raise ValueError("`language.tokenizer` must be given, since `config` names no folder that holds one")
        return self


class Qwen2_5VLConfig(QwenVLConfig):
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""

    arch: str = "qwen2_5_vl"


class Qwen3VLConfig(QwenVLConfig):
    """Qwen3-VL (https://arxiv.org/abs/2511.21631)."""

    arch: str = "qwen3_vl"


class Qwen3VLMoEConfig(Qwen3VLConfig):
    """Qwen3-VL with experts (https://arxiv.org/abs/2511.21631)."""

    arch: str = "qwen3_vl_moe"
