"""The command line: `iha convert`, `verify`, `export`, `inspect`, `push`, `plan`, `bench` and `serve`."""

import functools
import json
import shlex
import sys
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    help="Interleaved Head Attention: convert Llama checkpoints, prove that they compute the same, plan and measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
console = Console()


class RopePhases(StrEnum):
    shared = "shared"
    interleaved = "interleaved"
    fractional = "fractional"


class MixingInit(StrEnum):
    exact = "exact"
    identity = "identity"


class Schedule(StrEnum):
    full = "full"
    hybrid = "hybrid"


class DType(StrEnum):
    float64 = "float64"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


SOURCE = Annotated[str, typer.Argument(help="Llama checkpoint: a safetensors folder, a .gguf file, or a Hub id.")]
REVISION = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")]
IN_WHICH_DTYPE = "In which dtype to run both models on prompts; may be given several times."
FLOAT32 = "float32; none for classifiers, quantised models and without a tokenizer"
NEW_TOKENS = Annotated[int, typer.Option(min=1, help="Greedy tokens per prompt.")]


def _check_device(device: str | None) -> str | None:
    if device is not None and device != "cpu":
        import torch

        try:
            torch.zeros(1, device=device).item()
        except (RuntimeError, AssertionError, ImportError) as error:
            reason = str(error).splitlines()[0]
            raise typer.BadParameter(f"{device!r} must be a device that PyTorch has here, or cpu: {reason}") from error
    return device


DEVICE = Annotated[str, typer.Option(help="Where the models run: cpu, cuda, ...", callback=_check_device)]
MODEL = Annotated[
    str,
    typer.Argument(
        help="Llama or IHA checkpoint, a folder or a Hub id (only its config is read), or a preset: "
        "iha-2.4b, llama-3.1-8b, smollm2-135m."
    ),
]
COUNT = Annotated[
    int | None,
    typer.Option("--num-pseudo-heads", "-p", min=1, help="P of a Llama model's layers.", show_default="2"),
]
SCHEDULE = Annotated[
    Schedule | None,
    typer.Option(help="Its layers: all full, or the paper's hybrid for this length.", show_default="full"),
]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command()
def convert(
    source: SOURCE,
    destination: Annotated[Path, typer.Argument(help="Folder to make.")],
    num_pseudo_heads: Annotated[
        str, typer.Option("--num-pseudo-heads", "-p", help="P: one number, or one per layer: 2,2,1,2.")
    ] = "2",
    schedule: Annotated[
        Schedule,
        typer.Option(help="All layers full, or the paper's hybrid, whose windows change the function."),
    ] = Schedule.full,
    length: Annotated[int | None, typer.Option(min=1, help="N of the hybrid schedule, in tokens.")] = None,
    rope_phases: Annotated[
        RopePhases, typer.Option(help="Position of pseudo-heads; only 'shared' keeps Llama's function.")
    ] = RopePhases.shared,
    mixing_init: Annotated[
        MixingInit, typer.Option(help="'exact' keeps the function and learns; 'identity' makes pure copies.")
    ] = MixingInit.exact,
    mixing_init_std: Annotated[float, typer.Option(help="Size of the noise of 'exact', relative to a head.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of that noise.")] = 0,
    revision: REVISION = None,
    gguf_dtype: Annotated[DType, typer.Option(help="What a GGUF file is dequantised to.")] = DType.float32,
    link: Annotated[bool, typer.Option("--link", help="Hard-link the weight files instead of copying.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a destination that is an IHA folder.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="End by running both models on prompts, as verify does.")
    ] = True,
    check_dtype: Annotated[list[DType] | None, typer.Option(help=IN_WHICH_DTYPE, show_default=FLOAT32)] = None,
    device: DEVICE = "cpu",
) -> None:
    """
    Convert a Llama checkpoint into an IHA one that computes the same.

    Weight files are carried byte for byte; run the command again after an interruption and it goes on.
    """
    from .converter import convert as run
    from .verifier import DTYPES as TORCH_DTYPES

    with _errors():
        if (schedule == Schedule.hybrid) != (length is not None):
            raise ValueError(f"--schedule {schedule} --length {length}: hybrid takes a length, full takes none.")
        reasons = run(
            source,
            destination,
            _parse_counts(num_pseudo_heads),
            hybrid_length=length,
            rope_phases=rope_phases.value,
            mixing_init=mixing_init.value,
            mixing_init_std=mixing_init_std,
            seed=seed,
            revision=revision,
            gguf_dtype=TORCH_DTYPES[gguf_dtype.value],
            link=link,
            overwrite=overwrite,
        )
    console.print(f"Converted: {destination}", highlight=False)
    if reasons:
        console.print("Not the function of the source, as asked for:", highlight=False)
        for reason in reasons:
            console.print(f"  {reason}", highlight=False)
    elif check:
        console.print("Checking, as verify does; --no-check leaves that out.", highlight=False)
        verify(source, destination, check_dtype, device=device, revision=revision)
    else:
        command = ["iha", "verify", source, str(destination), *(("--revision", revision) if revision else ())]
        message = f"The mixing tensors keep the function exactly. To run both models: {shlex.join(command)}"
        console.print(message, highlight=False, soft_wrap=True)


@app.command()
def verify(
    source: SOURCE,
    destination: Annotated[Path, typer.Argument(help="The IHA folder.")],
    dtype: Annotated[list[DType] | None, typer.Option(help=IN_WHICH_DTYPE, show_default=FLOAT32)] = None,
    structure_only: Annotated[
        bool, typer.Option("--structure-only", help="The proof alone, without running the models.")
    ] = False,
    new_tokens: NEW_TOKENS = 64,
    device: DEVICE = "cpu",
    revision: REVISION = None,
    as_json: AS_JSON = False,
) -> None:
    """
    Check that an IHA folder computes what its Llama source computes.

    First the structural proof: every tensor of the source is there byte for byte, and the mixing tensors meet the
    conditions under which the function is Llama's. Then both models run on prompts: a difference counts as rounding
    where no logit moved further than rounding moves one in that dtype, and where greedy decoding took another token
    only if Llama's lead of its own over it was within that. Exit code 0 where all holds, else 1.
    """
    from .verifier import DTYPES as TORCH_DTYPES
    from .verifier import verify as run

    dtypes = tuple(TORCH_DTYPES[name.value] for name in dict.fromkeys(dtype)) if dtype else None
    if structure_only:
        dtypes = ()
    with _errors(as_json):
        result = run(source, destination, dtypes, new_tokens=new_tokens, device=device, revision=revision)
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print(result)
    raise typer.Exit(0 if result.ok else 1)


def _print(result) -> None:
    if result.reasons:
        console.print("Structure: NOT the source's function", highlight=False)
        _print_reasons(result.reasons, "--json has all")
    else:
        console.print(
            f"Structure: proved equal. {result.tensors} tensors byte for byte, mixing keeps the function.",
            highlight=False,
        )
    if result.comparisons:
        _print_comparisons(result.comparisons)
    else:
        console.print("Prompts: none run.", highlight=False)
    console.print("OK" if result.ok else "FAILED", highlight=False)


def _print_reasons(reasons, where_all_are: str) -> None:
    for reason in reasons[:20]:
        console.print(f"  {reason}", highlight=False)
    if len(reasons) > 20:
        console.print(f"  and {len(reasons) - 20} more ({where_all_are})", highlight=False)


def _print_comparisons(comparisons) -> None:
    table = Table(title="On prompts", title_justify="left")
    table.add_column("")
    for comparison in comparisons:
        table.add_column(comparison.dtype, justify="right")
    for label, show in _ROWS:
        table.add_row(label, *(show(comparison) for comparison in comparisons))
    console.print(table)


_ROWS = (
    ("loss, Llama", lambda c: f"{c.loss_source:.6f}"),
    ("loss, IHA", lambda c: f"{c.loss_destination:.6f}"),
    ("largest logit", lambda c: f"{c.largest_logit:.3f}"),
    ("max difference of logits", lambda c: f"{c.max_difference:.2e}"),
    ("mean difference of logits", lambda c: f"{c.mean_difference:.2e}"),
    ("max / largest logit", lambda c: f"{c.max_difference / c.largest_logit:.2e}"),
    ("allowed for rounding", lambda c: f"{c.tolerance:.0e}"),
    ("KL divergence, nats a token", lambda c: f"{c.kl_divergence:.2e}"),
    (
        "prompts with equal greedy tokens",
        lambda c: f"{c.greedy_prompts - len(c.divergences)} of {c.greedy_prompts} x {c.greedy_tokens}",
    ),
    (
        "where they part, Llama's lead there",
        lambda c: ", ".join(f"{d.lead:.1e}" for d in c.divergences) or "-",
    ),
    ("explained by rounding", lambda c: "yes" if c.explained else "NO"),
)


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="IHA checkpoint: a folder or a Hub id.")],
    destination: Annotated[Path, typer.Argument(help="Llama folder to make.")],
    link: Annotated[bool, typer.Option("--link", help="Hard-link the weight files instead of copying.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a destination that is a Llama folder.")
    ] = False,
    check: Annotated[
        bool,
        typer.Option("--check/--no-check", help="Where it is no Llama model's function, run both models on prompts."),
    ] = True,
    device: DEVICE = "cpu",
    revision: REVISION = None,
    as_json: AS_JSON = False,
) -> None:
    """
    Turn an IHA checkpoint back into a plain Llama one, where its function is one.

    That is so where no layer mixes, or mixing is as a conversion made it; other weights may have been trained. Where
    it is not so nothing is written: what is off is named, with how far, and both models run on prompts. Exit code 0
    where the Llama checkpoint is written, else 1.
    """
    from .exporter import export as run
    from .exporter import how_far

    with _errors(as_json):
        reasons = run(source, destination, revision=revision, link=link, overwrite=overwrite)
        comparison = how_far(source, revision, device) if reasons and check else None
    if as_json:
        result = {"ok": not reasons, "reasons": reasons, "comparison": comparison and asdict(comparison)}
        print(json.dumps(result, indent=2))
    elif reasons:
        console.print("Not the function of a Llama model, so nothing is written:", highlight=False)
        _print_reasons(reasons, "--json has all")
        if comparison is not None:
            _print_comparisons([comparison])
    else:
        console.print(f"Written: {destination}. It computes what the IHA model does.", highlight=False, soft_wrap=True)
        if Path(source).is_dir():
            command = shlex.join(["iha", "verify", str(destination), source])
            console.print(f"To run both models: {command}", highlight=False, soft_wrap=True)
    raise typer.Exit(1 if reasons else 0)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="IHA checkpoint: a folder or a Hub id.")],
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder to make: figures as PNG, and index.html, which holds all.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Text whose attention patterns are drawn.")] = None,
    layer: Annotated[
        int | None,
        typer.Option(
            help="Of the graph and the patterns.", show_default="that whose mixing is farthest from plain heads"
        ),
    ] = None,
    head: Annotated[int | None, typer.Option(help="Of the patterns.", show_default="0")] = None,
    revision: REVISION = None,
    as_json: AS_JSON = False,
) -> None:
    """
    Look at what mixing has become: a table of layers, and figures of mixing and attention.

    For each layer: how far mixing is from plain copies of the heads, how many pseudo-heads are effectively distinct,
    and what the collapse reads. Only the mixing tensors are read, but for a prompt. Figures need matplotlib.
    """
    if find_spec("matplotlib") is None:
        print("iha: inspecting needs matplotlib: pip install 'modeling-iha[plot]'", file=sys.stderr)
        raise typer.Exit(1)
    from inspection_iha.page import COLUMNS, LEGEND, cells

    from .inspector import inspect as run

    with _errors(as_json):
        rows = run(model, output_dir, prompt=prompt, layer=layer, head=head, revision=revision)
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    console.print(LEGEND, highlight=False)
    if output_dir is not None:
        console.print(f"Written: {output_dir / 'index.html'}", highlight=False, soft_wrap=True)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="IHA folder, converted or trained.")],
    repo_id: Annotated[str, typer.Argument(help="Repository of the Hub: name/model; made if it is not there.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new one private.")] = False,
) -> None:
    """
    Push an IHA folder to the Hub, where anyone loads it, with this package or without.

    The folder brings its own code, and its card (README.md), whose snippets then name the repository. `hf auth login`
    logs in.
    """
    from .pusher import push as run

    with _errors():
        address = run(folder, repo_id, private=private)
    console.print(f"Pushed: {address}", highlight=False, soft_wrap=True)


@app.command()
def plan(
    model: MODEL,
    length: Annotated[int, typer.Option(min=1, help="N, tokens of a row.")],
    num_pseudo_heads: COUNT = None,
    schedule: SCHEDULE = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many; above 8, machines of 8.")] = 1,
    memory: Annotated[float, typer.Option(help="Of one GPU, in GB.")] = 80,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time on a GPU, or on a group that shares one.")] = 1,
    write: Annotated[Path | None, typer.Option(help="Where to write the Accelerate configuration.")] = None,
    revision: REVISION = None,
    as_json: AS_JSON = False,
) -> None:
    """
    Plan a training: parameters, FLOPs, memory on a GPU, and how to spread it.

    Counted for AdamW with float32 weights and bfloat16 products. The first that fits is taken: one GPU, or FSDP2 over
    all; sequences shared in a ring (context parallelism), or by heads (DeepSpeed's Ulysses) where layers slide; the
    same with weights and optimizer offloaded. Exit code 0 where something fits, else 1.
    """
    from configuration_iha import PRESETS
    from training_iha import plan_training

    with _errors(as_json):
        if write is not None and write.exists():
            raise ValueError(f"--write {write}: exists already. Name another file.")
        config = _config(model, num_pseudo_heads, schedule, length, revision)
        result = plan_training(config, length, gpus, memory, batch)
        if write is not None and result.fits:
            write.write_text(result.accelerate_yaml(), encoding="utf-8")
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        _print_plan(result, write)
        if schedule == Schedule.hybrid and model not in PRESETS:
            command = f"iha convert {model} FOLDER --schedule hybrid --length {length} -p {num_pseudo_heads or 2}"
            command += f" --revision {revision}" if revision else ""
            print(f"\n# The model is made by {command}. Its windows change what it computes: train it on.")
    raise typer.Exit(0 if result.fits else 1)


def _config(model: str, num_pseudo_heads: int | None, schedule: Schedule | None, length: int, revision):
    from transformers import AutoConfig

    import modeling_iha  # noqa: F401  (registers the Auto classes)
    from configuration_iha import PRESETS, IHAConfig, flop_matched_schedule, preset

    if model.endswith(".gguf"):
        raise ValueError(f"{model}: convert it first, and name the folder: iha convert {model} FOLDER")
    if model not in PRESETS and Path(model).is_dir() and not Path(model, "config.json").is_file():
        raise OSError(f"{model}: has no config.json.")
    if model.startswith((".", "/", "~")) and not Path(model).exists():
        raise OSError(f"{model}: no such folder.")
    try:
        config = preset(model) if model in PRESETS else AutoConfig.from_pretrained(model, revision=revision)
    except OSError as error:
        raise OSError(f"{model}: no folder, Hub id or preset ({', '.join(PRESETS)}) with a config: {error}") from error
    # A preset without pseudo-heads of its own is a Llama model's shape.
    if config.model_type == "iha" and "num_pseudo_heads" in PRESETS.get(model, {"num_pseudo_heads": None}):
        for name, value in (("--num-pseudo-heads", num_pseudo_heads), ("--schedule", schedule)):
            if value is not None:
                raise ValueError(f"{name} {value} must be left out: {model} is an IHA model with layers of its own.")
        return config
    size = 2 if num_pseudo_heads is None else num_pseudo_heads
    make = functools.partial(preset, model) if model in PRESETS else functools.partial(IHAConfig.from_llama, config)
    full = make(num_pseudo_heads=size)
    if schedule != Schedule.hybrid:
        return full
    return make(**flop_matched_schedule(full.num_hidden_layers, length, size))


def _print_plan(plan, write: Path | None) -> None:
    def table(title: str, *columns: str) -> Table:
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="right" if column != columns[0] else "left")
        return table

    parameters = table("Parameters", "", "count")
    for part, count in plan.parameters.items():
        parameters.add_row(part, f"{count:,}", end_section=part == "head")
    console.print(parameters)

    flops = table(f"Forward of {plan.sequence_length:,} tokens, TFLOPs", "", "IHA", "plain attention", "ratio")
    rows = [(part, plan.attention[part], plan.plain_attention[part]) for part in ("scores", "mixing")]
    rows += [(part, count, count) for part, count in plan.linear.items() if part != "total"]
    rows.append(("total", *(part["total"] + plan.linear["total"] for part in (plan.attention, plan.plain_attention))))
    for part, ours, plain in rows:
        ratio = f"{ours / plain:.2f}" if plain else "-"
        flops.add_row(part, f"{ours / 1e12:,.2f}", f"{plain / 1e12:,.2f}", ratio, end_section=part == "head")
    console.print(flops)

    memory = table("Memory on each GPU at its peak", "", "GB")
    for part, size in plan.memory.items():
        memory.add_row(part, f"{size / 1e9:.1f}", end_section=part == "loss")
    memory.add_row("total", f"{plan.total_memory / 1e9:.1f}")
    memory.add_row("there is", f"{plan.available / 1e9:.1f}")
    console.print(memory)

    if not plan.fits:
        console.print(f"Does not fit. The above is the least, of {plan.layout.describe()}.", highlight=False)
        if plan.enough_gpus is not None:
            console.print(f"{plan.enough_gpus} GPUs would do.", highlight=False)
        if plan.longest is not None:
            console.print(f"On {plan.gpus}, rows of {plan.longest} tokens would do.", highlight=False)
        return
    console.print(f"Plan: {plan.layout.describe()}.", highlight=False)
    if plan.host_memory:
        console.print(f"Main memory on each machine: {plan.host_memory / 1e9:.0f} GB.", highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)
    arguments = "\n".join(f"{name}: {json.dumps(value)}" for name, value in plan.arguments.items())
    print(f"\n# Of the training's own configuration:\n{arguments}\n")
    if write is None:
        print(f"# For accelerate launch --config_file:\n{plan.accelerate_yaml()}", end="")
    else:
        print(f"Written: {write}")


@app.command()
def bench(
    model: MODEL,
    length: Annotated[int, typer.Option(min=2, help="Tokens of the prompt, and of a row in training.")] = 1024,
    num_pseudo_heads: COUNT = None,
    schedule: SCHEDULE = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens decoded after the prompt.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Rows at a time.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="In each both models have their turn.")] = 3,
    dtype: Annotated[
        DType | None, typer.Option(help="Of weights and products.", show_default="float32 on a CPU, else bfloat16")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Where the models run.", callback=_check_device, show_default="the GPU if there is one"),
    ] = None,
    revision: REVISION = None,
    as_json: AS_JSON = False,
) -> None:
    """
    Measure on this machine: IHA beside its Llama source, in tokens per second and in memory.

    Prefill and decoding are what generate does with a prompt; a training step is forward and backward, whose optimizer
    costs both the same. Memory is the peak above the weights and, in training, their gradients. Weights are random:
    speed does not depend on them.
    """
    import torch

    from .speed import DEVICES
    from .speed import bench as run
    from .verifier import DTYPES as TORCH_DTYPES

    found = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(device or (found if found and found.type in DEVICES else "cpu"))
    dtype = dtype or (DType.float32 if device.type == "cpu" else DType.bfloat16)
    with _errors(as_json):
        config = _config(model, num_pseudo_heads, schedule, length, revision)
        settings = {"batch": batch, "new_tokens": new_tokens, "rounds": rounds}
        measured = run(config, length, **settings, dtype=TORCH_DTYPES[dtype.value], device=str(device))
    name = f"cpu, {torch.get_num_threads()} threads"
    if device.type != "cpu":
        name = torch.get_device_module(device).get_device_name(device)
    counts = sorted({config.get_num_pseudo_heads(layer) for layer in range(config.num_hidden_layers)})
    layers = f"P = {', '.join(map(str, counts))}"
    if config.sliding_window:
        layers += f", windows of {config.sliding_window}"
    if as_json:
        about = {"model": model, "revision": revision, "length": length, **settings, "dtype": dtype.value}
        about |= {name: getattr(config, name) for name in ("num_pseudo_heads", "layer_types", "sliding_window")}
        about |= {"device": name, "torch": torch.__version__}
        print(json.dumps({**about, "measured": [{**asdict(row), "ratio": row.ratio} for row in measured]}, indent=2))
        return
    title = f"{model}, {layers}; {length} tokens, batch {batch}, {dtype.value}, {name}"
    table = Table(title=title, title_justify="left")
    for column in ("", "Llama", "IHA", "IHA / Llama"):
        table.add_column(column, justify="right" if column else "left")
    for row in measured:
        shown = (
            f"{value:,.1f} {row.unit}" if value >= 10 else f"{value:.3f} {row.unit}" for value in (row.llama, row.iha)
        )
        spread = f" ({min(row.ratios):.2f}-{max(row.ratios):.2f})" if len(row.ratios) > 1 else ""
        table.add_row(row.what, *shown, f"{row.ratio:.2f}{spread}")
    console.print(table)
    console.print("Above 1 IHA is faster; in memory it takes more. In brackets: the least and most of the rounds.")


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    short_help="`transformers serve` for IHA models: an OpenAI-compatible server.",
)
def serve(context: typer.Context):
    """
    `transformers serve`, with all its arguments, for IHA models too; talk to it with `transformers chat` or any
    OpenAI client. It needs pip install 'modeling-iha[serve]'.
    """
    missing = [name for name in ("fastapi", "uvicorn", "openai") if find_spec(name) is None]
    if missing:
        print(f"iha: serving needs {', '.join(missing)}: pip install 'modeling-iha[serve]'", file=sys.stderr)
        raise typer.Exit(1)
    from transformers.cli.serving import model_manager
    from transformers.cli.transformers import app as transformers_app

    import modeling_iha

    # It looks a model's class up in the namespace of Transformers, and nowhere else.
    model_manager.transformers.IHAForCausalLM = modeling_iha.IHAForCausalLM
    transformers_app(["serve", *context.args], prog_name="iha")


def _parse_counts(text: str) -> int | list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be a number, or numbers with commas between them.") from error
    return counts[0] if len(counts) == 1 else counts


@contextmanager
def _errors(as_json: bool = False):
    """Errors that a user can mend are one line, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        message = " ".join(str(error).split())
        if as_json:
            print(json.dumps({"ok": False, "error": message}, indent=2))
        print(f"iha: {message}", file=sys.stderr)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    app()
