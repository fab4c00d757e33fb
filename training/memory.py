"""
What a training step keeps in memory, counted tensor by tensor from the configuration: bytes on one device, by part.

Counted: AdamW in float32 with float32 weights, bfloat16 products, sdpa, no dropout, and the chunked head of TRL.
Not counted: what CUDA and NCCL keep for themselves, and fragmentation.
"""

from dataclasses import dataclass
from math import ceil

from configuration_iha import IHAConfig, count_parameters
from modeling_iha.pieces import block_length, first_in_reach

FLOAT32 = 4
COMPUTE = 2  # bfloat16
ADAM_MOMENTS = 2
# One tile of the logits in TRL's head, [tokens, vocabulary]; it is as wide for a smaller vocabulary.
HEAD_TILE = (4096, 32768)
# DeepSpeed's defaults for ZeRO-3, in parameters: gathered at a time, and gradients collected before they are reduced.
ZERO3_GATHERED, ZERO3_BUCKET = 10**9, 5 * 10**8


@dataclass(frozen=True)
class Layout:
    """
    How a step is spread.

    engine: "alone" (one device, autocast), "fsdp2" or "deepspeed" (ZeRO-3).
    shards: devices that share weights, gradients and optimizer.
    sequence_shards: devices that share a sequence, in a ring ("fsdp2") or by heads ("deepspeed", Ulysses).
    """

    engine: str
    shards: int = 1
    sequence_shards: int = 1
    checkpointing: bool = False
    offload: bool = False

    @property
    def stream(self) -> int:
        """Bytes of an entry of what runs from layer to layer: autocast leaves it in float32."""
        return FLOAT32 if self.engine == "alone" else COMPUTE

    def describe(self) -> str:
        how = {
            "alone": "one GPU",
            "fsdp2": f"FSDP2 over {self.shards} GPUs",
            "deepspeed": f"DeepSpeed ZeRO-3 over {self.shards} GPU{'s' * (self.shards > 1)}",
        }[self.engine]
        if self.sequence_shards > 1:
            way = "a ring of context parallelism" if self.engine == "fsdp2" else "Ulysses, by heads"
            how += f", {self.sequence_shards} to a sequence ({way})"
        how += ", gradient checkpointing" if self.checkpointing else ", no gradient checkpointing"
        return how + (", weights and optimizer in main memory" if self.offload else "")


def step_memory(config: IHAConfig, sequence_length: int, batch: int, layout: Layout) -> dict[str, int]:
    """
    Bytes on one device, by part, at the moment of a step when the most is there.

    Args:
        sequence_length: N, tokens of a row.
        batch: rows on each device, or on each group of devices that share a sequence.

    Returns:
        `weights`, `gradients` and `optimizer` (what stays), `copies` (weights gathered or cast for a layer, and what
        their gradients pass through), `activations`, and `loss`, which is 0 where the peak is in a layer's backward.
    """
    return max(moments(config, sequence_length, batch, layout).values(), key=lambda parts: sum(parts.values()))


def moments(config: IHAConfig, sequence_length: int, batch: int, layout: Layout) -> dict[str, dict[str, int]]:
    """`step_memory` at the `forward`'s end, in the backward of the `loss`, and in that of a `layer`."""
    tokens = ceil(sequence_length / layout.sequence_shards) * batch
    layers = [_Layer(config, i, tokens, sequence_length, layout) for i in range(config.num_hidden_layers)]
    kept = 2 * tokens * config.head_dim * layout.stream  # cos and sin of the positions
    if layout.checkpointing:
        kept += len(layers) * tokens * config.hidden_size * layout.stream
        deepest = max(layer.backward for layer in layers)
        if layout.engine == "alone":
            deepest -= tokens * config.hidden_size * FLOAT32  # the layer's input is kept already, as its norm saves it
    else:
        kept += sum(layer.saved for layer in layers)
        deepest = max(layer.backward - layer.saved for layer in layers)
    found = {
        "forward": {"activations": kept, "loss": _loss(config, tokens, layout, forward=True)},
        "loss": {"activations": kept, "loss": _loss(config, tokens, layout)},
        "layer": {"activations": kept + deepest, "loss": 0},
    }
    states = _states(config, layout)
    return {moment: {**states, "copies": _copies(config, layout, moment), **parts} for moment, parts in found.items()}


def host_memory(config: IHAConfig, layout: Layout) -> int:
    """Bytes that offloading keeps in the main memory of the machines, all of them together."""
    return sum(_states(config, Layout(layout.engine)).values()) if layout.offload else 0


def _states(config: IHAConfig, layout: Layout) -> dict[str, int]:
    parameters = 0 if layout.offload else ceil(count_parameters(config)["total"] / layout.shards)
    # ZeRO-3 has the weights in bfloat16 beside its float32 ones, and the gradients in both while it makes its step.
    more = COMPUTE if layout.engine == "deepspeed" else 0
    return {
        "weights": parameters * (FLOAT32 + more),
        "gradients": parameters * (FLOAT32 + more),
        "optimizer": parameters * ADAM_MOMENTS * FLOAT32,
    }


def _copies(config: IHAConfig, layout: Layout, moment: str) -> int:
    """`moment`: "forward" (its end), "loss" (its backward) or "layer" (the backward of one)."""
    counts = count_parameters(config)
    in_layers = counts["attention"] + counts["mixing"] + counts["mlp"]
    layer, vocabulary = in_layers // config.num_hidden_layers, config.vocab_size * config.hidden_size
    if layout.engine == "alone":
        # Autocast keeps its casts to the end of the forward, and the graph those that a backward still needs.
        casts = COMPUTE * (layer if layout.checkpointing else in_layers)
        if moment == "forward":
            return COMPUTE * in_layers
        if moment == "loss":
            return 0 if layout.checkpointing else casts
        # A gradient is made in bfloat16 and cast, then added to the one that is there.
        return casts + (COMPUTE + FLOAT32) * config.hidden_size * config.intermediate_size
    if layout.engine == "deepspeed":
        return COMPUTE * (min(counts["total"], ZERO3_GATHERED) + min(counts["total"], ZERO3_BUCKET))
    # FSDP2 has this layer and the next one gathered, and in the backward the gradients whole and about to be reduced.
    gathered = COMPUTE * 2 * layer
    if moment != "layer":
        return gathered
    # Tied embeddings stay gathered to the end, for the head and the embeddings are one unit then.
    return gathered + COMPUTE * 2 * layer + (2 * COMPUTE * vocabulary if config.tie_word_embeddings else 0)


def _loss(config: IHAConfig, tokens: int, layout: Layout, forward: bool = False) -> int:
    """The final norm and TRL's head, which makes logits tile by tile and never all of them."""
    hidden, vocabulary = config.hidden_size, config.vocab_size * config.hidden_size
    rows, columns = HEAD_TILE
    # The last layer's output (float32 in the norm), the normed values, the head's input, and its rows with a label.
    saved = tokens * hidden * (FLOAT32 + 3 * layout.stream)
    # A tile, and the columns of the head that it takes, cast.
    tile = COMPUTE * (min(tokens, rows) * columns + min(columns, config.vocab_size) * hidden)
    gathered = FLOAT32 * vocabulary if layout.shards > 1 else 0
    if forward:
        return saved + tile + gathered
    # The gradients of the head's input and weight are summed up in float32.
    head = saved + tile + gathered + FLOAT32 * (tokens * hidden + vocabulary)
    # The backward of a norm: what it saved, the gradient that comes, and four products with it, in float32.
    norm = tokens * hidden * (2 * FLOAT32 + layout.stream + 4 * FLOAT32)
    return max(head, norm)


class _Layer:
    """
    What one decoder layer saves for its backward, and the most that this backward has at once. Tensors are named by
    their width, per token: hidden h, intermediate f, queries q = H d, keys and values kv = G d each.
    """

    def __init__(self, config: IHAConfig, index: int, tokens: int, sequence_length: int, layout: Layout):
        h, f, d = config.hidden_size, config.intermediate_size, config.head_dim
        q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
        c, r, size = COMPUTE, layout.stream, config.get_num_pseudo_heads(index)
        is_ring = layout.engine == "fsdp2" and layout.sequence_shards > 1
        by_heads = layout.engine == "deepspeed" and layout.sequence_shards > 1
        # Ulysses repeats keys and values where it has more devices than groups.
        kv_inside = kv * (max(1, layout.sequence_shards // config.num_key_value_heads) if by_heads else 1)
        virtual = size * (q + 2 * kv_inside)  # pseudo-queries, -keys and -values
        window = config.sliding_window if config.layer_types[index] == "sliding_attention" else None
        is_cut = window is not None and window < sequence_length

        # A norm saves its input in float32, the normed values, and its output: bfloat16, or as autocast casts it anew
        # for each projection that reads it.
        def norm(readers: int) -> int:
            return FLOAT32 * h + (r * h + c * h * readers if layout.engine == "alone" else 2 * c * h)

        attention = c * virtual + c * size * q + FLOAT32 * size * config.num_attention_heads
        if size > 1:
            attention += c * (q + 2 * kv) + c * q  # before mixing, and after the collapse
        masks, widest = 0, 0
        if is_cut:
            attention += c * size * q  # the outputs of the blocks, and once more as one tensor
            share = _shared(config, layout.sequence_shards if by_heads else 1)
            masks, widest = _blocks(share, size, window, sequence_length)
        norms = norm(3), norm(2)  # read by three projections, and by two
        mlp = 4 * c * f  # gate, its activation, up, and their product
        saved = sum(norms) + attention + mlp

        gradient = r * h  # of the layer's output, which passes the MLP and the attention by
        in_mlp = saved + gradient + 2 * c * f
        in_norm = saved - mlp + gradient + 3 * FLOAT32 * h
        if is_cut:
            # Block by block: the gradients of its keys and values are added to those of all blocks; that of its
            # queries takes the place of what the block had saved.
            kernel = c * size * 2 * (1 + widest / sequence_length) * kv_inside
        else:
            # Gradients of the output, the queries, keys and values; FlashAttention's backward sums that of the queries
            # in float32 and has those of keys and values for every head at first. (The kernel of CPUs does neither.)
            kernel = c * size * (2 * q + 2 * kv_inside) + FLOAT32 * size * q + 2 * c * size * q
        if is_ring:
            # Keys and values of two other devices, and their float32 gradients.
            kernel += 2 * c * size * 2 * kv + FLOAT32 * size * 2 * kv
        if by_heads:
            kernel += c * virtual  # sent and received
        in_attention = norms[0] + attention + gradient + kernel
        self.saved = int(tokens * saved) + masks
        self.backward = int(tokens * max(in_mlp, in_norm, in_attention)) + masks


def _shared(config: IHAConfig, processes: int) -> int:
    """Heads that share keys, on each device: they are rows of one mask."""
    return config.num_attention_heads // processes // max(config.num_key_value_heads // processes, 1)


def _blocks(share: int, size: int, window: int, tokens: int) -> tuple[int, int]:
    """Of a sliding layer in blocks of queries: the bytes of its masks, and the most keys, in tokens, of one block."""
    block = min(block_length(tokens, size, window, share), tokens)
    starts = range(0, tokens, block)
    widest = max(min(start + block, tokens) - first_in_reach(start, window) for start in starts)
    lengths = {block, tokens - starts[-1]}  # the last block may be shorter, with a mask of its own
    return COMPUTE * share * size**2 * sum(lengths) * widest, widest
