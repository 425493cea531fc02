"""`diffuse query`: one question, its answer as it comes, and where the time went; or a picture, sound or transcript."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.answer import End, Piece, Question
from cli.attachments import with_attachments
from cli.draw import draw
from cli.drawing import EMBEDDINGS, TRANSCRIPTS, Order
from cli.runtime import run_asking
from cli.target import Target, chosen, open_answerer, open_drawer
from routing.tls_files import TlsFiles


def query(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="What to ask; - reads standard input.")
    ] = None,
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    model: opt.AskModelOption = None,
    system: opt.SystemOption = None,
    max_tokens: opt.MaxTokensOption = None,
    temperature: opt.TemperatureOption = None,
    seed: opt.SeedOption = None,
    image: opt.ImagesOption = None,
    audio: opt.AudiosOption = None,
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
    tls_cert: opt.TlsCertOption = None,
    tls_key: opt.TlsKeyOption = None,
    tls_ca: opt.AskTlsCaOption = None,
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
        TlsFiles(tls_cert, tls_key, tls_ca),
    )
    text = opt.read_prompt(prompt) if prompt is not None else ""
    files = _Files(tuple(image or ()), tuple(audio or ()), out)
    if prompt is None and not files.recordings:
        raise typer.BadParameter("say what to ask", param_hint="'--prompt'")
    if raw and (image or audio):
        raise typer.BadParameter("pictures and recordings need the chat template", param_hint="'--raw'")
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
        temperature=temperature,
    )
    run_asking(_query(target, question, order, files, as_json=json, system=system))


@dataclass(frozen=True, slots=True)
class _Files:
    """What goes in besides words, and where what comes out is kept."""

    pictures: tuple[Path, ...]
    recordings: tuple[Path, ...]
    out: Path | None


async def _query(
    target: Target, question: Question, order: Order, files: _Files, *, as_json: bool, system: str | None
) -> None:
    out, has_system = files.out, system is not None
    drawing_flags = _drawing_flags(order, out) | {"--per-block": target.per_block}
    is_mute = bool(files.recordings) and not order.prompt
    wants_drawing = any(value not in (None, False) for value in drawing_flags.values()) and not is_mute
    target, output = await chosen(target, wants_drawing=wants_drawing, wants_words=is_mute)
    if output == TRANSCRIPTS:
        await _write_down(target, question, order, files, as_json=as_json, has_system=has_system)
        return
    if is_mute:
        raise typer.BadParameter("say what to ask about the recording", param_hint="'--prompt'")
    if output == "text":
        _refuse_flags(drawing_flags, "is for models that make pictures, videos or sounds")
        content = with_attachments(order.prompt, files.pictures, files.recordings)
        question = replace(question, messages=opt.messages_of(content, system))
        await (_ask_as_json(target, question) if as_json else _ask(target, question))
        return
    if output == EMBEDDINGS:
        flags = drawing_flags | _text_flags(question, output, files, has_system=has_system)
        from cli.vectors import show_vector  # it reads answers over HTTP, which `--help` need not load

        _refuse_flags(flags, "is not for models that make vectors")
        await show_vector(target, order.prompt, as_json=as_json)
        return
    async with open_drawer(target, output) as drawer:
        text_flags = _text_flags(question, drawer.output, files, has_system=has_system)
        _refuse_flags(text_flags, "is for models that make text")
        await draw(drawer, order, out, as_json=as_json)


async def _write_down(
    target: Target, question: Question, order: Order, files: _Files, *, as_json: bool, has_system: bool
) -> None:
    """One recording; the prompt, where there is one, says how things are spelled."""
    from cli.transcript import show_transcript

    flags = _text_flags(question, "audio", files, has_system=has_system) | _drawing_flags(order, None)
    flags |= {"--image": bool(files.pictures), "--per-block": target.per_block}
    del flags["--image, --audio"]
    _refuse_flags(flags, "is not for models that write recordings down")
    if len(files.recordings) != 1:
        raise typer.BadParameter("give one recording", param_hint="'--audio'")
    wishes = {"prompt": order.prompt, "temperature": question.temperature, "seed": question.seed}
    await show_transcript(target, files.recordings[0], files.out, as_json=as_json, **wishes)


def _refuse_flags(given: dict[str, object], why: str) -> None:
    """Refuse a flag that this model has no use for: a wish must not be lost in silence."""
    for flag, value in given.items():
        if value not in (None, False):
            raise typer.BadParameter(f"it {why}", param_hint=f"'{flag}'")


def _text_flags(question: Question, output: str, files: _Files, *, has_system: bool) -> dict[str, object]:
    return {
        "--max-tokens": question.max_tokens,
        "--temperature": None
        if output == "audio"
        else question.temperature,  # some sounds are made of tokens
        "--raw": question.raw_prompt is not None,
        "--draft": question.draft,
        "--system": has_system,
        "--image, --audio": bool(files.pictures or files.recordings),
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
