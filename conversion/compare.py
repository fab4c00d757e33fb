"""The numeric comparison of two causal models on prompts: loss, logits, KL divergence, greedy tokens."""

import gc
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging

from .checkpoint import CheckpointError

# The largest logit difference that rounding explains, relative to the largest logit. For the half precisions: Llama's
# own logits move by 4 % of the largest from float32 to bfloat16 (SmolLM2-135M), and either model may do so.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}

PADDING = 0  # any token: the attention mask hides it

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived a girl who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Question: Tom has 3 boxes with 12 pencils each and gives away 7 pencils. How many are left?\nAnswer:",
    "In the beginning God created the heaven and the earth. And the earth was without form, and void;",
    "Water boils at a lower temperature on a mountain because",
    "Dear Sir or Madam,\n\nI am writing to",
    "The keys are: red 41, blue 17, green 88. The number of the blue key is",
)


@dataclass(frozen=True)
class Divergence:
    """Where greedy decoding of a prompt parts: the new token's index, and Llama's lead of its own token over IHA's."""

    prompt: int
    token: int
    lead: float


@dataclass(frozen=True)
class Comparison:
    """How far two models are apart in one dtype; `explained` tells whether rounding accounts for all of it."""

    dtype: str
    loss_source: float
    loss_destination: float
    max_difference: float
    mean_difference: float
    largest_logit: float
    kl_divergence: float
    greedy_prompts: int
    greedy_tokens: int
    divergences: tuple[Divergence, ...]
    tolerance: float

    @property
    def explained(self) -> bool:
        # Two logits may each move by the largest difference before greedy decoding takes the other one.
        ties = all(divergence.lead <= 2 * self.max_difference for divergence in self.divergences)
        return self.max_difference <= self.tolerance * self.largest_logit and ties


@dataclass(frozen=True)
class _Run:
    logits: list[torch.Tensor]  # of each prompt, [N, vocabulary], float64
    loss: float
    greedy: torch.Tensor  # [prompts, new tokens]
    steps: torch.Tensor  # [prompts, new tokens, vocabulary], the logits that they were chosen by


def compare(
    source: Path,
    destination: Path,
    dtype: torch.dtype,
    prompts: tuple[str, ...] = PROMPTS,
    new_tokens: int = 64,
    device: str = "cpu",
) -> Comparison:
    """
    Runs both models, one after the other, on the same prompts.

    Args:
        source, destination: folders that AutoModelForCausalLM loads; the tokenizer is the source's.
        dtype: in which both compute; in float64 their norms do too.
        prompts: texts; the loss is the mean over all their tokens but the first.
        new_tokens: greedy tokens per prompt.
        device: where the models run.

    Raises:
        CheckpointError: the source has no tokenizer.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except Exception as error:  # broken tokenizer files raise anything
        raise CheckpointError(
            f"{source}: no usable tokenizer, and comparing on prompts needs one; verify --structure-only, "
            "convert --no-check and export --no-check do without."
        ) from error
    encoded = [tokenizer(prompt, return_tensors="pt").input_ids[0].to(device) for prompt in prompts]
    first = _run(source, encoded, dtype, new_tokens, device)
    second = _run(destination, encoded, dtype, new_tokens, device)

    differences = [(a - b).abs() for a, b in zip(first.logits, second.logits, strict=True)]
    tokens = sum(len(difference) for difference in differences)
    divergences = []
    for prompt, (a, b) in enumerate(zip(first.greedy, second.greedy, strict=True)):
        length = min(len(a), len(b))  # a batch ends when all its prompts have
        parted = (a[:length] != b[:length]).nonzero()
        if len(parted):
            token = int(parted[0])
            logits = first.steps[prompt, token]
            divergences.append(Divergence(prompt, token, float(logits[a[token]] - logits[b[token]])))
    return Comparison(
        dtype=str(dtype).removeprefix("torch."),
        loss_source=first.loss,
        loss_destination=second.loss,
        max_difference=float(torch.stack([difference.max() for difference in differences]).max()),
        mean_difference=sum(float(difference.mean(-1).sum()) for difference in differences) / tokens,
        largest_logit=max(float(logits.abs().max()) for logits in first.logits),
        # Rounding makes a zero slightly negative.
        kl_divergence=max(0.0, sum(_kl(a, b) for a, b in zip(first.logits, second.logits, strict=True)) / tokens),
        greedy_prompts=len(prompts),
        greedy_tokens=new_tokens,
        divergences=tuple(divergences),
        tolerance=TOLERANCE[dtype],
    )


@torch.no_grad()
def _run(folder: Path, prompts: list[torch.Tensor], dtype: torch.dtype, new_tokens: int, device: str) -> _Run:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    if dtype == torch.float64:
        norms_in_float64(model)
    logits, nll = [], 0.0
    what = f"{model.config.model_type}, {str(dtype).removeprefix('torch.')}"
    with logging.tqdm(total=len(prompts) + new_tokens, desc=what, unit="step", disable=None) as bar:
        for prompt in prompts:
            logits.append(model(prompt[None]).logits[0].double().cpu())
            nll += float(torch.nn.functional.cross_entropy(logits[-1][:-1], prompt[1:].cpu(), reduction="sum"))
            bar.update()
        generated = model.generate(
            **_left_padded(prompts),
            do_sample=False,
            max_new_tokens=new_tokens,
            pad_token_id=PADDING,
            output_logits=True,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([_Progress(bar)]),
        )
    greedy = generated.sequences[:, -len(generated.logits) :].cpu()
    steps = torch.stack(generated.logits, dim=1).double().cpu()
    del model
    gc.collect()
    return _Run(logits, nll / sum(len(prompt) - 1 for prompt in prompts), greedy, steps)


def _left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.stack([torch.nn.functional.pad(p, (longest - len(p), 0), value=PADDING) for p in prompts])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(p), (longest - len(p), 0)) for p in prompts])
    return {"input_ids": ids, "attention_mask": mask}


class _Progress(StoppingCriteria):
    """Stops nothing: `generate` has no other place to move a bar from."""

    def __init__(self, bar):
        self.bar = bar

    def __call__(self, input_ids, scores, **kwargs) -> torch.BoolTensor:
        self.bar.update()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def norms_in_float64(model: torch.nn.Module) -> torch.nn.Module:
    """
    Has the norms of a model compute in float64. Its own do in float32 whatever the model's dtype, which
    hides a difference of 1e-16, or once in a while makes it one of 1e-7.
    """
    for name, norm in list(model.named_modules()):
        if type(norm).__name__.endswith("RMSNorm") and hasattr(norm, "variance_epsilon"):  # each family's own
            replacement = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon)
            replacement.weight = norm.weight
            model.set_submodule(name, replacement)
    return model


def _kl(source: torch.Tensor, destination: torch.Tensor) -> float:
    log_p, log_q = source.log_softmax(-1), destination.log_softmax(-1)
    return float(torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum"))
