"""Causal language models of transformers: Qwen, Llama, SmolLM and others with full attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from lavis_ds import registry
from lavis_ds.errors import ConfigError
from lavis_ds.models import attention, hub
from lavis_ds.models.configs import HFCausalLMConfig
from lavis_ds.models.language.output_layer import OutputLayer
from lavis_ds.models.language.tiled_mlp import tile_mlps
from lavis_ds.models.layers import repeated_layers
from lavis_ds.models.loss import TargetLosses
from lavis_ds.models.moe.configs import MoEConfig
from lavis_ds.models.moe.experts import choose_experts, own_coefficient
from lavis_ds.models.moe.upcycle import upcycle
from lavis_ds.models.parts import LanguageModel
from lavis_ds.models.recomputation import recompute

_WHERE = "model.language"


@registry.register_language_model("hf_causal_lm")
class HFCausalLM(LanguageModel):
    """Decoder and output layer of a Hugging Face model, used apart, and its tokenizer.

    Only whole modules are called (embedding, decoder, output layer), never their weights: under ZeRO-3 a weight exists
    only while the module that owns it runs.

    Raises:
        ConfigError: the tokenizer has more entries than the model has rows, or the model can't be used here.
        CheckpointError: the folder or hub id holds no model, no weights or no tokenizer.
    """

    Config = HFCausalLMConfig

    def __init__(self, config: HFCausalLMConfig) -> None:
        super().__init__()
        source = "tokenizer" if config.tokenizer else "path"
        self.tokenizer = hub.load_tokenizer(config.tokenizer or str(config.path), f"{_WHERE}.{source}")
        self.kernel = attention.choose(config.attention, f"{_WHERE}.attention")
        self.lm: Any = self._build(config)
        self.sourced = ("lm",) if config.path else ()
        self.hidden_size = int(self.lm.get_input_embeddings().embedding_dim)
        self.vocab_size = int(self.lm.get_output_embeddings().weight.shape[0])
        self.num_layers = int(self.lm.config.num_hidden_layers)
        self._check()
        self._config = config
        self._set_up()

    @property
    def attention_width(self) -> int:
        config = self.lm.config.get_text_config()
        return int(config.num_attention_heads) * attention.head_size(config)

    def choose_experts(self) -> None:
        self.experts = choose_experts(self.lm, self._config.experts)

    def _set_up(self) -> None:
        self.kernel = self.kernel.fitted(self.lm)
        self.attention = str(self.kernel)
        self.balance_coefficient = own_coefficient(self.lm.config)
        OutputLayer.of(self.lm.get_output_embeddings(), int(self._config.loss_chunk_gib * 2**30))
        tile_mlps(repeated_layers(self.lm), self._config.mlp_tiles, _WHERE)
        recompute(repeated_layers(self.lm), self._config, _WHERE)

    def upcycle(self, options: MoEConfig) -> None:
        """See `LanguageModel.upcycle`; `lm` is then of one of transformers' classes with experts."""
        self.lm = upcycle(self.lm, options)
        self._set_up()

    def embed(self, input_ids_BT: Tensor) -> Tensor:
        embeds_BTDl: Tensor = self.lm.get_input_embeddings()(input_ids_BT)
        return embeds_BTDl

    def forward(self, embeds_BTDl: Tensor, position_ids_BT: Tensor, segment_ids_BT: Tensor | None = None) -> Tensor:
        options = self.kernel.options(embeds_BTDl, segment_ids_BT)
        output = self.lm.get_decoder()(
            inputs_embeds=embeds_BTDl, position_ids=position_ids_BT, use_cache=False, **options
        )
        hidden_BTDl: Tensor = output.last_hidden_state
        return hidden_BTDl

    def logits(self, hidden_KDl: Tensor) -> Tensor:
        logits_KV: Tensor = self.lm.get_output_embeddings()(hidden_KDl)
        return logits_KV

    def losses(self, hidden_KDl: Tensor, labels_K: Tensor, weights_K: Tensor | None = None) -> TargetLosses:
        """As in the base class, but a few logits at a time; an output layer with adapters makes whole ones."""
        head = self.lm.get_output_embeddings()
        if not isinstance(head, OutputLayer):
            return super().losses(hidden_KDl, labels_K, weights_K)
        return TargetLosses(*head(hidden_KDl, labels=labels_K, weights=weights_K))

    @torch.no_grad()
    def generate(self, embeds_BTDl: Tensor, attention_mask_BT: Tensor, **options: Any) -> Tensor:
        """See `LanguageModel.generate`. Greedy unless `do_sample` says otherwise; rows that ended are padded."""
        settings = {"do_sample": False, "pad_token_id": _pad_id(self.tokenizer), **options}
        if not settings["do_sample"]:  # a model's own sampling defaults would raise warnings
            settings |= {"temperature": None, "top_p": None, "top_k": None}
        if self.lm.generation_config.eos_token_id is None:
            settings.setdefault("eos_token_id", self.tokenizer.eos_token_id)
        with torch.compiler.set_stance("force_eager"):  # layers compiled for training meet a cache that grows here
            ids_BT: Tensor = self.lm.generate(
                inputs_embeds=embeds_BTDl, attention_mask=attention_mask_BT.long(), **settings
            )
        return ids_BT

    def output_layers(self) -> tuple[nn.Module, ...]:
        return (self.lm.get_output_embeddings(),)

    def _build(self, config: HFCausalLMConfig) -> Any:
        try:
            if config.path is not None:
                return hub.load_model(
                    AutoModelForCausalLM, config.path, f"{_WHERE}.path", attn_implementation=self.kernel.build_with
                )
            tokenizer = self.tokenizer
            shape = hub.config_of_shape(
                config.config or {},
                f"{_WHERE}.config",
                vocab_size=len(tokenizer),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=None,
            )
            return hub.make_model(AutoModelForCausalLM, shape, attn_implementation=self.kernel.build_with)
        except (ImportError, ValueError) as error:
            text = " ".join(str(error).split())
            raise ConfigError(f"this language model can't be built: {text[:300]}.", where=_WHERE) from error

    def _check(self) -> None:
        rows = min(self.vocab_size, int(self.lm.get_input_embeddings().num_embeddings))
        if len(self.tokenizer) > rows:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} entries and the model {rows} rows.",
                where=f"{_WHERE}.tokenizer",
                hint="Use the model's own tokenizer, or (with `config`) leave vocab_size out.",
            )
        # The whole model's forward pass, which is not what runs here, would change the output layer's result by these.
        for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1), ("logit_scale", 1)):
            if getattr(self.lm.config, key, neutral) not in (neutral, None):
                raise ConfigError(
                    f"a {self.lm.config.model_type} scales its logits ({key}), which is not supported.", where=_WHERE
                )


def _pad_id(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)
