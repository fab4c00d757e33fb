"""The card of a converted model: where it came from and under which licence, what it computes, how it loads."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from configuration_iha import IHAConfig

LICENCE = ("license", "license_name", "license_link")
TEXT = """---
{data}
---

# {name}

{base} as an [Interleaved Head Attention](https://arxiv.org/abs/2602.21371) model: `num_pseudo_heads` {sizes}, \
`rope_phases` {phases!r}, {windows}, mixing begun as {init!r}.

{exactness}

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
```

Where modeling-iha is installed, `import modeling_iha` takes the place of `trust_remote_code=True`.

{licence}

The architecture is described in arXiv:2602.21371, "Interleaved Head Attention".
"""
EXACT = (
    "It computes exactly what its source computes: every weight is the source's, {how}, and the mixing tensors meet "
    "the conditions under which the function is the same. Fine-tune it for the pseudo-heads to part."
)
LOADERS = {
    "IHAModel": "AutoModel",
    "IHAForCausalLM": "AutoModelForCausalLM",
    "IHAForSequenceClassification": "AutoModelForSequenceClassification",
    "IHAForTokenClassification": "AutoModelForTokenClassification",
}


def conversion_card(
    name: str,
    config: IHAConfig,
    base_model: str | None,
    licence: dict,
    reasons: list[str],
    family: str = "llama",
    dequantised: bool = False,
) -> ModelCard:
    """
    Args:
        name: what loads the model: a Hub id, or a folder's name.
        base_model: the Hub id of the source, None for a folder or a file.
        licence: what `read_licence` found with the source.
        reasons: why the function is not the source's (`structure.check_mixing`); empty where it is.
        family: the source's model type.
        dequantised: whether it was a GGUF file.
    """
    loader = LOADERS[(config.architectures or ["IHAForCausalLM"])[0]]
    data = ModelCardData(
        **licence,
        base_model=base_model,
        library_name="transformers",
        pipeline_tag="text-generation" if loader == "AutoModelForCausalLM" else None,
        tags=["iha"],
    )
    sizes = config.num_pseudo_heads
    how = f"dequantised to {str(config.dtype).removeprefix('torch.')}" if dequantised else "byte for byte"
    changed = "It does not compute what its source computes, so train it on before you use it:\n\n"
    lines = []
    if licence:
        named = licence.get("license_name") or licence["license"]
        lines.append(f"The source's licence holds: {named if isinstance(named, str) else ', '.join(named)}.")
    else:
        lines.append("The source names no licence in its card: ask whoever published it what it allows.")
    if link := licence.get("license_link"):
        lines.append(f"Its text: {link}.")
    return ModelCard(
        TEXT.format(
            data=data.to_yaml(),
            name=name,
            base=f"[{base_model}](https://huggingface.co/{base_model})" if base_model else f"A model of type {family}",
            sizes=sizes if isinstance(sizes, int) else " ".join(map(str, sizes)),
            phases=config.rope_phases,
            windows=f"windows of {config.sliding_window} tokens" if config.sliding_window else "no windows",
            init=config.mixing_init,
            exactness=EXACT.format(how=how)
            if not reasons
            else changed + "\n".join(f"- {reason}" for reason in reasons),
            loader=loader,
            licence=" ".join(lines),
        )
    )


def read_licence(folder: Path) -> dict:
    """What a folder's card says of its licence, as fields of a card; empty where it says nothing that can be read."""
    try:
        text = (folder / "README.md").read_text(encoding="utf-8")
        data = ModelCard(text, ignore_metadata_errors=True).data if text.startswith("---") else {}
    except Exception:  # no card, no text, or metadata that YAML's parser refuses in ways of its own
        return {}
    found = {name: data.get(name) for name in LICENCE}
    return {name: value for name, value in found.items() if value} if found["license"] else {}
