"""The IHA models: Llama's, with IHAAttention in every layer."""

import functools
import os

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModel
from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.masking_utils import create_masks_for_generate
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
)
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model

from configuration_iha import IHAConfig

from .attention import IHAAttention, pop_cache
from .backends import check_backend
from .bundle import AUTO_MAP, write_bundle
from .masks import paged_masks, pop_cu_seq_lens, token_masks, with_dense_masks
from .mixing import IHACollapse, IHAMixer
from .rotary import IHARotaryEmbedding
from .saving import staged
from .weights import token_weights


class IHADecoderLayer(LlamaDecoderLayer):
    def __init__(self, config: IHAConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_pseudo_heads = config.get_num_pseudo_heads(layer_idx)
        self.self_attn = IHAAttention(config, layer_idx)

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        position_embeddings = position_embeddings[str(self.num_pseudo_heads)]
        return super().forward(hidden_states, position_embeddings=position_embeddings, **kwargs)


class IHAPreTrainedModel(LlamaPreTrainedModel):
    config: IHAConfig
    config_class = IHAConfig
    _no_split_modules = ["IHADecoderLayer"]

    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, (IHAMixer, IHACollapse)):
            module.initialize(self.config.mixing_init, self.config.mixing_init_std)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *args, **kwargs) -> str:
        # Asked at load and by `set_attn_implementation`.
        check_backend(self.config, attn_implementation)
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _get_files_timestamps(self, working_dir: str | os.PathLike) -> dict[str, float]:
        # Pushing skips files that lay there before; those of the bundle are written just before this is asked.
        stamps = super()._get_files_timestamps(working_dir)
        return {name: stamp for name, stamp in stamps.items() if not name.endswith(".py")}

    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs):
        """
        [`~PreTrainedModel.save_pretrained`], and beside the weights the code that loads them: the folder works with
        every Auto class and `trust_remote_code=True` where this package is not installed. A model that is there is
        replaced when the new one is whole (`saving.staged`).
        """
        save = functools.partial(super().save_pretrained, is_main_process=is_main_process, **kwargs)
        if not is_main_process or getattr(self, "_hf_peft_config_loaded", False):
            return save(save_directory)
        self.config.auto_map = dict(AUTO_MAP)
        # An upload may fail when all is written, and the shards of several processes come into one folder.
        if kwargs.get("push_to_hub") or kwargs.get("distributed_checkpoint"):
            write_bundle(save_directory)
            return save(save_directory)
        with staged(save_directory, kwargs.get("variant")) as folder:
            write_bundle(folder)
            save(folder)


# Qwen2Model is LlamaModel with one mask per layer type.
class IHAModel(IHAPreTrainedModel, Qwen2Model):
    def __init__(self, config: IHAConfig):
        super(Qwen2Model, self).__init__(config)  # past Qwen2Model's own, which would build its layers
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(IHADecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = IHARotaryEmbedding(config)
        self.has_sliding_layers = "sliding_attention" in config.layer_types
        self.gradient_checkpointing = False
        self.post_init()

    @functools.wraps(Qwen2Model.forward, assigned=())  # its signature, which Transformers reads
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | BlockMask | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        *args,
        inputs_embeds: torch.FloatTensor | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """Llama's forward, with the masks of `token_masks`."""
        if args:
            raise TypeError("IHAModel takes what follows position_ids by name.")
        if input_ids is not None and inputs_embeds is None:
            input_ids, inputs_embeds = None, self.embed_tokens(input_ids)
        cache = pop_cache(dict(kwargs))
        if not self.config.is_causal:
            if cache is not None or kwargs.get("use_cache"):
                raise ValueError(
                    "is_causal=False has no cache: its tokens would see later ones. Pass use_cache=False."
                )
            kwargs["use_cache"] = False
        if isinstance(cache, PagedAttentionCache):
            attention_mask = paged_masks(kwargs)
        elif inputs_embeds is not None:
            cu_seq_lens = pop_cu_seq_lens(kwargs)
            attention_mask = token_masks(self.config, inputs_embeds, attention_mask, cache, position_ids, cu_seq_lens)
        return super().forward(input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **kwargs)


class IHAForCausalLM(IHAPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    def __init__(self, config: IHAConfig):
        super(LlamaForCausalLM, self).__init__(config)  # past Llama's own, which would build a LlamaModel
        self.model = IHAModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(config: IHAConfig, inputs_embeds: torch.Tensor, attention_mask, **kwargs):
        """What `generate` asks with a static cache, before the compiled decoding step; prefill is not compiled."""
        if inputs_embeds.shape[1] > 1:
            return attention_mask
        return create_masks_for_generate(with_dense_masks(config), inputs_embeds, attention_mask, **kwargs)


class IHAForSequenceClassification(GenericForSequenceClassification, IHAPreTrainedModel):
    pass


class IHAForTokenClassification(GenericForTokenClassification, IHAPreTrainedModel):
    pass


class IHAForQuestionAnswering(GenericForQuestionAnswering, IHAPreTrainedModel):
    pass


# The three heads build their backbone with AutoModel, also where this file was loaded as remote code.
AutoModel.register(IHAConfig, IHAModel, exist_ok=True)

__all__ = [
    "IHAForCausalLM",
    "IHAForQuestionAnswering",
    "IHAForSequenceClassification",
    "IHAForTokenClassification",
    "IHAModel",
    "IHAPreTrainedModel",
    "token_weights",
]
