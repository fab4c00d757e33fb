"""Figures of the mixing, and of what a head attends to, while they are trained."""

from pathlib import Path

import torch
from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

from inspection_iha import attention_patterns, by_layer, draw_graph, draw_mixing, draw_patterns

from .mixing import is_mixing
from .monitor import whole


class MixingFigures(TrainerCallback):
    """
    Draws the mixing tensors and the pseudo-head graph of each layer into TensorBoard: at the start, at each checkpoint
    and at the end. `tensorboard --logdir OUTPUT_DIR` shows them as the run `mixing`. For any Trainer:

        trainer.add_callback(MixingFigures(prompt="The keys are: red 41, blue 17. The key of blue is"))

    It needs pip install 'modeling-iha[plot]'.

    Args:
        prompt: a text whose P^2 attention patterns are drawn too; the Trainer needs a tokenizer (`processing_class`).
        layer: of the patterns; by default the first that has pseudo-heads.
        head: of the patterns.
    """

    def __init__(self, prompt: str | None = None, layer: int | None = None, head: int = 0):
        self.prompt, self.layer, self.head = prompt, layer, head

    def on_train_begin(self, args, state, control, model, processing_class=None, **kwargs):
        if self.prompt is not None and not callable(processing_class):
            raise ValueError("MixingFigures: prompt needs a tokenizer: Trainer(..., processing_class=tokenizer).")
        self.drawn = None
        self._draw(args, state, model, processing_class)

    def on_save(self, args, state, control, model, processing_class=None, **kwargs):
        self._draw(args, state, model, processing_class)

    def on_train_end(self, args, state, control, model, processing_class=None, **kwargs):
        self._draw(args, state, model, processing_class)

    def _draw(self, args, state, model, tokenizer):
        if self.drawn == state.global_step:
            return
        self.drawn = state.global_step
        # All processes take part: each may have a part of a tensor. PEFT keeps the old ones beside its own.
        mixing = by_layer(
            {
                name: whole(parameter)
                for name, parameter in model.named_parameters()
                if is_mixing(name) and ".original_module." not in name
            }
        )
        if not mixing:
            raise ValueError("MixingFigures: num_pseudo_heads is 1 in every layer, so nothing is mixed.")
        if self.prompt is not None:
            iha = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
            ids = tokenizer(self.prompt).input_ids
            layer = min(mixing) if self.layer is None else self.layer
            patterns = attention_patterns(iha, torch.tensor(ids), layer, self.head)
        if not state.is_world_process_zero:
            return
        with SummaryWriter(Path(args.output_dir, "mixing")) as writer:
            for layer, tensors in mixing.items():
                writer.add_figure(f"mixing/layer {layer:03}", draw_mixing(layer, tensors), state.global_step)
                writer.add_figure(f"graph/layer {layer:03}", draw_graph(layer, tensors), state.global_step)
            if self.prompt is not None:
                name = f"attention/layer {patterns.layer:03}, head {patterns.head:03}"
                figure = draw_patterns(patterns, [tokenizer.decode([token]) for token in ids])
                writer.add_figure(name, figure, state.global_step)
