"""
Continued pre-training of an IHA model on long documents, one stage of a longer context after the other.

    python train.py --config 8k.yaml --model FOLDER --dataset DOCUMENTS --output_dir run/8k
    accelerate launch --config_file accelerate/8gpu_ring.yaml train.py --config 64k.yaml --documents whole \
        --model run/32k --dataset DOCUMENTS --output_dir run/64k

Every field of `Recipe` and of TRL's `SFTConfig` is a line of the YAML file or an argument; arguments win. The same
command again goes on from the last whole checkpoint in `output_dir`.
"""

from dataclasses import asdict, dataclass, field

import torch
from documents import collate, load, rows_of, tokenize
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import logging
from trl import SFTConfig, TrlParser

import modeling_iha  # noqa: F401  (registers the Auto classes)
from training_iha import IHATrainer, check_choices, choose_trainable, refuse_unheeded, run

logger = logging.get_logger("long_context")


@dataclass
class Recipe:
    model: str = field(metadata={"help": "an IHA folder or Hub id: a converted model, or the stage before"})
    dataset: str = field(metadata={"help": "a Hub id, or a folder of .parquet, .jsonl or .txt files; column text"})
    documents: str = field(
        default="packed",
        metadata={
            "help": "packed: several in a row, which do not see each other; whole: a row from within one, for rings",
            "choices": ["packed", "whole"],
        },
    )
    rope_theta: float | None = field(default=None, metadata={"help": "base of RoPE; none leaves the model's own"})
    train: str = field(default="full", metadata={"help": "what is trained", "choices": ["full", "mixing"]})
    mixing_learning_rate: float = field(default=1e-3, metadata={"help": "peak rate of the mixing tensors"})
    eval_documents: int = field(default=0, metadata={"help": "documents kept from training for the evaluations"})
    dtype: str = field(default="float32", metadata={"help": "of the weights; bf16: true computes in bfloat16 anyway"})
    attn_implementation: str = field(default="sdpa", metadata={"help": "sdpa, or flash_attention_2 on a GPU"})


def main():
    recipe, config = TrlParser((Recipe, SFTConfig), description=__doc__).parse_args_and_config()
    check_choices(recipe)
    length = rows_are_ready(config)

    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    with config.main_process_first(desc="tokenizing"):
        documents = load(recipe.dataset)
        if not 0 <= recipe.eval_documents < len(documents):
            raise ValueError(
                f"eval_documents={recipe.eval_documents} must be less than the {len(documents)} there are."
            )
        parts = {"train": documents}
        if recipe.eval_documents:
            split = documents.train_test_split(test_size=recipe.eval_documents, seed=config.seed)
            parts = {"train": split["train"], "eval": split["test"]}
        rows, examples = {}, {}
        for name, part in parts.items():
            tokenized = tokenize(part, tokenizer, config.dataset_num_proc)
            rows[name], left = rows_of(tokenized, length, recipe.documents == "packed")
            examples |= {name: len(rows[name]), f"tokens left out, {name}": left}
            logger.warning(f"{name}: {len(rows[name])} rows of {length} tokens; {left} tokens fill none: left out.")

    model = AutoModelForCausalLM.from_pretrained(
        recipe.model,
        config=stretched(AutoConfig.from_pretrained(recipe.model), length, recipe.rope_theta),
        dtype=getattr(torch, recipe.dtype),
        attn_implementation=recipe.attn_implementation,
    )
    choose_trainable(model, recipe.train)
    trainer = IHATrainer(
        model,
        config,
        train_dataset=rows["train"],
        eval_dataset=rows.get("eval"),
        processing_class=tokenizer,
        data_collator=collate,
        mixing_learning_rate=recipe.mixing_learning_rate,
    )
    run(trainer, {**asdict(recipe), "tokens in a row": length}, examples)


def rows_are_ready(config: SFTConfig) -> int:
    """
    Tells TRL that rows come tokenised and of one length, which it returns.

    Raises:
        ValueError: `max_length` is no number, or something is asked for that this program would not heed.
    """
    rows = "rows come tokenised, of max_length tokens each"
    instead = {
        "packing": "the recipe's `documents` says how rows are filled",
        "eval_packing": "the recipe's `documents` says how rows are filled",
        "resume_from_checkpoint": "the same command goes on by itself",
        "model_init_kwargs": "the recipe has dtype and attn_implementation",
        **dict.fromkeys(("pad_to_multiple_of", "dataset_kwargs", "chat_template_path"), rows),
        **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), "every token of a document has its loss"),
    }
    refuse_unheeded(config, instead)
    length = config.max_length
    if length is None or length < 2:
        raise ValueError(f"max_length={length} must be the tokens in a row, at least 2.")
    config.max_length = None
    config.dataset_kwargs = {"skip_prepare_dataset": True}
    return length


def stretched(config: PreTrainedConfig, length: int, rope_theta: float | None) -> PreTrainedConfig:
    """
    The model's configuration for rows of this length.

    Raises:
        ValueError: a base is given for a model whose RoPE is scaled otherwise, or its positions end before the row.
    """
    if rope_theta is not None:
        kind = config.rope_parameters["rope_type"]
        if kind != "default":
            raise ValueError(
                f"rope_theta={rope_theta} must be left out: the model's rope_type={kind!r} stretches positions itself."
            )
        config.rope_parameters["rope_theta"] = rope_theta
        config.max_position_embeddings = max(config.max_position_embeddings, length)
    elif length > config.max_position_embeddings:
        raise ValueError(
            f"max_length={length} is more than max_position_embeddings={config.max_position_embeddings}: give a "
            "rope_theta."
        )
    return config


if __name__ == "__main__":
    main()
