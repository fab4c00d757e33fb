"""The paper's FLOP-matched layer schedule (App. C): sliding IHA layers with one plain global layer between them."""

SLIDING_LAYERS_PER_GLOBAL = 4


def flop_matched_schedule(num_hidden_layers: int, sequence_length: int, num_pseudo_heads: int = 2) -> dict:
    """
    The config fields of the schedule: four sliding layers with P pseudo-heads and a window of N / (2 P^2) tokens,
    then one full layer with P = 1, and so on. Counted with causality, a sliding layer's N P x W P pairs are N^2 / 2,
    as many as a plain causal layer's, so the schedule costs what plain attention costs.

    Args:
        num_hidden_layers (`int`): layers of the model.
        sequence_length (`int`): N, the training length in tokens for which the FLOPs match.
        num_pseudo_heads (`int`): P of the sliding layers.

    Returns:
        `dict` with `layer_types`, `sliding_window` (tokens) and `num_pseudo_heads` (one per layer), to be passed to
        `IHAConfig`.

    Raises:
        ValueError: `sequence_length` is too short for a window of two tokens, or a count is below 1.
    """
    for name, value in (("num_hidden_layers", num_hidden_layers), ("num_pseudo_heads", num_pseudo_heads)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1.")
    window = sequence_length // (2 * num_pseudo_heads**2)
    if window < 2:
        raise ValueError(
            f"sequence_length={sequence_length} must be at least 4 P^2 = {4 * num_pseudo_heads**2} tokens."
        )
    is_global = [
        layer % (SLIDING_LAYERS_PER_GLOBAL + 1) == SLIDING_LAYERS_PER_GLOBAL for layer in range(num_hidden_layers)
    ]
    return {
        "layer_types": ["full_attention" if full else "sliding_attention" for full in is_global],
        "sliding_window": window,
        "num_pseudo_heads": [1 if full else num_pseudo_heads for full in is_global],
    }
