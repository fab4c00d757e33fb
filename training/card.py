"""The card of a trained model: what it is, where it came from, and how it loads."""

from collections.abc import Sequence

from huggingface_hub import ModelCard, ModelCardData

from configuration_iha import IHAConfig

TEXT = """---
{data}
---

# {title}

{base}, trained further as an [Interleaved Head Attention](https://arxiv.org/abs/2602.21371) model:
`num_pseudo_heads` {sizes}, `rope_phases` {phases!r}. `results.json` has the recipe and the log.

```python
from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

Where modeling-iha is installed, `import modeling_iha` takes the place of `trust_remote_code=True`.
"""


def model_card(
    name: str,
    config: IHAConfig,
    base_model: str | None,
    is_adapter: bool,
    dataset: str | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """
    Args:
        name: what loads it, a Hub id or a folder's name.
        base_model: the Hub id that it was trained from, or None for a folder.
        is_adapter: whether it holds PEFT's adapter and not the whole model.
        dataset, tags: more for the card's metadata.
    """
    library = "peft" if is_adapter else "transformers"
    data = ModelCardData(
        base_model=base_model,
        datasets=dataset,
        library_name=library,
        pipeline_tag="text-generation",
        tags=["iha", *tags],
    )
    sizes = config.num_pseudo_heads
    return ModelCard(
        TEXT.format(
            data=data.to_yaml(),
            title=name.split("/")[-1],
            base=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else "A model of a local folder",
            sizes=sizes if isinstance(sizes, int) else " ".join(map(str, sizes)),
            phases=config.rope_phases,
            library=library,
            loader="AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM",
            name=name,
        )
    )
