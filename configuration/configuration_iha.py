"""IHAConfig: Llama's configuration plus what Interleaved Head Attention (arXiv:2602.21371) adds."""

import dataclasses

from transformers import LlamaConfig, PreTrainedConfig

ROPE_PHASES = ("shared", "interleaved", "fractional")
MIXING_INITS = ("exact", "identity", "normal")
LAYER_TYPES = ("full_attention", "sliding_attention")

# Fields that some Llama config.json files carry although Llama's forward ignores them; in IHA they have a meaning.
WITHOUT_MEANING_IN_LLAMA = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")


class IHAConfig(LlamaConfig):
    r"""
    Configuration of an IHA model: every field of [`LlamaConfig`] with its meaning there, and the following.

    Args:
        num_pseudo_heads (`int` or `list[int]`, defaults to 2):
            P, the pseudo-heads per head: one number for all layers, or one per layer. A layer with P = 1 is
            Llama's own layer and has no mixing parameters.
        rope_phases (`str`, defaults to `"shared"`):
            The position at which RoPE turns pseudo-head j (0-based) of token n: `"shared"` n, `"interleaved"`
            n P + j (the paper's), `"fractional"` n + j / P.
        mixing_init (`str`, defaults to `"exact"`):
            How missing mixing tensors are filled: `"exact"` keeps the function of the Llama model and lets the
            pseudo-heads learn different things, `"identity"` makes pure copies, `"normal"` draws from scratch.
        mixing_init_std (`float`, defaults to 1.0):
            Size of the noise of `"exact"` and of the draws of `"normal"`, above 0 and at most 16. It is relative to
            a head: an entry has the standard deviation `mixing_init_std` / sqrt(heads that it mixes). The function of
            `"exact"` does not depend on it, but for rounding, which in bfloat16 grows with it a little.
        layer_types (`list[str]`, *optional*):
            `"full_attention"` or `"sliding_attention"` per layer. Default: all sliding where `sliding_window` is
            set, else all full.
        sliding_window (`int`, *optional*):
            W in tokens, the token itself counted: a sliding layer's token n sees tokens n-W+1 .. n.
        is_causal (`bool`, defaults to `True`):
            False for an encoder: every virtual token sees every virtual token of its sequence. It has no cache.

    Raises:
        ValueError: a field has a value that is not allowed; the message names the field, the value and what is.

    ```python
    >>> from modeling_iha import IHAConfig, IHAForCausalLM

    >>> model = IHAForCausalLM(IHAConfig(num_hidden_layers=2, num_pseudo_heads=[2, 1]))
    ```"""

    model_type = "iha"
    # Mixing needs all heads of a token, so tensor parallelism splits the MLP and leaves attention whole.
    base_model_tp_plan = {
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    num_pseudo_heads: int | list[int] = 2
    rope_phases: str = "shared"
    mixing_init: str = "exact"
    mixing_init_std: float = 1.0
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    is_causal: bool = True

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            # Transformers' caches read an unset layer_types in their own way, so it is always set.
            default = "full_attention" if self.sliding_window is None else "sliding_attention"
            self.layer_types = [default] * self.num_hidden_layers
        if not isinstance(self.layer_types, (list, tuple)):
            raise ValueError(f"layer_types={self.layer_types!r} must be a list with one entry per layer.")
        super().__post_init__(**kwargs)
        self._validate_iha()

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs) -> "IHAConfig":
        """[`~PreTrainedConfig.from_dict`]; fields given beside are checked with the rest, not set afterwards."""
        # All but the dtype, for which `from_pretrained` looks again.
        names = {field.name for field in dataclasses.fields(cls)} - {"dtype"}
        fields = {name: kwargs.pop(name) for name in names & kwargs.keys()}
        window, layer_types = fields.get("sliding_window"), {**config_dict, **fields}.get("layer_types")
        if window is not None and layer_types is not None and "sliding_attention" not in layer_types:
            raise ValueError(f"sliding_window={window} must be None where layer_types has no 'sliding_attention'.")
        return super().from_dict({**config_dict, **fields}, **kwargs)

    def get_num_pseudo_heads(self, layer_idx: int) -> int:
        """P of one layer."""
        return self.num_pseudo_heads if isinstance(self.num_pseudo_heads, int) else self.num_pseudo_heads[layer_idx]

    @classmethod
    def from_llama(cls, llama_config: LlamaConfig, num_pseudo_heads: int | list[int] = 2, **fields) -> "IHAConfig":
        """
        The IHA configuration of a Llama model.

        Args:
            llama_config (`LlamaConfig`): the configuration of the Llama model; it is not changed.
            num_pseudo_heads (`int` or `list[int]`): P, for all layers or one per layer.
            fields: any other field of `IHAConfig`.

        Raises:
            TypeError: it is no configuration.
            ValueError: the configuration is not a Llama model's, or a field has a value that is not allowed.
        """
        if not isinstance(llama_config, PreTrainedConfig):
            raise TypeError(f"llama_config={llama_config!r} must be a LlamaConfig: LlamaConfig.from_pretrained(...).")
        if llama_config.model_type != "llama":
            raise ValueError(f"model_type={llama_config.model_type!r} is not supported: only 'llama' becomes IHA.")
        llama_fields = {
            name: value
            for name, value in llama_config.to_dict().items()
            if name not in ("model_type", "architectures", *WITHOUT_MEANING_IN_LLAMA)
        }
        architectures = [name.replace("Llama", "IHA", 1) for name in llama_config.architectures or []] or None
        return cls(**{**llama_fields, "architectures": architectures, "num_pseudo_heads": num_pseudo_heads, **fields})

    def to_llama(self) -> LlamaConfig:
        """The configuration of the Llama model whose weights these are, but for the mixing tensors."""
        fields = {
            name: value
            for name, value in self.to_dict().items()
            if name not in ("model_type", "architectures", "auto_map", *IHAConfig.__annotations__)
        }
        architectures = [name.replace("IHA", "Llama", 1) for name in self.architectures or []] or None
        return LlamaConfig(**{**fields, "architectures": architectures})

    def _validate_iha(self):
        self.validate_architecture()
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if groups < 1 or heads % groups:
            raise ValueError(f"num_key_value_heads={groups} must divide num_attention_heads={heads}.")

        if isinstance(self.num_pseudo_heads, tuple):
            self.num_pseudo_heads = list(self.num_pseudo_heads)
        per_layer = self.num_pseudo_heads if isinstance(self.num_pseudo_heads, list) else [self.num_pseudo_heads]
        if not per_layer or any(type(value) is not int or value < 1 for value in per_layer):
            raise ValueError(
                f"num_pseudo_heads={self.num_pseudo_heads!r} must be an integer of at least 1, or a list of them."
            )
        for name in ("num_pseudo_heads", "layer_types"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"{name}={value!r} has {len(value)} entries: it must have one per layer, "
                    f"num_hidden_layers={self.num_hidden_layers}."
                )

        if not isinstance(self.is_causal, bool):
            raise ValueError(f"is_causal={self.is_causal!r} must be True or False.")
        if not self.is_causal and "sliding_attention" in self.layer_types:
            raise ValueError("is_causal=False needs 'full_attention' in all of layer_types: windows are causal.")
        _check_choice("rope_phases", self.rope_phases, ROPE_PHASES)
        _check_choice("mixing_init", self.mixing_init, MIXING_INITS)
        for layer_type in self.layer_types:
            _check_choice("layer_types", layer_type, LAYER_TYPES)
        std = self.mixing_init_std
        if isinstance(std, bool) or not isinstance(std, (int, float)) or not 0 < std <= 16:
            raise ValueError(f"mixing_init_std={std!r} must be a number above 0 and at most 16.")
        window = self.sliding_window
        if window is not None and (type(window) is not int or window < 2):
            raise ValueError(f"sliding_window={window!r} must be None or an integer of at least 2.")
        rope_type = (self.rope_parameters or {}).get("rope_type")
        if rope_type == "dynamic" and self.rope_phases == "interleaved" and len(set(per_layer)) > 1:
            raise ValueError(
                f"num_pseudo_heads={self.num_pseudo_heads!r} must be one number for all layers with "
                "rope_phases='interleaved' and rope_type='dynamic', whose frequencies follow the longest position."
            )
        if window is None and "sliding_attention" in self.layer_types:
            raise ValueError("sliding_window=None must be an integer where layer_types has 'sliding_attention'.")


def _check_choice(field: str, value, allowed: tuple[str, ...]):
    if value not in allowed:
        raise ValueError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}.")


__all__ = ["IHAConfig"]
