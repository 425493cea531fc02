"""`diffuse chat`: a conversation. Ctrl+C stops an answer, Ctrl+D leaves.

The main thread waits for the person; links live in a background loop. Nothing typed is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from cli import failures, show
from cli import options as opt
from cli.answer import Answerer, ChatMessage, End, Piece, Question, Timings
from cli.attachments import Kind, attached
from cli.background import BackgroundLoop
from cli.failures import CommandError
from cli.target import Target, open_answerer
from routing.tls_files import TlsFiles

HELP = """\
/image FILE   show a picture with the next message
/audio FILE   let it hear a recording with the next message
/reset        forget the conversation
/help         this
Ctrl+C        stop the answer
Ctrl+D        leave"""
ATTACHING: dict[str, Kind] = {"/image": "image", "/audio": "audio"}


def chat(
    url: opt.UrlOption = None,
    api_key: opt.ApiKeyOption = None,
    node: opt.NodesOption = None,
    bootstrap: opt.BootstrapOption = None,
    model: opt.AskModelOption = None,
    system: opt.SystemOption = None,
    max_tokens: opt.MaxTokensOption = None,
    temperature: opt.TemperatureOption = None,
    seed: opt.SeedOption = None,
    ends: opt.EndsOption = opt.Ends.LOCAL,
    local_layers: opt.LocalLayersOption = "1:0",
    wire: opt.WireOption = opt.Wire.AUTO,
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
) -> None:
    """Talk with a model behind a gateway (--url) or, running the engine here, on nodes (--node, --bootstrap)."""
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
        tls=TlsFiles(tls_cert, tls_key, tls_ca),
    )
    loop = BackgroundLoop()
    try:
        with loop.entered(open_answerer(target)) as answerer:
            Conversation(answerer, loop, system, max_tokens, temperature, seed, draft).hold()
    finally:
        loop.close()


class Conversation:
    """What was said so far, and the loop of asking and answering."""

    def __init__(
        self,
        answerer: Answerer,
        loop: BackgroundLoop,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        draft: str | None = None,
    ) -> None:
        self._answerer = answerer
        self._loop = loop
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages: list[ChatMessage] = list(self._opening)
        self._attached: list[dict[str, Any]] = []  # to the next message
        self._choices: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "draft": draft,
        }
        self._is_interactive = opt.standard_input().isatty()

    def hold(self) -> None:
        """Read lines until end-of-file."""
        if self._is_interactive:
            show.note(f"{self._answerer.model}: /help for help, Ctrl+D to leave")
        for line in _lines(self._is_interactive):
            match line.strip():
                case "":
                    continue
                case "/reset":
                    self._messages, self._attached = list(self._opening), []
                    show.note("forgotten")
                case "/help":
                    show.note(HELP)
                case command if self._is_interactive and command.partition(" ")[0] in ATTACHING:
                    self._attach(command)
                case command if command.startswith("/") and self._is_interactive and " " not in command:
                    show.note(f"no command {show.printable(command)}; /help lists them")
                case text:
                    self._ask(text)

    def _ask(self, text: str) -> None:
        """One turn; a turn that failed or was stopped before a word came is taken back."""
        content = [*self._attached, {"type": "text", "text": text}] if self._attached else text
        self._messages.append({"role": "user", "content": content})
        said: list[str] = []
        try:
            self._answer(said)
        except KeyboardInterrupt:
            show.note("stopped")
        except Exception as error:
            if not self._is_interactive or isinstance(error, BrokenPipeError):
                raise
            failures.report(error)
        if said:
            self._attached = []
            self._messages.append({"role": "assistant", "content": "".join(said)})
        else:
            self._messages.pop()

    def _attach(self, command: str) -> None:
        name, _, file = command.partition(" ")
        try:
            self._attached.append(attached(Path(file.strip()).expanduser(), ATTACHING[name]))
        except CommandError as error:
            failures.report(error)
        else:
            show.note("goes with the next message")

    def _answer(self, said: list[str]) -> None:
        question = Question(tuple(self._messages), **self._choices)
        with (
            _screen() as (write, note),
            closing(self._loop.iterate(self._answerer.answer(question))) as pieces,
        ):
            for piece in pieces:
                match piece:
                    case Piece():
                        said.append(piece.text)
                        write(piece.text)
                        note(piece.timings)
                    case End():
                        ending = show.timings_line(piece.timings)
        show.note(ending)


@contextmanager
def _screen() -> Iterator[tuple[Callable[[str], None], Callable[[Timings | None], None]]]:
    """How to show text and numbers: redrawn on a terminal, plain into a pipe."""
    console = show.console()
    if console.is_terminal:
        from cli.live import LiveAnswer

        with LiveAnswer(console) as live:
            yield live.write, live.note
    else:
        with show.whole_lines() as write:
            yield write, lambda timings: None


def _lines(is_interactive: bool) -> Iterator[str]:
    """Lines as they are typed, with editing and recall; Ctrl+C on a prompt clears it."""
    if not is_interactive:
        yield from opt.standard_input()
        return
    with suppress(ImportError):
        import readline  # noqa: F401 - importing it gives input() editing and the lines typed before
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            show.note("\n(Ctrl+D leaves)")
        except EOFError:
            show.note("")
            return
