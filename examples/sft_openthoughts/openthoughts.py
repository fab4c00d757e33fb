"""
OpenThoughts data, or a local folder of the same schema, as token ids and labels.

    OpenThoughts-114k    system, conversations [{from: user | assistant, value}]
    OpenThoughts2-1M     conversations [{from: user | assistant, value}]
    OpenThoughts3-1.2M   conversations [{from: human | gpt, value}]
"""

from pathlib import Path

from datasets import Dataset, load_dataset
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

NAMES = {name: f"open-thoughts/{name}" for name in ("OpenThoughts-114k", "OpenThoughts2-1M", "OpenThoughts3-1.2M")}
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
IGNORED = -100
TEMPLATES = Path(__file__).parent / "templates"


def load(name: str) -> Dataset:
    """
    The rows of one of `NAMES`, of any data set on the Hub, or of a local folder of .parquet, .jsonl or .json files.

    Raises:
        ValueError: a folder holds no such file, or there is no column `conversations`.
    """
    if not Path(name).exists():
        name = NAMES.get(name, name)
    elif not any(Path(name).rglob("*.parquet")) and not any(Path(name).rglob("*.json*")):
        raise ValueError(f"{name} holds no .parquet, .jsonl or .json file.")
    dataset = load_dataset(name, split="train")
    if "conversations" not in dataset.column_names:
        raise ValueError(f"{name} has the columns {dataset.column_names}: 'conversations' must be among them.")
    return dataset


def to_messages(row: dict, number: int) -> list[dict[str, str]]:
    """
    A row as the messages that chat templates take, its system prompt first.

    Raises:
        ValueError: names the row, and what in it is not as the schemas say.
    """
    messages = []
    for turn, said in enumerate(row["conversations"] or []):
        if said.get("from") not in ROLES:
            raise ValueError(f"row {number}: from={said.get('from')!r} in turn {turn} must be one of {list(ROLES)}.")
        if not (said.get("value") or "").strip():
            raise ValueError(f"row {number}: value={said.get('value')!r} in turn {turn} is empty.")
        expected = ("user", "assistant")[turn % 2]
        if ROLES[said["from"]] != expected:
            raise ValueError(f"row {number}: from={said['from']!r} in turn {turn} must be the {expected}'s.")
        messages.append({"role": expected, "content": said["value"]})
    if len(messages) < 2 or len(messages) % 2:
        raise ValueError(f"row {number}: conversations has {len(messages)} turns: the last must be the assistant's.")
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def training_template(tokenizer: PreTrainedTokenizerBase, file: str | None) -> str:
    """
    The chat template that marks what the assistant says: the one in `file`, or else the tokenizer's own or TRL's, or
    the one of templates/ that renders what the tokenizer's own does.

    Raises:
        ValueError: it renders a conversation otherwise than the tokenizer's own, or no such template is known.
    """
    from trl.chat_template_utils import get_training_chat_template

    if file is not None:
        template = Path(file).read_text(encoding="utf-8")
    elif tokenizer.chat_template is None:
        raise ValueError("The tokenizer has no chat template, as base models do not: name one with training_template.")
    else:
        try:
            template = get_training_chat_template(tokenizer) or tokenizer.chat_template
        except ValueError as error:
            ours = (path.read_text(encoding="utf-8") for path in sorted(TEMPLATES.glob("*.jinja")))
            template = next((ours for ours in ours if not _difference(tokenizer, ours)), None)
            if template is None:
                raise ValueError(
                    f"Neither TRL nor {TEMPLATES} has a training form of the tokenizer's chat template. Write one "
                    "with {% generation %} and {% endgeneration %} around what the assistant says, and name it with "
                    "training_template."
                ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = template
    if difference := _difference(tokenizer, template):
        rendered, own = difference
        raise ValueError(f"The training template renders {rendered!r}, where the tokenizer's own gives {own!r}.")
    return template


def _difference(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, str] | None:
    """What a template and the tokenizer's own make of a conversation, where it differs."""
    turns = [
        {"role": role, "content": f"{role} speaks\n"} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    for messages in (turns, turns[1:]):
        try:
            own = tokenizer.apply_chat_template(messages, tokenize=False)
        except TemplateError:  # some take no system prompt
            continue
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        if rendered != own:
            return rendered, own
    return None


def tokenize(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, template: str, max_length: int, processes: int | None = None
) -> tuple[Dataset, int]:
    """
    Args:
        dataset: rows of one of the schemas.
        template: of `training_template`.
        max_length: longest example that is kept, in tokens.
        processes: that tokenise.

    Returns:
        `input_ids` and `labels` (what the assistant does not say is -100) of the rows that fit, and how many did not.

    Raises:
        ValueError: a row is malformed, holds nothing that the assistant says, or none fits.
    """

    def one(row, number):
        messages = to_messages(row, number)
        rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
        for message in messages:  # templates of reasoning models drop thoughts from what was said before
            if message["content"].strip() not in rendered:
                raise ValueError(f"row {number}: the training template drops part of what the {message['role']} says.")
        tokens = tokenizer.apply_chat_template(
            messages,
            chat_template=template,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, said = tokens["input_ids"], tokens["assistant_masks"]
        if not any(said):
            raise ValueError(f"row {number}: the training template marks nothing that the assistant says.")
        return {"input_ids": ids, "labels": [token if by else IGNORED for token, by in zip(ids, said, strict=True)]}

    tokenized = dataset.map(
        one, with_indices=True, remove_columns=dataset.column_names, num_proc=processes, desc="Tokenizing"
    )
    fitting = tokenized.filter(
        lambda ids: len(ids) <= max_length, input_columns="input_ids", num_proc=processes, desc="Measuring"
    )
    too_long = len(tokenized) - len(fitting)
    if not len(fitting):
        raise ValueError(f"All {too_long} examples are longer than max_length={max_length} tokens.")
    return fitting, too_long
