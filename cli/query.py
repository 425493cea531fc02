"""`diffuse query`: one question, its answer as it comes, and where the time went; or a picture, video or sound."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.answer import End, Piece, Question
from cli.draw import draw
from cli.drawing import Order
from cli.runtime import run_asking
from cli.target import Target, chosen, open_answerer, open_drawer


def query(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask; - reads standard input.")],
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    model: opt.AskModelOption = None,
    system: opt.SystemOption = None,
    max_tokens: opt.MaxTokensOption = None,
    temperature: opt.TemperatureOption = None,
    seed: opt.SeedOption = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")
    ] = False,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    wire: opt.WireOption = opt.Wire.AUTO,
    per_block: opt.PerBlockOption = False,
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: opt.KeyOption = None,
    token_file: opt.TokenFileOption = None,
    threads: opt.ThreadsOption = None,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    draft: opt.DraftOption = None,
    steps: opt.StepsOption = None,
    size: opt.SizeOption = None,
    guidance: opt.GuidanceOption = None,
    negative: opt.NegativeOption = None,
    patches: opt.PatchesOption = None,
    warmup: opt.WarmupOption = None,
    extrapolate: opt.ExtrapolateOption = False,
    two_streams: opt.TwoStreamsOption = False,
    frames: opt.FramesOption = None,
    seconds: opt.SecondsOption = None,
    out: opt.OutOption = None,
    json: opt.JsonOption = False,
) -> None:
    """Ask one question of a gateway (--url) or, running the engine here, of nodes (--node) or a swarm (--bootstrap).

    The answer goes to standard output, the line of timings to standard error. What a model of pictures, videos or
    sounds makes goes into a file, whose name is printed.
    """
    target = Target(
        url,
        api_key,
        model,
        tuple(node or ()),
        ends,
        local_layers,
        wire,
        network,
        psk_file,
        threads,
        tuple(bootstrap or ()),
        scope,
        key,
        token_file,
        weights,
        runner,
        per_block,
    )
    text = opt.read_prompt(prompt)
    question = Question(
        opt.messages_of(text, system),
        raw_prompt=text if raw else None,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        draft=draft,
    )
    order = Order(
        text,
        seed=seed or 0,
        steps=steps,
        size=opt.parse_pixels(size),
        guidance=guidance,
        negative=negative,
        patches=patches,
        warmup=warmup,
        extrapolate=extrapolate,
        two_streams=two_streams,
        frames=frames,
        seconds=seconds,
        wire=None if wire is opt.Wire.AUTO else wire.value,
    )
    run_asking(_query(target, question, order, out, as_json=json, has_system=system is not None))


async def _query(
    target: Target, question: Question, order: Order, out: Path | None, *, as_json: bool, has_system: bool
) -> None:
    drawing_flags = _drawing_flags(order, out) | {"--per-block": target.per_block}
    wants_drawing = any(value not in (None, False) for value in drawing_flags.values())
    target, output = await chosen(target, wants_drawing=wants_drawing)
    if output == "text":
        _refuse_flags(drawing_flags, "is for models that make pictures, videos or sounds")
        await (_ask_as_json(target, question) if as_json else _ask(target, question))
        return
    _refuse_flags(_text_flags(question, has_system=has_system), "is for models that make text")
    async with open_drawer(target, output) as drawer:
        await draw(drawer, order, out, as_json=as_json)


def _refuse_flags(given: dict[str, object], why: str) -> None:
    """Refuse a flag that this model has no use for: a wish must not be lost in silence."""
    for flag, value in given.items():
        if value not in (None, False):
            raise typer.BadParameter(f"it {why}", param_hint=f"'{flag}'")


def _text_flags(question: Question, *, has_system: bool) -> dict[str, object]:
    return {
        "--max-tokens": question.max_tokens,
        "--temperature": question.temperature,
        "--raw": question.raw_prompt is not None,
        "--draft": question.draft,
        "--system": has_system,
    }


def _drawing_flags(order: Order, out: Path | None) -> dict[str, object]:
    return {
        "--steps": order.steps,
        "--size": order.size,
        "--guidance": order.guidance,
        "--negative": order.negative,
        "--patches": order.patches,
        "--warmup": order.warmup,
        "--extrapolate": order.extrapolate,
        "--two-streams": order.two_streams,
        "--frames": order.frames,
        "--seconds": order.seconds,
        "--out": out,
    }


async def _ask(target: Target, question: Question) -> None:
    async with open_answerer(target) as answerer, aclosing(answerer.answer(question)) as pieces:
        with show.whole_lines() as write:
            async for piece in pieces:
                match piece:
                    case Piece():
                        write(piece.text)
                    case End():
                        ending = show.timings_line(piece.timings)
        show.note(ending)


async def _ask_as_json(target: Target, question: Question) -> None:
    texts: list[str] = []
    async with open_answerer(target) as answerer, aclosing(answerer.answer(question)) as pieces:
        async for piece in pieces:
            match piece:
                case Piece():
                    texts.append(piece.text)
                case End():
                    show.print_json(_as_object(answerer.model, "".join(texts), piece))


def _as_object(model: str, text: str, end: End) -> dict[str, Any]:
    per_token = end.timings.per_token_s
    return {
        "model": model,
        "text": text,
        "finish_reason": end.finish_reason,
        "usage": end.usage(),
        "timings": asdict(end.timings) | {"per_token_s": per_token},
        "replays": end.replays,
        "system_fingerprint": end.fingerprint,
    }
