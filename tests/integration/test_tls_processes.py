"""A swarm under mutual TLS with an HTTPS gateway, in real processes: the same text, and words for who is left out."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from openai import DefaultHttpxClient, OpenAI

from routing.tls_files import TlsFiles
from tests.chaos.model import NUM_LAYERS, WholeAnswers, long_answers, write_model
from tests.support.certificates import Authority
from tests.support.nursery import Nursery
from tests.support.processes import Processes, until

NUM_TOKENS = 12


def flags_of(files: TlsFiles) -> tuple[str, ...]:
    given = {"--tls-cert": files.cert, "--tls-key": files.key, "--tls-ca": files.ca}
    return tuple(part for flag, path in given.items() if path for part in (flag, str(path)))


@pytest.mark.processes
def test_a_swarm_under_tls_answers_as_the_model_does_and_lets_nobody_else_in(
    tmp_path: Path, nursery: Nursery
) -> None:
    model = write_model(tmp_path / "model")
    ((prompt, text),) = long_answers(WholeAnswers(model), 1, NUM_TOKENS).items()
    ca = Authority(tmp_path)
    with Processes(nursery) as processes:
        sentinel = processes.sentinel(*flags_of(ca.files("sentinel")))
        flags = ("--dtype", "float32", *flags_of(ca.files("node")))
        processes.hosts(str(model), "1:4", f"4:{NUM_LAYERS}", flags=flags, bootstraps=[sentinel])
        gateway = processes.serve(
            str(model), [], *flags_of(ca.files("gateway")), "--name", "tiny", bootstraps=[sentinel]
        )
        url = gateway.ready["url"]
        assert url.startswith("https://")

        trusting = ssl.create_default_context(cafile=str(ca.path))
        with (
            DefaultHttpxClient(verify=trusting) as http,
            OpenAI(base_url=url, api_key="-", http_client=http) as client,
        ):
            until(lambda: http.get(url.replace("/v1", "/ready")).status_code == 200)
            answer = client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": prompt}],
                max_tokens=NUM_TOKENS,
                temperature=0,
            )
        assert answer.choices[0].message.content == text

        asked = processes.run(
            "query", "-p", prompt, "--url", url, "--tls-ca", str(ca.path), "--max-tokens", "2"
        )
        assert asked.returncode == 0, asked.stderr
        own = flags_of(ca.files("doctor"))
        told = processes.run("doctor", "--bootstrap", sentinel.address, *own)
        assert "links are dialled by wss and verified" in told.stdout
        assert "a node here would announce that" in told.stdout  # dialled back, by wss
        assert "through it to ourselves and back" in told.stdout
        told = processes.run("doctor", "--bootstrap", sentinel.address)
        assert "it speaks TLS only: give --tls-ca" in told.stdout


@pytest.mark.parametrize("command", ["host", "sentinel", "serve"])
def test_a_certificate_that_will_not_do_is_one_line_that_names_the_flag(tmp_path: Path, command: str) -> None:
    expired = Authority(tmp_path).expired("old")
    joining = ("--node", f"{'ab' * 32}@127.0.0.1:1") if command == "serve" else ()
    with Processes() as processes:
        done = processes.run(command, "--listen", "127.0.0.1:0", *joining, *flags_of(expired))
    assert done.returncode == 1
    assert f"diffuse: --tls-cert {expired.cert} has expired on" in done.stderr
    assert "Traceback" not in done.stderr
