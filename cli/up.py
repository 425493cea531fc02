"""`diffuse up`: a whole swarm on this machine, from one command, and nothing left of it afterwards.

The parent imports no torch: it plans, starts children, shows their progress and ends them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import typer

from cli import options as opt
from cli import show
from cli import up_flags as flags
from cli.children import OWN_WORDS, Child, Children, Event, thread_environment
from cli.failures import CommandError
from cli.inherited import child_environment
from cli.layout import NodePlan, plan_nodes, threads_each
from cli.loading import LoadingView
from cli.setting_names import variable_of
from cli.settings_command import ConfigOption, known_settings
from cli.telling import Teller

DIFFUSION_KINDS = ("picture", "video", "audio")
PICTURES = "tiny-pictures"  # comes with this program, and opens in a second
NO_PICTURES = "none"
PICTURE_PROMPT = "a large red circle on a blue background"
QUESTION = '"messages": [{"role": "user", "content": "Name three rivers of Europe."}]'
VECTORS = ("embeddings", '"input": "The quick brown fox."')
TRIALS = {  # by what a model is: where it is asked, and a first request
    "text": ("chat/completions", f'"stream": true, "temperature": 0.2, {QUESTION}'),
    "encoder": VECTORS,
    "embedding": VECTORS,
    "picture": ("images/generations", '"prompt": "a red circle", "seed": 7'),
    "video": ("videos", '"prompt": "a red circle", "seed": 7'),
    "audio": ("audio/speech", '"input": "rain on a roof", "seed": 7'),
}


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    """What was asked for."""

    model: str
    num_nodes: int
    ends: opt.Ends
    local_layers: tuple[int, int]
    threads: int
    weights: opt.Weights
    runner: opt.Runner
    draft: opt.Draft | None
    pictures: str | None = None  # another model, held by a node of its own
    port: int = 0  # as asked for: on any free one the gateway keeps nothing

    @property
    def forms(self) -> list[str]:
        """Flags that nodes and gateway share."""
        return ["--weights", self.weights, "--runner", self.runner, "--threads", str(self.threads)]


def up(
    ctx: typer.Context,
    config: ConfigOption = None,
    nodes: flags.Nodes = 3,
    port: flags.Port = 8000,
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    pictures: flags.Pictures = PICTURES,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    draft: opt.DraftOption = None,
    weights: opt.WeightsOption = opt.Weights.AUTO,
    runner: opt.RunnerOption = opt.Runner.AUTO,
    threads: flags.Threads = None,
    state_dir: opt.StateDirOption = None,
    cache_dir: opt.CacheDirOption = None,
    log_level: opt.LogLevelOption = opt.LogLevel.WARNING,
    log_format: opt.LogFormatOption = opt.LogFormat.TEXT,
) -> None:
    """Run a whole swarm here: nodes, and a gateway with an OpenAI-compatible API. Ctrl+C ends it."""
    from cli.runtime import run_until_signal

    beside = None if pictures in (NO_PICTURES, model) else pictures
    each = threads or threads_each(nodes + 1 + (beside is not None))
    layers = opt.parse_local_layers(local_layers)
    plan = SwarmPlan(model, nodes, ends, layers, each, weights, runner, draft, beside, port)
    with _take_port(port) as listener:
        swarm = _Swarm(plan, listener, partial(_environment, ctx))
        asyncio.run(run_until_signal(swarm.run(), on_second=swarm.kill))
    show.note("stopped")


def prepare(
    model: opt.ModelOption = opt.DEFAULT_MODEL,
    until_eof: opt.UntilEofOption = False,
    events: opt.EventsOption = opt.Events.TEXT,
) -> None:
    """Fetch or convert a model if need be, and tell how many layers it has."""
    if until_eof:
        from cli.lifeline import end_with_parent

        end_with_parent()
    from cli.runtime import heavy_imports

    with heavy_imports():
        from slicing.any_model import kind_of_model, num_layers_of, open_model

    teller = Teller(events)

    def progress(stage: str, done_bytes: int, total_bytes: int) -> None:
        teller.tell(
            {"event": "progress", "stage": stage, "done_bytes": done_bytes, "total_bytes": total_bytes}
        )

    opened = open_model(model, progress=progress)
    kind = kind_of_model(opened)
    teller.tell(
        {"event": "prepared", "model": opened.name, "num_layers": num_layers_of(opened), "kind": kind}
    )


def _environment(ctx: Any, command: str) -> dict[str, str]:
    """What the file or a flag of ours says for every child, as variables."""
    passed = {name: ctx.params[name] for name in ("state_dir", "cache_dir", "log_level", "log_format")}
    told = {variable_of(name): str(value) for name, value in passed.items() if value is not None}
    return child_environment(command, known_settings(ctx)) | told


def _take_port(port: int) -> socket.socket:
    """Hold the port from now on, so that a busy one costs nobody a long wait."""
    from cli.ports import bind_loopback, cannot_listen

    try:
        return bind_loopback(port)
    except OSError as error:
        raise cannot_listen("127.0.0.1", port, error, "--port") from error


class _Swarm:
    """The children of one `diffuse up`, from the first to the last."""

    def __init__(
        self, plan: SwarmPlan, listener: socket.socket, environment: Callable[[str], dict[str, str]]
    ) -> None:
        """`environment` says what a child gets besides ours, by its command."""
        self._plan = plan
        self._listener = listener
        self._environment = environment
        self._children = Children()

    async def run(self) -> None:
        """Start everything, say where it is, and serve until a child ends or we are cancelled."""
        async with self._children:
            with LoadingView() as view:
                prepared = await self._prepare(view)
                nodes = await self._start_nodes(view, prepared)
                ready = await self._start_gateway(view, nodes, prepared)
            _announce(ready, prepared, self._plan.pictures)
            raise await self._children.first_crash()

    def kill(self) -> None:
        """End the children without waiting for goodbyes."""
        self._children.kill_all()

    async def _prepare(self, view: LoadingView) -> Event:
        """Have the model fetched and converted once, before many processes want it."""
        child = await self._start("model", ["prepare", "--model", self._plan.model], view)
        prepared = await child.wait_for("prepared")
        await self._children.release(child)
        view.done("model", f"{prepared['num_layers']} layers")
        return prepared

    async def _start_nodes(self, view: LoadingView, prepared: Event) -> list[str]:
        plans = plan_nodes(
            prepared["num_layers"],
            self._plan.num_nodes,
            local_layers=self._local_layers(prepared),
            is_thin=self._plan.ends is opt.Ends.REMOTE,
        )
        starts = [(plan.name, self._host_arguments(plan)) for plan in plans]
        if self._plan.pictures is not None:
            starts.append(("pictures", self._pictures_arguments(self._plan.pictures)))
        children = [await self._start(name, arguments, view) for name, arguments in starts]
        waits = [asyncio.create_task(self._wait_node(child, view)) for child in children]
        try:
            return await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_node(self, child: Child, view: LoadingView) -> str:
        ready = await child.wait_for("ready")
        view.done(child.name, f"layers {ready['layers']} in {show.seconds(ready.get('load_s', 0.0))}")
        return str(ready["address"])

    async def _start_gateway(self, view: LoadingView, nodes: list[str], prepared: Event) -> Event:
        plan = self._plan
        arguments = ["serve", "--model", plan.model, "--ends", plan.ends, *plan.forms]
        arguments += ["--model", plan.pictures] if plan.pictures else []
        arguments += ["--local-layers", ":".join(map(str, self._local_layers(prepared)))]
        arguments += ["--draft", plan.draft] if plan.draft else []
        arguments += ["--listen", f"127.0.0.1:{plan.port}", "--listen-fd", str(self._listener.fileno())]
        arguments += [part for node in nodes for part in ("--node", node)]
        child = await self._start("gateway", arguments, view, pass_fds=(self._listener.fileno(),))
        ready = await child.wait_for("ready")
        self._listener.close()  # the gateway has it: should that end, clients are refused at once
        if missing := ready.get("missing_layers"):
            raise CommandError(f"the gateway reaches no node for layers {show.ranges(missing)}")
        view.done("gateway", "ready")
        return ready

    def _local_layers(self, prepared: Event) -> tuple[int, int]:
        """How many layers stay at home: none of a diffusion model's blocks do. Raises `CommandError`."""
        if prepared.get("kind", "text") not in DIFFUSION_KINDS:
            return self._plan.local_layers
        if self._plan.ends is opt.Ends.REMOTE or self._plan.draft:
            raise CommandError(f"--ends remote and --draft are for text models; {prepared['model']} is none")
        return 0, 0

    def _host_arguments(self, plan: NodePlan) -> list[str]:
        arguments = ["host", "--model", self._plan.model, "--layers", plan.layers, "--listen", "127.0.0.1:0"]
        arguments += [*self._plan.forms, "--drain", "0"]  # the gateway goes first
        arguments += ["--weights", self._plan.weights, "--runner", self._plan.runner]
        return [*arguments, "--hold-ends"] if plan.hold_ends else arguments

    def _pictures_arguments(self, model: str) -> list[str]:
        listen = ["--listen", "127.0.0.1:0"]
        return ["host", "--model", model, *listen, "--threads", str(self._plan.threads), "--drain", "0"]

    async def _start(
        self, name: str, arguments: list[str], view: LoadingView, pass_fds: tuple[int, ...] = ()
    ) -> Child:
        return await self._children.start(
            name,
            [*arguments, "--events", "json", "--until-eof"],
            on_event=view.listener(name),
            on_words=lambda line: _pass_on(name, line),
            environment=thread_environment(self._plan.threads) | self._environment(arguments[0]),
            pass_fds=pass_fds,
        )


def _pass_on(name: str, line: str) -> None:
    """Show a child's warnings; its last words come with the report of its end."""
    if not line.startswith((OWN_WORDS, "stopped")):
        show.note(f"{name}: {line}")


def _announce(ready: Event, prepared: Event, pictures: str | None) -> None:
    url = str(ready["url"])
    models: list[Any] = ready.get("models") or [prepared["model"]]
    show.out("")
    show.out(f"page      {url.removesuffix('/v1')}/")
    show.out(f"base_url  {url}")
    show.out(f"models    {', '.join(map(str, models))}")
    path, asked = TRIALS.get(prepared.get("kind", "text"), TRIALS["text"])
    if prepared.get("kind") == "speech":
        show.out(f"try       curl {url}/audio/transcriptions -F model={models[0]} -F file=@recording.wav")
    else:
        body = f'{{"model": "{models[0]}", {asked}}}'
        show.out(f"try       curl -N {url}/{path} -H 'Content-Type: application/json' -d '{body}'")
    if pictures is not None and len(models) > 1:
        command = f"{show.own_name()} query --url {url} --model {models[1]}"
        show.out(f"          {command} --prompt '{PICTURE_PROMPT}' --seed 7")
    show.out("stop      Ctrl+C")
