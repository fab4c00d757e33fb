"""Figures of the mixing while it is trained."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from transformers import TrainerCallback

from inspection_iha import by_layer, draw_graph, draw_mixing

from .mixing import is_mixing
from .monitor import whole


class MixingFigures(TrainerCallback):
    """
    Draws the mixing tensors and the pseudo-head graph of each layer into TensorBoard: at the start, at each checkpoint
    and at the end. `tensorboard --logdir OUTPUT_DIR` shows them as the run `mixing`. For any Trainer:

        trainer.add_callback(MixingFigures())

    It needs pip install 'modeling-iha[plot]'.
    """

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.drawn = None
        self._draw(args, state, model)

    def on_save(self, args, state, control, model, **kwargs):
        self._draw(args, state, model)

    def on_train_end(self, args, state, control, model, **kwargs):
        self._draw(args, state, model)

    def _draw(self, args, state, model):
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
        if not state.is_world_process_zero:
            return
        with SummaryWriter(Path(args.output_dir, "mixing")) as writer:
            for layer, tensors in mixing.items():
                writer.add_figure(f"mixing/layer {layer:03}", draw_mixing(layer, tensors), state.global_step)
                writer.add_figure(f"graph/layer {layer:03}", draw_graph(layer, tensors), state.global_step)
