"""`diffuse query`: one question, its answer as it comes, and where the time went."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cli import options as opt
from cli import show
from cli.answer import End, Piece, Question
from cli.runtime import run_asking
from cli.target import Target, open_answerer


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
    network: opt.NetworkOption = opt.DEFAULT_NETWORK,
    scope: opt.ScopeOption = opt.Scope.AUTO,
    psk_file: opt.PskFileOption = None,
    key: opt.KeyOption = None,
    token_file: opt.TokenFileOption = None,
    threads: opt.ThreadsOption = None,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    draft: opt.DraftOption = None,
    json: opt.JsonOption = False,
) -> None:
    """Ask one question of a gateway (--url) or, running the engine here, of nodes (--node) or a swarm (--bootstrap).

    The answer goes to standard output, the line of timings to standard error.
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
    run_asking(_ask_as_json(target, question) if json else _ask(target, question))


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
