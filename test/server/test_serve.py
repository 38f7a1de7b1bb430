"""The server as an operator starts it: scripts/serve.sh, real HTTP, the openai client, and the end of every process."""

from __future__ import annotations

import signal
import socket
import threading
import time
from pathlib import Path

import openai
import pytest
import requests
from support.engines import ROOT
from support.servers import Running, free_port

PROMPT = "import numpy as np\n\n\nclass Matrix:\n    def __init__(self, rows, cols"
CHAT = [{"role": "user", "content": "class Stack"}]


class Script(Running):
    """One run of serve.sh, which is signalled alone, as systemd or a terminal's Ctrl-C would reach it."""

    def __init__(self, log: Path, *flags: str, threads: int = 1):
        port = free_port()
        command = [ROOT / "scripts/serve.sh", "--port", str(port), *flags]
        super().__init__(command, port, log, {"OMP_NUM_THREADS": str(threads)})

    def wait_until_ready(self, limit: float = 180) -> None:
        end = time.monotonic() + limit
        while "ready after" not in self.text():
            assert self.process.poll() is None, self.text()[-2000:]
            assert time.monotonic() < end, "not ready in time"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = Script(tmp_path_factory.mktemp("serve") / "log", "--chunked-prefill-size", "256")
    try:
        running.wait_until_ready()
        yield running
    finally:
        if running.process.poll() is None:
            running.stop()


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.base + "/v1", api_key="none", max_retries=0, timeout=120)


def complete(client, prompt=PROMPT, **kwargs):
    return client.completions.create(model="demo", prompt=prompt, max_tokens=48, temperature=0, **kwargs)


def test_start_up_is_announced_with_a_line_to_try(server):
    text = server.log.read_text()
    assert f"curl {server.base}/v1/completions" in text
    print(text[text.index("ready after") :].splitlines()[0])


def test_completions_streaming_and_not(client):
    whole = complete(client).choices[0].text
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, stream=True))
    assert whole == streamed
    assert "self" in whole


def test_chat_streaming_and_not(client):
    ask = dict(model="demo", messages=CHAT, max_tokens=48, temperature=0)
    whole = client.chat.completions.create(**ask).choices[0].message.content
    chunks = client.chat.completions.create(stream=True, **ask)
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert whole == streamed
    assert "class" in whole


def test_log_probs_through_openai(client):
    choice = complete(client, logprobs=2).choices[0]
    assert len(choice.logprobs.token_logprobs) == 48
    assert all(len(top) >= 2 for top in choice.logprobs.top_logprobs)


def test_six_at_once_and_a_neighbour_that_hangs_up(client):
    """Five requests finish with the text they have alone while a sixth is dropped in mid-stream."""
    prompts = [PROMPT + f"\n    # {i}\n" for i in range(5)]
    alone = [complete(client, p).choices[0].text for p in prompts]
    together: dict[int, str] = {}

    def run(i: int) -> None:
        together[i] = complete(client, prompts[i]).choices[0].text

    threads = [threading.Thread(target=run, args=(i,)) for i in range(5)]
    dropped = client.completions.create(
        model="demo",
        prompt="def g():\n",
        max_tokens=2000,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(dropped))
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    dropped.close()
    for thread in threads:
        thread.join(120)
    assert [together[i] for i in range(5)] == alone


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": -1},
        {"top_p": 3},
        {"max_tokens": "many"},
        {"prompt": []},
        {"max_tokens": 10_000_000},
        {"prompt": [1, 999_999_999]},
        {"prompt": [[1, 2], [-1]]},
        {"logprobs": 1_000_000},
        {"logit_bias": {"5": 1e39}},
    ],
)
def test_malformed_request_is_a_4xx_and_the_server_goes_on(client, body):
    with pytest.raises(openai.APIStatusError) as refused:
        client.post(
            "/completions", body={"model": "demo", "prompt": "x", "max_tokens": 4} | body, cast_to=object
        )
    assert 400 <= refused.value.status_code < 500
    assert complete(client).choices[0].text


def test_an_empty_prompt_of_token_ids_is_refused(server, client):
    answer = requests.post(server.base + "/generate", json={"input_ids": [[]]}, timeout=60)
    assert answer.status_code == 400 and "empty" in answer.json()["error"]["message"]
    assert complete(client).choices[0].text


def test_acceptance_is_reported(server):
    params = {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}
    answer = requests.post(
        server.base + "/generate", json={"text": "def f(x):\n    ", "sampling_params": params}, timeout=60
    )
    meta = answer.json()["meta_info"]
    assert meta["spec_verify_ct"] < 40
    assert meta["spec_accept_length"] > 1.5


def test_sigterm_ends_every_process(server):
    assert server.stop(signal.SIGTERM) == 0
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), timeout=2)


@pytest.mark.slow
def test_ctrl_c_and_a_bad_flag(tmp_path):
    # With two OpenMP threads, as on any machine of two cores: had the launcher started them before it forks the
    # scheduler, the scheduler would hang.
    running = Script(tmp_path / "log", threads=2)
    running.wait_until_ready()
    assert running.stop(signal.SIGINT) == 0
    assert "installing" not in (tmp_path / "log").read_text(), "a later start must install nothing"
    refused = Script(tmp_path / "refused", "--speculative-ddtree-budget", "none")
    assert refused.process.wait(120) == 2
    assert (
        "error: --speculative-ddtree-budget: 'none' is not a whole number"
        in (tmp_path / "refused").read_text()
    )
