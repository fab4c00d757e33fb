"""What a model costs: its parameters and the FLOPs of its forward, from the configuration alone."""

from .configuration_iha import IHAConfig

# A product of [m, k] and [k, n] is m n k multiplications and as many additions.
FLOPS_PER_PRODUCT = 2


def count_parameters(config: IHAConfig) -> dict[str, int]:
    """
    The parameters of `IHAForCausalLM(config)` by part: `embeddings`, `attention` (the four projections), `mixing`
    (with the collapse), `mlp`, `norms`, `head` (0 where it is tied to the embeddings), and their `total`.
    """
    hidden, layers = config.hidden_size, config.num_hidden_layers
    queries, keys = _widths(config)
    attention = 2 * hidden * (queries + keys)
    if config.attention_bias:
        attention += queries + 2 * keys + hidden
    mlp = 3 * hidden * config.intermediate_size
    if config.mlp_bias:
        mlp += 2 * config.intermediate_size + hidden
    vocabulary = config.vocab_size * hidden
    counts = {
        "embeddings": vocabulary,
        "attention": layers * attention,
        "mixing": sum(mixing_parameters(config, layer) for layer in range(layers)),
        "mlp": layers * mlp,
        "norms": (2 * layers + 1) * hidden,
        "head": 0 if config.tie_word_embeddings else vocabulary,
    }
    return {**counts, "total": sum(counts.values())}


def mixing_parameters(config: IHAConfig, layer: int) -> int:
    """Those of one layer, the collapse included: 2 P (H^2 + G^2), and none where P = 1."""
    size, heads, groups = config.get_num_pseudo_heads(layer), config.num_attention_heads, config.num_key_value_heads
    return 2 * size * (heads**2 + groups**2) if size > 1 else 0


def attention_pairs(config: IHAConfig, layer: int, sequence_length: int) -> int:
    """
    How many pairs (virtual query, virtual key) of one sequence see each other, in one head of one layer. A virtual
    query sees the P virtual keys of each earlier token, in a sliding layer of the W - 1 before its own, and of its own
    token those up to itself: N P (N P + 1) / 2 in a full layer, with flat causality.
    """
    _check_length(sequence_length)
    size, tokens = config.get_num_pseudo_heads(layer), sequence_length
    if not config.is_causal:
        return (tokens * size) ** 2
    sliding = config.layer_types[layer] == "sliding_attention"
    window = min(config.sliding_window, tokens) if sliding else tokens
    # The first `window` tokens see 0, 1, .. window - 1 earlier ones, each token after them window - 1.
    earlier = window * (window - 1) // 2 + (tokens - window) * (window - 1)
    return size**2 * earlier + tokens * size * (size + 1) // 2


def attention_flops(config: IHAConfig, sequence_length: int) -> dict:
    """
    The FLOPs of attention in the forward of one sequence of N tokens, projections not counted.

    Returns:
        `scores`: query times key and weight times value for the pairs of `attention_pairs`, 4 d H a pair.
        `mixing`: the products that make pseudo-heads and collapse them, 2 per multiply-add; 0 where P = 1.
        `total`: both. `layers`: the same three of each layer. Softmax and RoPE are not counted.

    Raises:
        ValueError: the length is below 1.
    """
    layers = []
    for layer in range(config.num_hidden_layers):
        pairs = attention_pairs(config, layer, sequence_length)
        scores = 2 * FLOPS_PER_PRODUCT * config.head_dim * config.num_attention_heads * pairs
        # Every mixing weight meets every channel of a head once a token.
        mixing = FLOPS_PER_PRODUCT * mixing_parameters(config, layer) * config.head_dim * sequence_length
        layers.append({"scores": scores, "mixing": mixing, "total": scores + mixing})
    sums = {key: sum(layer[key] for layer in layers) for key in ("scores", "mixing", "total")}
    return {**sums, "layers": layers}


def linear_flops(config: IHAConfig, sequence_length: int) -> dict[str, int]:
    """
    The FLOPs of the dense products in the forward of one sequence of N tokens: `projections` (of attention), `mlp`,
    `head` and `total`. Biases, norms and activation functions are not counted.

    Raises:
        ValueError: the length is below 1.
    """
    _check_length(sequence_length)
    queries, keys = _widths(config)
    weights = {
        "projections": config.num_hidden_layers * 2 * config.hidden_size * (queries + keys),
        "mlp": config.num_hidden_layers * 3 * config.hidden_size * config.intermediate_size,
        "head": config.vocab_size * config.hidden_size,
    }
    flops = {part: FLOPS_PER_PRODUCT * count * sequence_length for part, count in weights.items()}
    return {**flops, "total": sum(flops.values())}


def plain_attention(config: IHAConfig) -> IHAConfig:
    """The configuration of the same shape with Llama's attention: P = 1 and full in every layer."""
    fields = {**config.to_dict(), "num_pseudo_heads": 1, "layer_types": None, "sliding_window": None}
    return IHAConfig(**{name: value for name, value in fields.items() if name != "model_type"})


def _widths(config: IHAConfig) -> tuple[int, int]:
    """Outputs of the projection of queries, and of that of keys or of values."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _check_length(sequence_length: int):
    if type(sequence_length) is not int or sequence_length < 1:
        raise ValueError(f"sequence_length={sequence_length!r} must be an integer of at least 1.")
